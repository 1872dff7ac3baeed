// SPDX-License-Identifier: Apache-2.0
// Marks of calls in words.
#include "engine/call_mark.hpp"

#include <array>

namespace commrt {

namespace {

struct CallName {
  int code;
  const char* name;
  bool reduces, has_root;
};

// By the numbers of commrt/vocabulary/operations.py (a unit test compares).
constexpr CallName kCallNames[] = {
    {0, "allreduce", true, false},
    {1, "reduce", true, true},
    {2, "bcast", false, true},
    {3, "allgather", false, false},
    {4, "reduce_scatter", true, false},
    {5, "alltoall", false, false},
    {6, "gather", false, true},
    {7, "scatter", false, true},
    {8, "barrier", false, false},
    {9, "scan", true, false},
    {10, "exscan", true, false},
    {11, "allgatherv", false, false},
    {12, "alltoallv", false, false},
    {13, "gatherv", false, true},
    {14, "scatterv", false, true},
    {15, "reduce_scatterv", true, false},
    {80, "halo_exchange", false, false},
    {81, "halo_reduce", true, false},
    {82, "redistribute", false, false},
    {83, "neighbor_allgather", false, false},
    {84, "neighbor_allgatherv", false, false},
    {85, "neighbor_alltoall", false, false},
    {86, "neighbor_alltoallv", false, false},
};

const CallName* name_of(int code) {
  for (const CallName& call : kCallNames) {
    if (call.code == code) return &call;
  }
  return nullptr;
}

// Says of two calls that are alike in words what makes them differ.
std::string other_facts(uint64_t theirs, uint64_t mine) {
  constexpr int kHaloExchange = 80, kHaloReduce = 81, kRedistribute = 82;
  const int code = code_of(mine);
  const uint64_t differ = (theirs ^ mine) >> kMarkRootShift;
  if (code != code_of(theirs) || call_has_root(code) || low_bits(differ, kMarkRootBits) == 0) {
    return "";
  }
  if (code == kHaloExchange || code == kHaloReduce) {
    return "; they differ in width, axes, corners, direct or the types of their fields";
  }
  if (code == kRedistribute) return "; they differ in their layouts";
  return "; they differ in the algorithm, its parameters or the function of the reduction, or the "
         "ranks' calls within fused() differ, such as by one that a rank has refused";
}

}  // namespace

int code_of(uint64_t mark) {
  return static_cast<int>(low_bits(mark >> kMarkShift, kMarkCollBits));
}

bool call_has_root(int coll) {
  const CallName* const call = name_of(coll);
  return call != nullptr && call->has_root;
}

const char* name_of_call(int coll) {
  const CallName* const call = name_of(coll);
  return call != nullptr ? call->name : nullptr;
}

bool call_reduces(int coll) {
  const CallName* const call = name_of(coll);
  return call != nullptr && call->reduces;
}

const char* name_of_reduction(int redop) {
  constexpr std::array<const char*, kNumRedOps> names = {
      "sum", "prod", "min", "max", "avg", "land", "lor", "lxor", "band", "bor", "bxor",
      "premul_sum"};
  const auto code = static_cast<size_t>(redop);
  return code < names.size() ? names[code] : nullptr;
}

const char* name_of_type(DType dtype) {
  constexpr std::array<const char*, kNumDTypes> names = {
      "bool",    "int8",    "int16",    "int32",   "int64",     "uint8",
      "uint16",  "uint32",  "uint64",   "float16", "bfloat16",  "float32",
      "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"};
  const auto code = static_cast<size_t>(dtype);
  return code < names.size() ? names[code] : "an unknown type";
}

std::string describe_mark(uint64_t mark) {
  const int code = code_of(mark);
  const uint64_t type = low_bits(mark >> kMarkTypeShift, kMarkTypeBits);
  const uint64_t reduction = low_bits(mark >> kMarkReductionShift, kMarkReductionBits);
  const uint64_t root = low_bits(mark >> kMarkRootShift, kMarkRootBits);
  const CallName* const call = name_of(code);
  if (call == nullptr) return "an operation of number " + std::to_string(code);
  std::string said = std::string(call->name) + " of " + name_of_type(static_cast<DType>(type));
  if (call->reduces) {
    const char* const name = name_of_reduction(static_cast<int>(reduction));
    said += name != nullptr ? std::string(", op='") + name + "'" : ", a reduction of the program";
  }
  if (call->has_root) said += ", root=" + std::to_string(root);
  return said;
}

std::string describe_marks(int peer, uint64_t theirs, int me, uint64_t mine, uint64_t seq) {
  const auto ahead = static_cast<int16_t>(order_of(theirs) - order_of(mine));
  const std::string number = std::to_string(seq + static_cast<uint64_t>(int64_t{ahead}));
  const std::string rank = "rank " + std::to_string(peer);
  return rank + " made another call: " + describe_mark(theirs) + ", its operation #" + number +
         "; expected is what rank " + std::to_string(me) + " called: " + describe_mark(mine) + ", operation #" +
         std::to_string(seq) + other_facts(theirs, mine) +
         "; let all ranks make the same calls in the same order (COMMRT_DEBUG=check compares "
         "them before anything is sent)";
}

}  // namespace commrt
