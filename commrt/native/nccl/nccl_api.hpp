// SPDX-License-Identifier: Apache-2.0
// NCCL reached through function pointers: one binary for every libnccl.so.2, none needed to build.
//
// The prototypes are written by hand from nccl.h, whose ABI only grows: structs begin with their
// own size, enums get new values at the end, and newer functions may be missing (null here).
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace commrt {

// ncclResult_t
constexpr int kNcclSuccess = 0;
constexpr int kNcclInvalidUsage = 5;
constexpr int kNcclInProgress = 7;

// ncclDataType_t of what only moves: bytes
constexpr int kNcclUint8 = 1;

constexpr int kNcclUndefined = INT_MIN;
constexpr unsigned kNcclConfigMagic = 0xcafebeef;
constexpr size_t kNcclIdBytes = 128;
constexpr int kNcclHostImmediate = 1;  // ncclScalarResidence_t

// The oldest library that the table serves: 2.18, which has ncclCommSplit.
constexpr int kNcclOldest = 21800;

using NcclHandle = void*;  // ncclComm_t
using NcclStream = void*;  // cudaStream_t

struct NcclUniqueId {
  char internal[kNcclIdBytes];
};

// ncclConfig_t of 2.30. The library copies the smaller of `size` and its own; `version` says from
// which header the fields were taken, and later fields than that header's are ignored. Both are
// settled by what is set (nccl_api.cpp), so an older library is never told of a newer field.
struct NcclConfig {
  size_t size = 0;
  unsigned magic = kNcclConfigMagic;
  unsigned version = 0;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
  int traffic_class = kNcclUndefined;  // lies in what was padding before 2.26
  const char* comm_name = nullptr;
  int collnet_enable = kNcclUndefined;
  int cta_policy = kNcclUndefined;
  int shrink_share = kNcclUndefined;
  int nvls_ctas = kNcclUndefined;
  int channels_per_net_peer = kNcclUndefined;
  int nvlink_centric_sched = kNcclUndefined;
  int graph_usage_mode = kNcclUndefined;
  int num_rma_ctx = kNcclUndefined;
  int max_p2p_peers = kNcclUndefined;
  int graph_stream_ordering = kNcclUndefined;

  // Sets size and version for a library of that version; returns the name of the first field that
  // is set and that the library does not know, empty if there is none.
  std::string settle(int library_version);
};

// It can share itself, because communicators that have it may go in any thread.
struct NcclApi : std::enable_shared_from_this<NcclApi> {
  std::string path;      // of the file that was mapped
  int version = 0;       // 10000 * major + 100 * minor + patch
  void* handle = nullptr;  // never closed: the library has threads of its own

  int (*get_version)(int*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(NcclHandle) = nullptr;
  int (*get_unique_id)(NcclUniqueId*) = nullptr;
  int (*comm_init_rank_config)(NcclHandle*, int, NcclUniqueId, int, NcclConfig*) = nullptr;
  int (*comm_finalize)(NcclHandle) = nullptr;
  int (*comm_destroy)(NcclHandle) = nullptr;
  int (*comm_abort)(NcclHandle) = nullptr;
  int (*comm_get_async_error)(NcclHandle, int*) = nullptr;
  int (*comm_count)(NcclHandle, int*) = nullptr;
  int (*comm_user_rank)(NcclHandle, int*) = nullptr;
  int (*comm_cu_device)(NcclHandle, int*) = nullptr;
  int (*comm_split)(NcclHandle, int, int, NcclHandle*, NcclConfig*) = nullptr;
  int (*redop_create_premul_sum)(int*, void*, int, int, NcclHandle) = nullptr;
  int (*redop_destroy)(int, NcclHandle) = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*reduce)(const void*, void*, size_t, int, int, int, NcclHandle, NcclStream) = nullptr;
  int (*broadcast)(const void*, void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*all_gather)(const void*, void*, size_t, int, NcclHandle, NcclStream) = nullptr;
  int (*reduce_scatter)(const void*, void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*send)(const void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*recv)(void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  // 2.28
  int (*all_to_all)(const void*, void*, size_t, int, NcclHandle, NcclStream) = nullptr;
  int (*gather)(const void*, void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;
  int (*scatter)(const void*, void*, size_t, int, int, NcclHandle, NcclStream) = nullptr;

  // Opens the library; with `only_loaded` only where the process has it mapped already. Returns
  // null and says why in `problem`.
  static std::shared_ptr<NcclApi> open(const std::string& path, bool only_loaded,
                                       std::string& problem);
  // "unhandled cuda error (1)", and what the library said last.
  std::string describe(int code) const;
};

}  // namespace commrt
