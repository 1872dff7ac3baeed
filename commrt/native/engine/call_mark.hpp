// SPDX-License-Identifier: Apache-2.0
// The mark of a call, which its messages carry: operation, element type, reduction, root, and the
// call's place in the order of calls. An operation without a root has a number of more facts in the
// root's place: of the algorithm and its parameters, or of a halo's widths, or of two layouts.
//
// A message says in one word that it is there, that it is the expected one of its pair, and that
// it belongs to the call that its receiver makes: the word is the message's id plus the mark. Both
// sides add up the same, so a right message costs one comparison, as it would without a mark. A
// receiver that waits in vain takes the sum apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "types.hpp"

namespace commrt {

// From the low end: the one that tells a message's id from a line that was never written, then
// the fields. Ids may grow into them: both sides compute modulo 2^64.
constexpr int kMarkShift = 16;
constexpr int kMarkCollBits = 7, kMarkTypeBits = 5, kMarkReductionBits = 4, kMarkRootBits = 16;
constexpr int kMarkTypeShift = kMarkShift + kMarkCollBits;
constexpr int kMarkReductionShift = kMarkTypeShift + kMarkTypeBits;
constexpr int kMarkRootShift = kMarkReductionShift + kMarkReductionBits;
constexpr int kMarkOrderShift = kMarkRootShift + kMarkRootBits;
static_assert(kMarkOrderShift == 48);
static_assert(kNumDTypes <= 1 << kMarkTypeBits);

constexpr uint64_t kUserReduction = (1 << kMarkReductionBits) - 1;
static_assert(kNumRedOps <= static_cast<int>(kUserReduction));

constexpr uint64_t low_bits(uint64_t value, int bits) {
  return value & ((uint64_t{1} << bits) - 1);
}

// The part of a mark that a plan knows; `reduction` is kUserReduction for a user's own. `root` is a
// number of more facts where there is no root.
constexpr uint64_t mark_of_plan(int coll, DType dtype, uint64_t reduction, int root) {
  return 1 | low_bits(static_cast<uint64_t>(coll), kMarkCollBits) << kMarkShift |
         static_cast<uint64_t>(dtype) << kMarkTypeShift | reduction << kMarkReductionShift |
         low_bits(static_cast<uint64_t>(root), kMarkRootBits) << kMarkRootShift;
}

// The mark of the call that is number `seq` on its communicator.
constexpr uint64_t call_mark(uint64_t of_plan, uint64_t seq) {
  return of_plan + (seq << kMarkOrderShift);
}

// The fields of a plan's mark, and the mark that they make.
constexpr uint32_t fields_of(uint64_t of_plan) {
  return static_cast<uint32_t>(of_plan >> kMarkShift);
}
constexpr uint64_t mark_of_fields(uint32_t fields) {
  return 1 | static_cast<uint64_t>(fields) << kMarkShift;
}

// True if a word that is not the expected one belongs to message `id` all the same: of another
// call. Lines are used again every kLines messages, so an older message's id differs in low bits.
constexpr bool has_id(uint64_t word, uint64_t id) {
  return low_bits(word - id, kMarkShift) == 1;
}

// The number of a mark's operation.
int code_of(uint64_t mark);

// True if the operation of this number has a root.
bool call_has_root(int coll);

// The low bits of the call's number that a mark has.
constexpr uint64_t order_of(uint64_t mark) { return low_bits(mark >> kMarkOrderShift, 16); }

// The name of the operation of this number, or null; whether it reduces, and a reduction's name.
const char* name_of_call(int coll);
bool call_reduces(int coll);
const char* name_of_reduction(int redop);

// A mark in words, such as "reduce of float32, op='max', root=2", and a type's name.
std::string describe_mark(uint64_t mark);
const char* name_of_type(DType dtype);
// Says how the peer's call of a message differs from that of this rank, `me`, which is number `seq`,
// by the marks of both.
std::string describe_marks(int peer, uint64_t theirs, int me, uint64_t mine, uint64_t seq);

// What a message to another node says of its call and its length. Payloads of at most
// kMostStamped bytes end with it: they are copied anyway. Longer ones go from and to where they
// belong, so the stamp of the first fragment's goes before them as a message of its own.
struct Stamp {
  uint64_t word = 0;  // as a line's
  uint64_t nbytes = 0;
};
constexpr std::size_t kMostStamped = 8192;
// The length in the stamp of a message that is empty, as its call was refused (afar.hpp). Such a
// message has a stamp alone, wherever its receiver expects one.
constexpr uint64_t kNoMessage = ~uint64_t{0};
inline bool ends_with_stamp(std::size_t nbytes) { return nbytes <= kMostStamped; }
inline bool follows_stamp(std::size_t nbytes, std::int64_t fragment) {
  return !ends_with_stamp(nbytes) && fragment == 0;
}

}  // namespace commrt
