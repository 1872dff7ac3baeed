// SPDX-License-Identifier: Apache-2.0
// Says of an installed nccl.h what commrt's own table over libnccl (nccl_api.hpp) takes for
// granted: prints a line for each fact, and does not compile where a prototype differs.
#include <cuda_runtime.h>

#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "nccl/nccl_api.hpp"

namespace {

// An argument as a call passes it: what kind it is, and how long.
template <class Theirs, class Ours>
constexpr bool same_argument() {
  if (sizeof(Theirs) != sizeof(Ours) || alignof(Theirs) != alignof(Ours)) return false;
  if (std::is_pointer_v<Theirs> || std::is_pointer_v<Ours>) {
    return std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>;
  }
  if (std::is_class_v<Theirs> || std::is_class_v<Ours>) {
    return std::is_class_v<Theirs> && std::is_class_v<Ours> &&
           std::is_trivially_copyable_v<Theirs> == std::is_trivially_copyable_v<Ours>;
  }
  return true;
}

template <class A, class B>
struct SameCall : std::false_type {};
template <class A, class... As, class B, class... Bs>
struct SameCall<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(As) != sizeof...(Bs)) {
      return false;
    } else {
      return same_argument<A, B>() && (same_argument<As, Bs>() && ...);
    }
  }();
};

#define COMMRT_SAME(function, entry)                                                    \
  static_assert(SameCall<decltype(&function), decltype(commrt::NcclApi::entry)>::value, \
                #function " takes other arguments than " #entry)

COMMRT_SAME(ncclGetVersion, get_version);
COMMRT_SAME(ncclGetErrorString, get_error_string);
COMMRT_SAME(ncclGetLastError, get_last_error);
COMMRT_SAME(ncclGetUniqueId, get_unique_id);
COMMRT_SAME(ncclCommInitRankConfig, comm_init_rank_config);
COMMRT_SAME(ncclCommFinalize, comm_finalize);
COMMRT_SAME(ncclCommDestroy, comm_destroy);
COMMRT_SAME(ncclCommAbort, comm_abort);
COMMRT_SAME(ncclCommGetAsyncError, comm_get_async_error);
COMMRT_SAME(ncclCommCount, comm_count);
COMMRT_SAME(ncclCommUserRank, comm_user_rank);
COMMRT_SAME(ncclCommCuDevice, comm_cu_device);
COMMRT_SAME(ncclCommSplit, comm_split);
COMMRT_SAME(ncclRedOpCreatePreMulSum, redop_create_premul_sum);
COMMRT_SAME(ncclRedOpDestroy, redop_destroy);
COMMRT_SAME(ncclAllReduce, all_reduce);
COMMRT_SAME(ncclReduce, reduce);
COMMRT_SAME(ncclBroadcast, broadcast);
COMMRT_SAME(ncclAllGather, all_gather);
COMMRT_SAME(ncclReduceScatter, reduce_scatter);
COMMRT_SAME(ncclSend, send);
COMMRT_SAME(ncclRecv, recv);
COMMRT_SAME(ncclGroupStart, group_start);
COMMRT_SAME(ncclGroupEnd, group_end);
#if NCCL_VERSION_CODE >= 22800
COMMRT_SAME(ncclAlltoAll, all_to_all);
COMMRT_SAME(ncclGather, gather);
COMMRT_SAME(ncclScatter, scatter);
#endif

void say(const char* name, long long value) { std::printf("%s %lld\n", name, value); }

// Where a field lies in both structs, and -1 where this nccl.h has none.
#define COMMRT_FIELD(theirs, ours)                                                  \
  template <class Config, class = void>                                             \
  struct At_##theirs {                                                              \
    static constexpr long long value = -1;                                          \
  };                                                                                \
  template <class Config>                                                           \
  struct At_##theirs<Config, std::void_t<decltype(Config::theirs)>> {               \
    static_assert(sizeof(Config::theirs) == sizeof(commrt::NcclConfig::ours), #ours); \
    static constexpr long long value = offsetof(Config, theirs);                    \
  };

#define COMMRT_FIELDS(with)                                                     \
  with(size, size) with(magic, magic) with(version, version)                    \
  with(blocking, blocking) with(cgaClusterSize, cga_cluster_size)               \
  with(minCTAs, min_ctas) with(maxCTAs, max_ctas) with(netName, net_name)       \
  with(splitShare, split_share) with(trafficClass, traffic_class)               \
  with(commName, comm_name) with(collnetEnable, collnet_enable)                 \
  with(CTAPolicy, cta_policy) with(shrinkShare, shrink_share)                   \
  with(nvlsCTAs, nvls_ctas) with(nChannelsPerNetPeer, channels_per_net_peer)    \
  with(nvlinkCentricSched, nvlink_centric_sched)                                \
  with(graphUsageMode, graph_usage_mode) with(numRmaCtx, num_rma_ctx)           \
  with(maxP2pPeers, max_p2p_peers) with(graphStreamOrdering, graph_stream_ordering)

COMMRT_FIELDS(COMMRT_FIELD)

}  // namespace

int main() {
#define COMMRT_SAY_FIELD(theirs, ours)                                              \
  std::printf("field %s %lld %lld\n", #ours, At_##theirs<ncclConfig_t>::value,      \
              static_cast<long long>(offsetof(commrt::NcclConfig, ours)));
  COMMRT_FIELDS(COMMRT_SAY_FIELD)
  const ncclConfig_t fresh = NCCL_CONFIG_INITIALIZER;
  say("header_version", NCCL_VERSION_CODE);
  say("sizeof_config", sizeof(ncclConfig_t));
  say("magic", fresh.magic);
  say("undefined", NCCL_CONFIG_UNDEF_INT);
  say("is_unset", fresh.blocking == NCCL_CONFIG_UNDEF_INT && fresh.netName == nullptr);
  say("sizeof_id", sizeof(ncclUniqueId));
  say("success", ncclSuccess);
  say("invalid_usage", ncclInvalidUsage);
  say("in_progress", ncclInProgress);
  say("results", ncclNumResults);
  say("host_immediate", ncclScalarHostImmediate);
  say("no_color", NCCL_SPLIT_NOCOLOR);
  say("type int8", ncclInt8);
  say("type uint8", ncclUint8);
  say("type int32", ncclInt32);
  say("type uint32", ncclUint32);
  say("type int64", ncclInt64);
  say("type uint64", ncclUint64);
  say("type float16", ncclFloat16);
  say("type float32", ncclFloat32);
  say("type float64", ncclFloat64);
  say("type bfloat16", ncclBfloat16);
#if NCCL_VERSION_CODE >= 22400
  say("type float8_e4m3fn", ncclFloat8e4m3);
  say("type float8_e5m2", ncclFloat8e5m2);
#endif
  say("types", ncclNumTypes);
  say("op SUM", ncclSum);
  say("op PROD", ncclProd);
  say("op MAX", ncclMax);
  say("op MIN", ncclMin);
  say("op AVG", ncclAvg);
  return 0;
}
