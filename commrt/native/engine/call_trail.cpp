// SPDX-License-Identifier: Apache-2.0
#include "engine/call_trail.hpp"

#include <algorithm>

#include "engine/comm.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

constexpr uint64_t kBetweenNodes = 8;  // so many times rarer than on one node
constexpr size_t kMostTold = 64;

std::string described(int rank, const CallTrail::Entry& entry) {
  return "rank " + std::to_string(rank) + " called " + describe_mark(entry.mark);
}

}  // namespace

uint64_t CallTrail::mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

Trail* CallTrail::of(int member) const {
  return reinterpret_cast<Trail*>(comm_.arena + static_cast<size_t>(member) * comm_.region_nbytes +
                                  comm_.layout.trail) + which_;
}

Trail* CallTrail::own() {
  if (comm_.arena != nullptr) return of(comm_.member_of(comm_.rank));
  if (private_.empty()) private_ = std::vector<Trail>(1);
  return &private_.front();
}

void CallTrail::set_every(uint64_t calls) {
  every_ = calls;
  left_ = calls != 0 ? calls : ~uint64_t{0};
}

// False: it has been written over, or is about to be.
bool CallTrail::read(const Trail& trail, uint64_t index, Entry& entry) {
  const Trail::Slot& slot = trail.slots[index % kTrail];
  entry = {slot.seq.load(std::memory_order_relaxed), slot.sum.load(std::memory_order_relaxed),
           slot.mark.load(std::memory_order_relaxed), slot.length.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  return trail.num.load(std::memory_order_relaxed) < index + kTrail;
}

// Finds the call of a number among the last ones.
bool CallTrail::find(const Trail& trail, uint64_t seq, Entry& entry) {
  const uint64_t num = trail.num.load(std::memory_order_acquire);
  const uint64_t oldest = num > kTrail ? num - kTrail : 0;
  if (num == 0 || !read(trail, num - 1, entry) || entry.seq < seq) return false;
  // There, where a library has run all of the latest calls.
  const uint64_t back = entry.seq - seq;
  if (back < num - oldest && read(trail, num - 1 - back, entry) && entry.seq == seq) return true;
  for (uint64_t index = num; index-- > oldest;) {
    if (!read(trail, index, entry) || entry.seq < seq) return false;
    if (entry.seq == seq) return true;
  }
  return false;
}

CallTrail::Recall CallTrail::recall(uint64_t seq, Entry& entry) {
  if (num_ == 0) return Recall::Never;
  const Trail& mine = *own();
  if (find(mine, seq, entry)) return Recall::Found;
  const uint64_t oldest = num_ > kTrail ? num_ - kTrail + 1 : 0;
  Entry first;
  const bool is_old = oldest != 0 && (!read(mine, oldest, first) || seq < first.seq);
  return is_old ? Recall::Forgotten : Recall::Never;
}

bool CallTrail::compare_now() {
  left_ = every_;
  if (++comparisons_ % kBetweenNodes == 0) tell_other_node();
  const bool agree = marks_agree();
  return (agree && told_.empty() && found_.empty()) || look();
}

// Leaves a mark, and reads those that others have left there. Who has not come so far yet will read
// this one, unless it waits in a call that differs: one that is late is looked at.
bool CallTrail::marks_agree() {
  if (comm_.arena == nullptr) return true;
  peers_.resize(static_cast<size_t>(comm_.size));
  const uint64_t hash = mixed(sum_ ^ latest_);
  const auto mark = [](Trail& trail, uint64_t number) -> Trail::Mark& {
    return trail.marks[number % Trail::kMarks];
  };
  const auto has = [&](Trail& trail, uint64_t number) {
    return mark(trail, number).number.load(std::memory_order_acquire) == number;
  };
  Trail::Mark& mine = mark(*trail_, comparisons_);
  mine.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  mine.hash.store(hash, std::memory_order_relaxed);
  mine.number.store(comparisons_, std::memory_order_release);
  // Of two ranks that come there at once, one sees the other's.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const int peer : comm_.members) {
    if (peer == comm_.rank) continue;
    Trail& its = *of(comm_.member_of(peer));
    if (!has(its, comparisons_)) {
      if (comparisons_ > 1 && !has(its, comparisons_ - 1)) return false;
      continue;
    }
    const uint64_t theirs = mark(its, comparisons_).hash.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!has(its, comparisons_)) continue;  // written over
    if (theirs != hash) return false;
    Peer& known = peers_[static_cast<size_t>(peer)];
    known.is_known = true;
    known.equal_until = std::max(known.equal_until, latest_);
  }
  return true;
}

bool CallTrail::look_in_wait() {
  if (every_ == 0 || num_ == 0) return true;
  tell_other_node();
  return look();
}

bool CallTrail::look() {
  peers_.resize(static_cast<size_t>(comm_.size));
  while (found_.empty() && !told_.empty() && told_.front().second.seq <= latest_) {
    const auto [source, told] = told_.front();
    told_.pop_front();
    hear(source, told);
  }
  for (size_t i = 0; i < comm_.members.size() && found_.empty(); ++i) {
    if (comm_.members[i] != comm_.rank) found_ = compare(comm_.members[i]);
  }
  return found_.empty();
}

void CallTrail::tell_other_node() {
  const int next = (comm_.rank + 1) % comm_.size;
  Entry latest;
  if (num_told_ == num_ || comm_.link(next).kind != LinkKind::Mpi) return;
  num_told_ = num_;
  if (read(*trail_, num_ - 1, latest)) comm_.p2p->tell_called(next, which_, latest);
}

void CallTrail::hear(int source, const Entry& told) {
  if (every_ == 0 || !found_.empty()) return;
  if (num_ == 0 || told.seq > latest_) {
    if (told_.size() < kMostTold) told_.emplace_back(source, told);
    return;
  }
  peers_.resize(static_cast<size_t>(comm_.size));
  Entry mine;
  // Where this rank is far ahead, a later entry says the same.
  if (find(*own(), told.seq, mine)) found_ = differ(source, mine, told, nullptr);
}

// Compares the latest call that both ranks have made.
std::string CallTrail::compare(int peer) {
  const Trail& trail = *of(comm_.member_of(peer));
  const uint64_t num = trail.num.load(std::memory_order_acquire);
  Entry mine, theirs;
  if (num == 0 || !read(trail, num - 1, theirs)) return {};
  if (theirs.seq > latest_) {
    if (!read(*own(), num_ - 1, mine) || !find(trail, mine.seq, theirs)) return {};
  } else if (!find(*own(), theirs.seq, mine)) {
    return {};
  }
  return differ(peer, mine, theirs, &trail);
}

std::string CallTrail::differ(int peer, const Entry& mine, const Entry& theirs, const Trail* trail) {
  Peer& known = peers_[static_cast<size_t>(peer)];
  const auto are_equal = [](const Entry& a, const Entry& b) {
    return a.mark == b.mark && a.length == b.length;
  };
  if (mine.sum == theirs.sum && are_equal(mine, theirs)) {
    known.is_known = true;
    known.equal_until = std::max(known.equal_until, mine.seq);
    return {};
  }
  if (is_refused(trail)) return {};  // the communicator ends by that
  // The first one that both still have.
  Entry first_mine = mine, first_theirs = theirs;
  for (uint64_t back = 1; trail != nullptr && back <= std::min<uint64_t>(num_, kTrail); ++back) {
    Entry ours, its;
    if (!read(*own(), num_ - back, ours) || !find(*trail, ours.seq, its)) continue;
    if (known.is_known && ours.seq <= known.equal_until) break;
    if (!are_equal(ours, its)) first_mine = ours, first_theirs = its;
  }
  std::string said;
  if (!are_equal(first_mine, first_theirs)) {
    said = described(peer, first_theirs) + " and " + described(comm_.rank, first_mine) +
           " as operation #" + std::to_string(first_mine.seq);
    if (first_mine.mark == first_theirs.mark) {
      const bool of_counts = ((first_theirs.length | first_mine.length) & kOfCounts) != 0;
      said += of_counts ? ", of different counts"
                        : ", of " + std::to_string(first_theirs.length) + " and of " +
                              std::to_string(first_mine.length) + " elements";
    }
  } else {
    said = "rank " + std::to_string(peer) + " and rank " + std::to_string(comm_.rank) +
           " made different calls " +
           (known.is_known ? "behind operation #" + std::to_string(known.equal_until) + " and " : "") +
           "up to operation #" + std::to_string(mine.seq);
  }
  return said + ". A library ran them, which compares nothing: their results, and those of later "
                "calls, may be wrong. Let all ranks make the same calls in the same order "
                "(COMMRT_DEBUG=check compares them before anything is sent)";
}

// True if a rank has refused a call that this rank or the other one gave to the library.
bool CallTrail::is_refused(const Trail* trail) {
  return comm_.refusals.any([&](uint64_t seq) {
    Entry entry;
    return find(*own(), seq, entry) || (trail != nullptr && find(*trail, seq, entry));
  });
}

void P2P::tell_called(int rank, int trail, const CallTrail::Entry& entry) {
  answer(rank, {PacketKind::Called, kAnyType, trail, entry.length, entry.seq, entry.sum, entry.mark});
}

}  // namespace commrt
