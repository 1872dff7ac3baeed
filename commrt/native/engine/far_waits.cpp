// SPDX-License-Identifier: Apache-2.0
#include "engine/far_waits.hpp"

#include <string>

#include "engine/comm.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

constexpr uint64_t field(int bits, int shift) { return low_bits(~uint64_t{0}, bits) << shift; }

// The fields of a mark that a record has, too.
uint64_t fields_of_record(uint64_t mark) {
  const int code = code_of(mark);
  uint64_t fields = field(kMarkCollBits, kMarkShift) | field(kMarkTypeBits, kMarkTypeShift);
  if (call_has_root(code)) fields |= field(kMarkRootBits, kMarkRootShift);
  const uint64_t reduction = low_bits(mark >> kMarkReductionShift, kMarkReductionBits);
  if (call_reduces(code) && reduction != kUserReduction) {
    fields |= field(kMarkReductionBits, kMarkReductionShift);
  }
  return fields;
}

}  // namespace

void FarWaits::tell(const Op& op) {
  const uint64_t mark = call_mark(op.plan->mark, op.seq);
  if ((mark & 1) == 0 || comm_.refusals.disturb()) return;
  for (int i = 0; i < comm_.size; ++i) {
    const int peer = (comm_.rank + 1 + next_++ % comm_.size) % comm_.size;
    if (comm_.link(peer).kind != LinkKind::Mpi) continue;
    comm_.p2p->tell_waits(peer, op.seq, mark);
    return;
  }
}

void FarWaits::hear(int source, uint64_t seq, uint64_t mark) {
  ahead_.erase(source);
  if (!compare(source, {seq, mark})) ahead_.insert_or_assign(source, Call{seq, mark});
}

void FarWaits::look() {
  for (auto it = ahead_.begin(); it != ahead_.end();) {
    it = compare(it->first, it->second) ? ahead_.erase(it) : std::next(it);
  }
}

// The mark of this rank's call of that number, as far as it can be compared with another one.
std::optional<uint64_t> FarWaits::own_mark(uint64_t seq, uint64_t theirs) const {
  if (const auto mark = comm_.mark_in_flight(seq)) return mark;
  const Record& record = comm_.records[seq % Comm::kRecords];
  if (record.seq != seq || record.start_ticks == 0 || record.device != kHost) return {};
  // The record's own type is that of what is moved: bytes, where boxes are.
  const uint64_t mine = call_mark(mark_of_fields(record.facts), seq);
  const uint64_t known = fields_of_record(mine) & fields_of_record(theirs);
  return (mine & known) | (theirs & ~known);
}

// False: this rank has not made that call yet.
bool FarWaits::compare(int source, const Call& theirs) {
  if (comm_.broken.load(std::memory_order_relaxed)) return true;
  if (theirs.seq >= comm_.next_seq) return false;
  // A call that ranks refuse is no difference.
  if (comm_.refusals.is_due() || comm_.refusals.disturb()) return true;
  const std::optional<uint64_t> mine = own_mark(theirs.seq, theirs.mark);
  const bool is_known = mine && (*mine & 1) != 0 && order_of(*mine) == order_of(theirs.mark);
  if (!is_known || *mine == theirs.mark) return true;
  const char* const name = name_of_call(code_of(*mine));
  const std::string why = std::string(name != nullptr ? name : "operation") + " #" +
                          std::to_string(theirs.seq) + " on " + comm_.name + ", rank " +
                          std::to_string(comm_.rank) + ": " +
                          describe_marks(source, theirs.mark, comm_.rank, *mine, theirs.seq);
  comm_.end_everywhere(theirs.seq, comm_.words_of_difference(why));
  return true;
}

void P2P::tell_waits(int rank, uint64_t seq, uint64_t mark) {
  answer(rank, {PacketKind::Waits, kAnyType, 0, 0, seq, mark, 0});
}

}  // namespace commrt
