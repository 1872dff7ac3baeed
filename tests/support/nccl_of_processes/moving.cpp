// SPDX-License-Identifier: Apache-2.0
// What a group does on its rank: bytes to and from the other ranks, through channels, in pieces.
//
// A collective goes directly: each rank sends what the others need of it, and reduces, in the order
// of the ranks, what it got. Before its data each call sends every rank what it is, so ranks that
// call different things are found.
#include <cstring>
#include <functional>
#include <tuple>

#include "library.hpp"

namespace stub {

namespace {

// What goes before the data of a call.
struct Told {
  Kind kind;
  int dtype, redop, root;
  uint64_t count, number;
  double factor;
  int scaled;
};

std::string text_of(const Told& told) {
  return std::string(name_of(told.kind)) + " of " + std::to_string(told.count) + " elements of type " +
         std::to_string(told.dtype) + ", reduction " + std::to_string(told.redop);
}

bool fits(const Told& own, const Told& other) {
  if (is_message(own.kind)) {
    return own.count * type_size(own.dtype) == other.count * type_size(other.dtype);
  }
  return own.kind == other.kind && own.dtype == other.dtype && own.root == other.root &&
         own.count == other.count && own.scaled == other.scaled &&
         (own.scaled || own.redop == other.redop);
}

struct Piece {
  char* at;
  size_t left;
  std::function<void()> then;  // once it has moved
};

// What goes to or comes from one rank, in order.
struct Lane {
  Channel* channel;
  int peer;
  bool is_sending;
  std::deque<Piece> pieces;
};

class Moving {
 public:
  Moving(Comm& comm, const std::vector<Op>& ops)
      : comm_(comm), place_(*comm.place), me_(comm.rank), size_(comm.size) {
    for (const Op& op : ops) is_message(op.kind) ? add_message(op) : add_collective(op);
  }

  // False where the communicator was aborted meanwhile.
  bool run() {
    while (true) {
      const uint32_t seen = place_.seat(me_).bell.load();
      if (comm_.has_ended.load()) return false;
      bool is_done = true, has_moved = false;
      for (auto& [key, lane] : lanes_) {
        has_moved = step(lane) || has_moved;
        is_done = is_done && lane.pieces.empty();
      }
      if (is_done && !differs_) break;
      if (!has_moved) place_.wait(me_, seen);
    }
    for (const auto& end : ends_) end();
    return true;
  }

 private:
  static const char* bytes(const void* at) { return static_cast<const char*>(at); }

  Lane& lane(bool of_messages, bool is_sending, int peer) {
    const auto [at, is_new] = lanes_.try_emplace({of_messages, is_sending, peer});
    if (is_new) {
      Channel& channel = is_sending ? place_.channel(of_messages, me_, peer)
                                    : place_.channel(of_messages, peer, me_);
      at->second = {&channel, peer, is_sending, {}};
    }
    return at->second;
  }

  bool step(Lane& lane) {
    bool has_moved = false;
    while (!lane.pieces.empty()) {
      Piece& piece = lane.pieces.front();
      const size_t now = lane.is_sending ? lane.channel->push(piece.at, piece.left)
                                         : lane.channel->pull(piece.at, piece.left);
      piece.at += now;
      piece.left -= now;
      if (now != 0) {
        has_moved = true;
        place_.ring(lane.peer);
      }
      if (piece.left != 0) break;
      const auto then = std::move(piece.then);
      lane.pieces.pop_front();
      if (then) then();
    }
    return has_moved;
  }

  Told told_of(const Op& op) {
    // A message's root is its peer, which the other end has no need of.
    return {op.kind, op.dtype, op.redop, op.peer, op.count, 0, op.factor, op.scaled};
  }

  void send_told(Lane& lane, const Told& own) {
    tolds_.push_back(own);
    lane.pieces.push_back({reinterpret_cast<char*>(&tolds_.back()), sizeof(Told), nullptr});
  }

  // `then` is given what the other rank said, where that fits.
  void recv_told(Lane& lane, const Told& own, std::function<void(const Told&)> then = nullptr) {
    Told* const other = &tolds_.emplace_back();
    const int peer = lane.peer;
    lane.pieces.push_back({reinterpret_cast<char*>(other), sizeof(Told), [=] {
      if (fits(own, *other)) {
        if (then) then(*other);
        return;
      }
      // As in the real library, what they do from here on is anybody's guess: it ends by an abort.
      differs_ = true;
      complain("ranks differ: rank " + std::to_string(me_) + " has " + text_of(own) + ", rank " +
               std::to_string(peer) + " has " + text_of(*other));
    }});
  }

  void send(Lane& lane, const void* at, size_t nbytes) {
    lane.pieces.push_back({const_cast<char*>(bytes(at)), nbytes, nullptr});
  }
  void recv(Lane& lane, void* at, size_t nbytes) {
    lane.pieces.push_back({static_cast<char*>(at), nbytes, nullptr});
  }

  void add_message(const Op& op) {
    const size_t nbytes = op.count * type_size(op.dtype);
    if (op.peer == me_) {
      (op.kind == Kind::Send ? own_sends_ : own_recvs_).push_back(&op);
      if (own_sends_.empty() || own_recvs_.empty()) return;
      const Op* const from = own_sends_.front();
      const Op* const to = own_recvs_.front();
      own_sends_.pop_front();
      own_recvs_.pop_front();
      ends_.push_back([=] { memmove(to->out, from->in, to->count * type_size(to->dtype)); });
      return;
    }
    Lane& through = lane(true, op.kind == Kind::Send, op.peer);
    if (op.kind == Kind::Send) {
      send_told(through, told_of(op));
      send(through, op.in, nbytes);
    } else {
      recv_told(through, told_of(op));
      recv(through, op.out, nbytes);
    }
  }

  void add_collective(const Op& op) {
    const size_t block = op.count * type_size(op.dtype);
    const bool is_root = op.peer == me_;
    const auto at = [&](int rank) { return static_cast<size_t>(rank) * block; };
    const char* const in = bytes(op.in);
    char* const out = static_cast<char*>(op.out);
    const bool is_reduction = op.kind == Kind::AllReduce || op.kind == Kind::ReduceScatter ||
                              op.kind == Kind::Reduce;
    const char* own = in + (op.kind == Kind::ReduceScatter || op.kind == Kind::AlltoAll ||
                            op.kind == Kind::Scatter ? at(me_) : 0);
    if (is_reduction && (op.kind != Kind::Reduce || is_root)) {
      auto parts = std::make_shared<std::vector<Part>>(static_cast<size_t>(size_));
      (*parts)[static_cast<size_t>(me_)] = {own, op.scaled, op.factor};
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == me_) continue;
        temporary_.emplace_back(block);
        char* const there = temporary_.back().data();
        Lane& from = lane(false, false, peer);
        recv_told(from, told_of(op), [=](const Told& said) {
          (*parts)[static_cast<size_t>(peer)] = {there, op.scaled, said.factor};
        });
        recv(from, there, block);
      }
      ends_.push_back([=] {
        if (!reduce_parts(op.dtype, op.redop, *parts, op.count, op.out)) complain("no such type");
      });
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == me_) continue;
      Lane& to = lane(false, true, peer);
      send_told(to, told_of(op));
      switch (op.kind) {
        case Kind::AllReduce:
        case Kind::AllGather: send(to, in, block); break;
        case Kind::Reduce:
        case Kind::Gather:
          if (peer == op.peer) send(to, in, block);
          break;
        case Kind::Broadcast:
          if (is_root) send(to, in, block);
          break;
        case Kind::Scatter:
          if (is_root) send(to, in + at(peer), block);
          break;
        default: send(to, in + at(peer), block); break;
      }
      if (is_reduction && (op.kind != Kind::Reduce || is_root)) continue;
      Lane& from = lane(false, false, peer);
      recv_told(from, told_of(op));
      const bool is_from_root = peer == op.peer;
      switch (op.kind) {
        case Kind::Broadcast:
        case Kind::Scatter:
          if (is_from_root) recv(from, out, block);
          break;
        case Kind::Gather:
          if (is_root) recv(from, out + at(peer), block);
          break;
        case Kind::AllGather:
        case Kind::AlltoAll: recv(from, out + at(peer), block); break;
        default: break;
      }
    }
    if (is_reduction || (op.kind != Kind::AllGather && op.kind != Kind::AlltoAll && !is_root)) return;
    const bool is_one_block = op.kind == Kind::Broadcast || op.kind == Kind::Scatter;
    char* const to = is_one_block ? out : out + at(me_);
    ends_.push_back([=] {
      if (to != own) memmove(to, own, block);
    });
  }

  Comm& comm_;
  const Place& place_;
  const int me_, size_;
  std::map<std::tuple<bool, bool, int>, Lane> lanes_;
  std::deque<Told> tolds_;
  std::deque<std::vector<char>> temporary_;
  std::deque<const Op*> own_sends_, own_recvs_;
  std::vector<std::function<void()>> ends_;
  bool differs_ = false;
};

// A communicator's groups run one at a time: those of calls in the calls' order. False where it
// has ended.
bool enter(const Group& group) {
  Comm& comm = *group.comm;
  std::unique_lock<std::mutex> own(comm.mutex);
  comm.changed.wait(own, [&] {
    if (comm.has_ended.load()) return true;
    return !comm.is_running && (group.is_captured || comm.turn == group.ticket);
  });
  if (comm.has_ended.load()) return false;
  comm.is_running = true;
  return true;
}

void leave(const Group& group, bool has_run) {
  Comm& comm = *group.comm;
  std::lock_guard<std::mutex> own(comm.mutex);
  if (has_run) comm.is_running = false;
  if (!group.is_captured) comm.turn++;
  comm.changed.notify_all();
}

void note_beginning(Comm* comm) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.counters["kernels"]++;
  for (const Comm* other : world.running) {
    if (other->ordinal != comm->ordinal || other->has_ended.load()) continue;
    complain("kernels of two communicators run at the same time on a device: where there is no "
             "room for both, ranks may begin with different ones");
  }
  world.running.insert(comm);
}

bool was_destroyed(const Comm& comm) {
  std::lock_guard<std::mutex> lock(world.mutex);
  return comm.life == Life::Destroyed;
}

void note_end(Comm* comm) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.running.erase(comm);
}

// The group's calls with their buffers as the card finds them.
bool find_buffers(const Group& group, std::vector<Op>* ops) {
  *ops = group.ops;
  for (Op& op : *ops) {
    const auto [read, written] = touched(op, group.comm->rank, group.comm->size);
    op.in = found_by_card(op.in, read);
    op.out = found_by_card(op.out, written);
    if ((read == 0 || op.in != nullptr) && (written == 0 || op.out != nullptr)) continue;
    complain(std::string(name_of(op.kind)) + " of memory that is not allocated");
    return false;
  }
  return true;
}

}  // namespace

void run_group(void* argument) {
  auto* const group = static_cast<Group*>(argument);
  const bool runs = enter(*group);
  if (runs) {
    note_beginning(group->comm);
    std::vector<Op> ops;
    if (find_buffers(*group, &ops)) Moving(*group->comm, ops).run();
    note_end(group->comm);
  } else if (was_destroyed(*group->comm)) {
    complain("work was launched after the end of its communicator");
  }
  leave(*group, runs);
  // A graph may run it again.
  if (!group->is_captured) delete group;
}

}  // namespace stub
