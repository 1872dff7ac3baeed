// SPDX-License-Identifier: Apache-2.0
// How ranks find out what became of a refused call of the library's, and make it of scratch memory.
#include "engine/stand_ins.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>

#include "engine/collective_codes.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/mpi_turn.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

constexpr int32_t kUnknownCount = -1;
constexpr const char* kMakesNone = "a rank has left that was to make it in its place";

bool differs_in_counts(int coll) {
  return coll == kAllgatherv || coll == kAlltoallv || coll == kGatherv || coll == kScatterv ||
         coll == kReduceScatterv;
}

// True if each rank knows the counts of all.
bool shares_counts(int coll) { return coll == kAllgatherv || coll == kReduceScatterv; }

DType type_of(uint64_t mark) {
  return static_cast<DType>(low_bits(mark >> kMarkTypeShift, kMarkTypeBits));
}

int root_of(uint64_t mark) {
  return static_cast<int>(low_bits(mark >> kMarkRootShift, kMarkRootBits));
}

template <class List, class Test>
void remove_where(List& list, Test test) {
  list.erase(std::remove_if(list.begin(), list.end(), test), list.end());
}

// Returns where blocks of these lengths begin, one behind the other.
std::vector<int> starts_of(const std::vector<int>& counts) {
  std::vector<int> at(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), at.begin(), 0);
  return at;
}

int64_t sum_of(const std::vector<int>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace

bool StandIns::take(const Op& op) const {
  const Plan& plan = *op.plan;
  return library_.comm != 0 && plan.native && plan.gloo == nullptr && op.gate.opened == nullptr;
}

bool StandIns::hold_back(uint64_t seq) const {
  return std::any_of(places_.begin(), places_.end(),
                     [seq](const Place& one) { return one.seq < seq; });
}

StandIns::Place* StandIns::find(uint64_t seq) {
  const auto found = std::find_if(places_.begin(), places_.end(),
                                  [seq](const Place& one) { return one.seq == seq; });
  return found == places_.end() ? nullptr : &*found;
}

StandIns::Place& StandIns::open(uint64_t seq) {
  const auto after = std::find_if(places_.begin(), places_.end(),
                                  [seq](const Place& one) { return one.seq > seq; });
  const auto size = static_cast<size_t>(comm_.size);
  Place& place = *places_.insert(after, {seq, std::vector<Said>(size), {}});
  place.counts.resize(size);
  comm_.engine.wake();  // nobody may wait for it
  for (const Told& one : told_) {
    if (one.seq == seq) place.said[static_cast<size_t>(one.rank)].part = one.part;
  }
  return place;
}

void StandIns::refuse(uint64_t seq) {
  if (library_.comm != 0 && comm_.size > 1) open(seq);
}

void StandIns::leave(const Op& op) {
  if (!take(op) || op.left_trail_ || find(op.seq) != nullptr) return;
  open(op.seq);
  for (int rank = 0; rank < comm_.size; ++rank) {
    if (rank != comm_.rank) tell(rank, op.seq, Part::Left, op.error);
  }
}

void StandIns::tell(int rank, uint64_t seq, Part part, const std::string& why) {
  Said said;
  said.part = part;
  comm_.p2p->tell_part(rank, seq, &said, sizeof said, why);
}

void StandIns::hear_refused(int rank, uint64_t seq) {
  if (library_.comm == 0) return;
  if (Place* const place = find(seq)) {
    place->said[static_cast<size_t>(rank)].part = Part::Refused;
  } else {
    answer(rank, seq);
  }
}

std::string StandIns::why_left(const Op& op) const {
  for (const Told& one : told_) {
    if (one.seq == op.seq && one.part == Part::Left && take(op)) return one.why;
  }
  return {};
}

void StandIns::hear(int rank, uint64_t seq, const unsigned char* bytes, size_t nbytes) {
  Said said;
  if (nbytes < sizeof said) return;
  std::memcpy(&said, bytes, sizeof said);
  const unsigned char* const rest = bytes + sizeof said;
  const size_t left = nbytes - sizeof said;
  const bool is_told = said.part == Part::Left || said.part == Part::Gone;
  if (is_told && find(seq) == nullptr) {
    const std::string why(reinterpret_cast<const char*>(rest), left);
    if (seq >= comm_.next_seq) {
      told_.push_back({rank, seq, said.part, why});
      return comm_.refusals.see();
    }
    if (said.part == Part::Gone) {
      if (find_begun(seq) != nullptr) end_communicator(seq, kMakesNone);
      return;
    }
    comm_.refusals.end_after(seq, why);
    if (find(seq) == nullptr) return answer(rank, seq);
  }
  Place* const place = find(seq);
  if (place == nullptr) return;
  const auto at = static_cast<size_t>(rank);
  place->said[at] = said;
  if (is_told) return;
  place->counts[at].resize(left / sizeof(int));
  if (!place->counts[at].empty()) std::memcpy(place->counts[at].data(), rest, left);
}

// An operation of that number that the library has.
const Op* StandIns::find_begun(uint64_t seq) const {
  for (const auto& one : comm_.active_) {
    const bool is_its = one->seq == seq && !one->is_agreement && one->p2p == nullptr;
    if (is_its && take(*one) && one->left_trail_ && !one->finished()) return one.get();
  }
  return nullptr;
}

// Tells a rank that gave the library nothing what became of the operation here.
void StandIns::answer(int rank, uint64_t seq) {
  Said said;
  std::vector<int> counts;
  const Op* const op = find_begun(seq);
  CallTrail::Entry entry;
  const CallTrail::Recall known =
      op == nullptr ? comm_.trails.by_host.recall(seq, entry) : CallTrail::Recall::Found;
  if (op != nullptr) {
    describe(*op, rank, said, counts);
  } else if (known == CallTrail::Recall::Found) {
    describe(entry, rank, said);
  } else {
    said.part = known == CallTrail::Recall::Forgotten ? Part::Unknown : Part::Elsewhere;
  }
  const std::string rest(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(int));
  comm_.p2p->tell_part(rank, seq, &said, sizeof said, rest);
}

// A call that the library has, here.
void StandIns::describe(const Op& op, int rank, Said& said, std::vector<int>& counts) const {
  const Plan& plan = *op.plan;
  const NativeCall& call = plan.call;
  const auto there = static_cast<size_t>(rank), here = static_cast<size_t>(comm_.rank);
  said.part = Part::Begun;
  said.in_place = static_cast<const void*>(op.in) == static_cast<void*>(op.out);
  said.mark = plan.mark;
  said.length = call.length;
  if (!differs_in_counts(plan.coll)) return;
  said.yours = call.send_counts[there];
  said.mine = plan.coll == kAlltoallv ? call.recv_counts[there] : call.send_counts[here];
  if (shares_counts(plan.coll)) counts = call.recv_counts;
}

// A call that was over here when this rank heard that others have refused it.
void StandIns::describe(const CallTrail::Entry& entry, int rank, Said& said) const {
  said.part = Part::Begun;
  said.mark = entry.mark - (call_mark(0, entry.seq));
  said.length = entry.length;
  const int coll = code_of(said.mark);
  if (!differs_in_counts(coll)) return;
  said.mine = said.yours = kUnknownCount;
  const Record& record = comm_.records[entry.seq % Comm::kRecords];
  const bool is_its = record.seq == entry.seq && record.start_ticks != 0;
  const bool is_root = comm_.rank == root_of(said.mark);
  // It was over without the other rank's part, so nothing was to come from there.
  if (coll == kGatherv && is_root) said.yours = 0;
  if (coll == kScatterv && !is_root) said.mine = 0;
  for (const auto& [seq, plan] : remembered_) {
    if (plan == nullptr || seq != entry.seq) continue;
    said.yours = plan->call.send_counts[static_cast<size_t>(rank)];
    if (coll == kAlltoallv) said.mine = plan->call.recv_counts[static_cast<size_t>(rank)];
  }
  if (coll == kGatherv && !is_root && is_its) {
    said.mine = static_cast<int32_t>(record.count * static_cast<int64_t>(item_size(type_of(said.mark))));
  }
}

void StandIns::work() {
  const auto is_over = [](const auto& op) { return op->finished(); };
  remove_where(begun_, is_over);
  if (comm_.broken.load(std::memory_order_relaxed)) {
    places_.clear();
    told_.clear();
    return;
  }
  remove_where(told_, [this](const Told& one) { return one.seq < comm_.next_seq; });
  for (size_t i = 0; i < places_.size();) {
    if (!settle(places_[i])) {
      ++i;
    } else if (i < places_.size()) {  // it has not ended the communicator
      places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

// True once a place is to be open no more.
bool StandIns::settle(Place& place) {
  const Said* first = nullptr;
  bool is_unheard = false, is_unknown = false, is_gone = false;
  for (int rank = 0; rank < comm_.size; ++rank) {
    if (rank == comm_.rank) continue;
    const Said& one = place.said[static_cast<size_t>(rank)];
    if (one.part == Part::Elsewhere) return true;
    is_unheard = is_unheard || one.part == Part::Unheard;
    is_unknown = is_unknown || one.part == Part::Unknown;
    is_gone = is_gone || one.part == Part::Gone;
    const bool tells_more = first == nullptr || place.counts[static_cast<size_t>(rank)].size() != 0;
    if (one.part == Part::Begun && tells_more) first = &one;
  }
  if (is_unheard) return false;
  if (first == nullptr && !is_unknown) return true;  // the library was given nothing
  // The library takes calls in their order.
  const bool waits = std::any_of(comm_.active_.begin(), comm_.active_.end(), [&](const auto& op) {
    return op->seq < place.seq && op->plan->native && op->plan->gloo == nullptr &&
           !op->left_trail_ && !op->is_over();
  });
  if (waits || &place != &places_.front()) return false;
  if (first != nullptr && is_gone) {
    end_communicator(place.seq, kMakesNone);
    return true;
  }
  if (first == nullptr) {
    end_communicator(place.seq, "no rank knows any more whether the MPI library has run it");
    return true;
  }
  try {
    begin(place, *first);
  } catch (const std::bad_alloc&) {
    end_communicator(place.seq, "there is no memory to make it in its place");
  }
  return true;
}

// Gives the library the call, with memory of this rank's own.
void StandIns::begin(const Place& place, const Said& first) {
  auto plan = std::make_shared<Plan>();
  plan->coll = code_of(first.mark);
  plan->dtype = type_of(first.mark);
  const uint64_t reduction = low_bits(first.mark >> kMarkReductionShift, kMarkReductionBits);
  plan->root = call_has_root(plan->coll) ? root_of(first.mark) : 0;
  plan->native = true;
  plan->mark = first.mark;
  plan->label = "mpi/native";
  NativeCall& call = plan->call;
  call.comm = library_.comm;
  call.datatype = library_.byte;
  call.length = first.length;
  call.hash = CallTrail::hash_of(first.mark, first.length);
  const auto type = static_cast<size_t>(plan->dtype);
  if (call_reduces(plan->coll)) {
    plan->itemsize = item_size(plan->dtype);
    const bool has_both = type < library_.types.size() && reduction < library_.reductions.size();
    call.datatype = has_both ? library_.types[type] : 0;
    call.op = has_both ? library_.reductions[reduction] : 0;
  }
  if (!describe_lengths(place, first, *plan)) {
    return end_communicator(place.seq, "no rank knows its lengths any more");
  }
  const size_t in_nbytes = static_cast<size_t>(plan->in_elems) * plan->itemsize;
  const size_t out_nbytes = static_cast<size_t>(plan->out_elems) * plan->itemsize;
  std::unique_ptr<unsigned char[]> scratch(new unsigned char[in_nbytes + out_nbytes + 2]());
  const bool in_place =
      plan->coll == kBcast || (first.in_place && (plan->coll == kAllreduce || plan->coll == kScan ||
                                                  plan->coll == kExscan));
  auto op = std::make_shared<Op>();
  op->comm = &comm_;
  op->seq = place.seq;
  op->bind(plan, scratch.get() + (in_place ? in_nbytes + 1 : 0), scratch.get() + in_nbytes + 1);
  op->tmp_storage = std::move(scratch);
  const MpiTurn turn(comm_.engine.mpi_device());
  // A pass may be under way that has left an operation where it is: those behind it still wait.
  const bool was_refused = comm_.native_refused_;
  comm_.native_refused_ = false;
  op->advance_native(kNoLimit);
  comm_.native_refused_ = comm_.native_refused_ || was_refused;
  if (op->finished()) return;
  begun_.push_back(op);
  comm_.active_.insert(comm_.active_.begin(), std::move(op));
}

// Sets the lengths of this rank's part. False: nobody knows them.
bool StandIns::describe_lengths(const Place& place, const Said& first, Plan& plan) const {
  NativeCall& call = plan.call;
  const auto size = static_cast<int64_t>(comm_.size);
  const auto own = static_cast<size_t>(comm_.rank), root = static_cast<size_t>(plan.root);
  if (!differs_in_counts(plan.coll)) {
    const auto one = static_cast<int64_t>(first.length), all = one * size;
    call.count = static_cast<int>(one);
    const bool gives_all = plan.coll == kReduceScatter || plan.coll == kAlltoall || plan.coll == kScatter;
    const bool gets_all = plan.coll == kAllgather || plan.coll == kAlltoall || plan.coll == kGather;
    plan.in_elems = gives_all ? all : one;
    plan.out_elems = gets_all ? all : one;
    return true;
  }
  std::vector<int>& to = call.send_counts;
  std::vector<int>& from = call.recv_counts;
  to.assign(static_cast<size_t>(size), 0);
  from = to;
  // A rank that has not begun it, either, exchanges nothing with this one.
  for (size_t rank = 0; rank < place.said.size(); ++rank) {
    const Said& one = place.said[rank];
    if (one.part != Part::Begun && one.part != Part::Unknown) continue;
    const bool counts = plan.coll == kAlltoallv || (!shares_counts(plan.coll) &&
                                                   (rank == root || own == root));
    if (!counts) continue;
    // A root knows the counts of all; others know their own.
    const int32_t told = rank == root && plan.coll != kAlltoallv ? one.yours : one.mine;
    if (one.part == Part::Unknown || told == kUnknownCount) return false;
    to[rank] = told;
    from[rank] = plan.coll == kAlltoallv ? one.yours : told;
  }
  if (shares_counts(plan.coll)) {
    const auto known = std::find_if(place.counts.begin(), place.counts.end(), [&](const auto& one) {
      return one.size() == static_cast<size_t>(size);
    });
    if (known == place.counts.end()) return false;
    to = from = *known;
    call.count = to[own];
  } else if (plan.coll != kAlltoallv) {
    call.count = own == root ? 0 : to[root];
  }
  call.send_at = starts_of(to);
  call.recv_at = starts_of(from);
  const bool is_root = own == root;
  const int64_t own_part = call.count;
  switch (plan.coll) {
    case kAllgatherv: plan.in_elems = own_part, plan.out_elems = sum_of(from); break;
    case kReduceScatterv: plan.in_elems = sum_of(from), plan.out_elems = own_part; break;
    case kGatherv: plan.in_elems = own_part, plan.out_elems = is_root ? sum_of(from) : 0; break;
    case kScatterv: plan.in_elems = is_root ? sum_of(to) : 0, plan.out_elems = own_part; break;
    default: plan.in_elems = sum_of(to), plan.out_elems = sum_of(from);
  }
  return true;
}

void StandIns::end_communicator(uint64_t seq, const std::string& why) {
  comm_.end_everywhere(seq, "a rank has refused operation #" + std::to_string(seq) + ", and " + why +
                                "; it cannot be taken back here, so the communicator ends");
  places_.clear();
  told_.clear();
}

void StandIns::end() {
  remove_where(begun_, [](const auto& op) { return op->finished(); });
  if (comm_.broken.load(std::memory_order_relaxed) || (places_.empty() && begun_.empty())) return;
  const auto is_own = [this](const auto& op) {
    return std::find(begun_.begin(), begun_.end(), op) != begun_.end();
  };
  if (!std::all_of(comm_.active_.begin(), comm_.active_.end(), is_own)) return;
  if (!begun_.empty()) return end_communicator(begun_.front()->seq, kMakesNone);
  for (const Place& place : places_) {
    for (int rank = 0; rank < comm_.size; ++rank) {
      if (rank != comm_.rank) tell(rank, place.seq, Part::Gone, {});
    }
  }
  places_.clear();
  comm_.break_down("this rank has refused a call, and has left before the others came to it");
  comm_.p2p->progress();
}

// True once the library is done with the arrays of a call that others have refused.
bool Op::has_been_let_go() {
  if (!native_started_ || plan->gloo != nullptr) return true;
  MpiStatus status;
  int flag = 0;
  const int rc = mpi().test(&native_request_, &flag, &status);
  if (rc != 0) fail_mpi("MPI_Test", rc, "the MPI library failed a collective that a rank has refused");
  if (rc != 0 || !flag) return false;
  native_started_ = false;
  return true;
}

}  // namespace commrt
