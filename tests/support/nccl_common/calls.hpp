// SPDX-License-Identifier: Apache-2.0
// What pretended libraries know of NCCL's calls: numbers, arguments, and what is wrong with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace stub {

enum Result { Success = 0, CudaError = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4,
              InvalidUsage = 5, InProgress = 7 };
const char* text_of(int code);

enum class Kind { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AlltoAll, Gather,
                  Scatter, Send, Recv };
const char* name_of(Kind kind);
inline bool is_message(Kind kind) { return kind == Kind::Send || kind == Kind::Recv; }
// The first version that has it.
int since(Kind kind);

struct Op {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  int dtype, redop;
  int peer;           // or root
  double factor = 1;  // of a premul-sum
  bool scaled = false;
  uint64_t seq = 0;   // of a collective on its communicator
  bool done = false;
};

// Bytes of the buffers that a call reads and writes on a rank.
struct Touched {
  size_t read, written;
};
Touched touched(const Op& op, int rank, int size);

// What is wrong with a call; empty if nothing is.
std::string problem_of(const Op& op, int rank, int size, int version);

struct Config {  // the beginning of ncclConfig_t, 2.30's
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int rest[10];
};
std::string problem_of(const Config& config, int version);

struct UniqueId {
  char internal[128];
};

}  // namespace stub
