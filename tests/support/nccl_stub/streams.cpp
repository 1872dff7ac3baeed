// SPDX-License-Identifier: Apache-2.0
// Streams: the group at the head of each runs, the others wait for it.
#include "stub.hpp"

namespace stub {

World& world = *new World;
thread_local int device = 0;

void violation(const std::string& text) { world.violations.push_back(text); }

namespace {

void meet(Group& one, Group& other) {
  if (one.kernel == nullptr || other.kernel == nullptr || one.kernel == other.kernel) return;
  one.kernel->met.push_back(other.kernel->id);
  other.kernel->met.push_back(one.kernel->id);
}

// The groups of a communicator that run: those at the heads of its device's streams.
template <class Visit>
void each_running(Visit&& visit) {
  for (auto& [key, queue] : world.streams) {
    if (!queue.empty()) visit(queue.front());
  }
}

bool move_message(Group& group, Op& send) {
  Comm* from = group.comm;
  Op* recv = nullptr;
  Group* receiver = nullptr;
  each_running([&](Group& other) {
    if (other.comm->clique != from->clique || other.comm->rank != send.peer) return;
    for (Op& op : other.ops) {
      if (recv == nullptr && op.kind == Kind::Recv && !op.done && op.peer == from->rank) {
        recv = &op;
        receiver = &other;
      }
    }
  });
  if (recv == nullptr) return false;
  meet(group, *receiver);
  const size_t sent = send.count * type_size(send.dtype);
  if (sent != recv->count * type_size(recv->dtype)) {
    violation("message of " + std::to_string(sent) + " bytes from rank " +
              std::to_string(from->rank) + " to " + std::to_string(send.peer) + " meets a receive of " +
              std::to_string(recv->count * type_size(recv->dtype)));
  } else if (!world.settings["no_data"] && sent) {
    memcpy(recv->out, send.in, sent);
  }
  send.done = recv->done = true;
  return true;
}

bool run_collective(Group& group, Op& op) {
  Clique* clique = group.comm->clique;
  std::vector<std::pair<Comm*, Op*>> ranks(static_cast<size_t>(clique->size), {nullptr, nullptr});
  std::vector<Group*> groups;
  each_running([&](Group& other) {
    if (other.comm->clique != clique) return;
    for (Op& one : other.ops) {
      if (!is_message(one.kind) && !one.done && one.seq == op.seq) {
        ranks[static_cast<size_t>(other.comm->rank)] = {other.comm, &one};
        groups.push_back(&other);
      }
    }
  });
  for (const auto& rank : ranks) {
    if (rank.first == nullptr) return false;
  }
  execute(clique, ranks);
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < i; ++j) meet(*groups[i], *groups[j]);
  }
  for (const auto& rank : ranks) rank.second->done = true;
  return true;
}

}  // namespace

void advance() {
  for (bool moved = true; moved;) {
    moved = false;
    each_running([&](Group& group) {
      for (Op& op : group.ops) {
        if (op.done || op.kind == Kind::Recv) continue;
        const bool ran =
            op.kind == Kind::Send ? move_message(group, op) : run_collective(group, op);
        moved = moved || ran;
      }
    });
    for (auto& [key, queue] : world.streams) {
      bool finished = !queue.empty();
      if (finished) {
        for (const Op& op : queue.front().ops) finished = finished && op.done;
      }
      if (finished) {
        const auto kernel = queue.front().kernel;
        queue.pop_front();
        if (kernel != nullptr) kernel->done.store(true, std::memory_order_release);
        world.counters["kernels"]++;
        moved = true;
      }
    }
    for (auto at = world.streams.begin(); at != world.streams.end();) {
      at = at->first.first == -1 && at->second.empty() ? world.streams.erase(at) : std::next(at);
    }
  }
  world.changed.notify_all();
}

}  // namespace stub
