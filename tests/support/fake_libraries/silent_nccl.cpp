// SPDX-License-Identifier: Apache-2.0
// A libnccl of one rank that does nothing, so that only the host's cost is left of a call
// (tests/support/host_cost.py). What NCCL does with calls is pretended by tests/support/nccl_stub.
#include <cstddef>

namespace {

struct Id {
  char internal[128];
};
using Comm = void*;
using Stream = void*;
long num_calls = 0;
char the_comm;

int counted() { return ++num_calls, 0; }

}  // namespace

extern "C" {

long silent_num_calls() { return num_calls; }

int ncclGetVersion(int* out) { return *out = 22809, 0; }
const char* ncclGetErrorString(int) { return "no error"; }
const char* ncclGetLastError(Comm) { return ""; }
int ncclGetUniqueId(Id* out) { return *out = Id{}, 0; }
int ncclCommInitRankConfig(Comm* out, int, Id, int, void*) { return *out = &the_comm, 0; }
int ncclCommFinalize(Comm) { return 0; }
int ncclCommDestroy(Comm) { return 0; }
int ncclCommAbort(Comm) { return 0; }
int ncclCommGetAsyncError(Comm, int* out) { return *out = 0, 0; }
int ncclCommCount(Comm, int* out) { return *out = 1, 0; }
int ncclCommUserRank(Comm, int* out) { return *out = 0, 0; }
int ncclCommCuDevice(Comm, int* out) { return *out = 0, 0; }
int ncclCommSplit(Comm, int, int, Comm* out, void*) { return *out = &the_comm, 0; }
int ncclRedOpCreatePreMulSum(int* out, void*, int, int, Comm) { return *out = 0, 0; }
int ncclRedOpDestroy(int, Comm) { return 0; }
int ncclAllReduce(const void*, void*, size_t, int, int, Comm, Stream) { return counted(); }
int ncclReduce(const void*, void*, size_t, int, int, int, Comm, Stream) { return counted(); }
int ncclBroadcast(const void*, void*, size_t, int, int, Comm, Stream) { return counted(); }
int ncclAllGather(const void*, void*, size_t, int, Comm, Stream) { return counted(); }
int ncclReduceScatter(const void*, void*, size_t, int, int, Comm, Stream) { return counted(); }
int ncclSend(const void*, size_t, int, int, Comm, Stream) { return counted(); }
int ncclRecv(void*, size_t, int, int, Comm, Stream) { return counted(); }
int ncclGroupStart() { return 0; }
int ncclGroupEnd() { return 0; }

}  // extern "C"
