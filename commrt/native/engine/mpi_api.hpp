// SPDX-License-Identifier: Apache-2.0
// MPI reached through function pointers: one binary for every MPI, none needed to build.
//
// Handles are ints in MPICH's ABI and pointers in Open MPI's. Both are passed here as
// uintptr_t: the calling conventions of x86-64 and arm64 pass an int in the low half of the
// same register. Request storage is eight bytes, which holds either.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace commrt {

using Handle = uintptr_t;

struct MpiRequest {
  alignas(8) unsigned char bytes[8] = {0};
};

// MPI_Status is at most 40 bytes in known ABIs; never pass NULL or an ABI's "ignore".
struct MpiStatus {
  alignas(16) unsigned char bytes[256] = {0};
};

struct MpiApi {
  using Fn = int (*)();
  bool loaded = false;
  bool is_relay = false;  // of messages alone, and no library's (relay.hpp)
  // Only a relay has these three. Two move a payload from memory to memory, once both sides know
  // where it goes.
  int (*expect)(void*, uint64_t, int, Handle, uint64_t*, void*) = nullptr;
  int (*deliver)(const void*, uint64_t, int, uint64_t, Handle, void*) = nullptr;
  // Like isend, of a message behind which the caller sends another one at once, to the same rank.
  // They may leave together. MPI has no such word.
  int (*isend_before_next)(const void*, int, Handle, int, int, Handle, void*) = nullptr;

  int (*isend)(const void*, int, Handle, int, int, Handle, void*) = nullptr;
  int (*irecv)(void*, int, Handle, int, int, Handle, void*) = nullptr;
  int (*test)(void*, int*, void*) = nullptr;
  int (*cancel)(void*) = nullptr;
  int (*iprobe)(int, int, Handle, int*, void*) = nullptr;
  int (*get_count)(const void*, Handle, int*) = nullptr;
  int (*test_cancelled)(const void*, int*) = nullptr;
  int (*abort)(Handle, int) = nullptr;
  int (*error_class)(int, int*) = nullptr;
  int (*error_string)(int, char*, int*) = nullptr;
  int (*iallreduce)(const void*, void*, int, Handle, Handle, Handle, void*) = nullptr;
  int (*ireduce)(const void*, void*, int, Handle, Handle, int, Handle, void*) = nullptr;
  int (*ibcast)(void*, int, Handle, int, Handle, void*) = nullptr;
  int (*iallgather)(const void*, int, Handle, void*, int, Handle, Handle, void*) = nullptr;
  int (*ireduce_scatter_block)(const void*, void*, int, Handle, Handle, Handle, void*) = nullptr;
  int (*ialltoall)(const void*, int, Handle, void*, int, Handle, Handle, void*) = nullptr;
  int (*igather)(const void*, int, Handle, void*, int, Handle, int, Handle, void*) = nullptr;
  int (*iscatter)(const void*, int, Handle, void*, int, Handle, int, Handle, void*) = nullptr;
  int (*iscan)(const void*, void*, int, Handle, Handle, Handle, void*) = nullptr;
  int (*iexscan)(const void*, void*, int, Handle, Handle, Handle, void*) = nullptr;
  int (*ibarrier)(Handle, void*) = nullptr;
  int (*iallgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle,
                     void*) = nullptr;
  int (*ialltoallv)(const void*, const int*, const int*, Handle, void*, const int*, const int*,
                    Handle, Handle, void*) = nullptr;
  int (*igatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, int, Handle,
                  void*) = nullptr;
  int (*iscatterv)(const void*, const int*, const int*, Handle, void*, int, Handle, int, Handle,
                   void*) = nullptr;
  int (*ireduce_scatter)(const void*, void*, const int*, Handle, Handle, Handle, void*) = nullptr;

  Handle byte_type = 0;
  void* in_place = nullptr;
  int err_truncate = 0;

  // Fills the table from addresses and constants that Python looked up; returns the name of
  // the first missing symbol, empty when complete.
  std::string load(const std::unordered_map<std::string, uint64_t>& addresses);

  // True if the code says that a message was longer than its receive.
  bool is_truncation(int code) const;
  // "MPI_Isend failed: invalid rank (error code 6)"
  std::string describe(const char* function, int code) const;
};

MpiApi& mpi();

// The advice in an error after a failed call of MPI.
constexpr const char* kAfterMpiFailure =
    "messages may be lost: make a new communicator or end the job";

}  // namespace commrt
