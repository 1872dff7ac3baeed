// SPDX-License-Identifier: Apache-2.0
// Opens libnccl, fills its function table, and puts its errors into words.
#include "nccl/nccl_api.hpp"

#include <dlfcn.h>
#include <link.h>

namespace commrt {

namespace {

// A field of ncclConfig_t, the header version that brought it, and where the struct of that header
// ends.
struct Field {
  const char* name;
  int since;
  size_t end;
};

template <class T>
constexpr size_t end_of(T NcclConfig::* field, size_t offset) {
  return offset + sizeof(((NcclConfig*)nullptr)->*field);
}

#define COMMRT_END(field) end_of(&NcclConfig::field, offsetof(NcclConfig, field))
const Field kBase = {"", 21700, COMMRT_END(traffic_class)};  // 48 bytes, padding included
const Field kTrafficClass = {"traffic_class", 22600, COMMRT_END(traffic_class)};
const Field kCommName = {"comm_name", 22700, COMMRT_END(nvls_ctas)};
const Field kCtaPolicy = {"cta_policy", 22700, COMMRT_END(nvls_ctas)};
const Field kNvlsCtas = {"nvls_ctas", 22700, COMMRT_END(nvls_ctas)};
const Field kMaxP2pPeers = {"max_p2p_peers", 23000, COMMRT_END(max_p2p_peers)};
#undef COMMRT_END

}  // namespace

std::string NcclConfig::settle(int library_version) {
  const Field* last = &kBase;
  auto use = [&](bool set, const Field& field) {
    if (set && field.since >= last->since) last = &field;
  };
  use(traffic_class != kNcclUndefined, kTrafficClass);
  use(comm_name != nullptr, kCommName);
  use(cta_policy != kNcclUndefined, kCtaPolicy);
  use(nvls_ctas != kNcclUndefined, kNvlsCtas);
  use(max_p2p_peers != kNcclUndefined, kMaxP2pPeers);
  if (library_version < last->since) return last->name;
  size = (last->end + alignof(NcclConfig) - 1) / alignof(NcclConfig) * alignof(NcclConfig);
  version = static_cast<unsigned>(last->since);
  return "";
}

std::shared_ptr<NcclApi> NcclApi::open(const std::string& path, bool only_loaded,
                                       std::string& problem) {
  // RTLD_LOCAL: torch and cupy may have mapped another copy, whose symbols must stay theirs.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | (only_loaded ? RTLD_NOLOAD : 0));
  if (handle == nullptr) {
    const char* said = dlerror();
    problem = only_loaded ? "not loaded in this process"
                          : (said != nullptr ? said : "dlopen failed");
    return nullptr;
  }
  auto api = std::make_shared<NcclApi>();
  api->handle = handle;
  std::string missing;
  auto bind = [&](const char* name, auto& slot, bool needed) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, name));
    if (slot == nullptr && needed && missing.empty()) missing = name;
  };
  bind("ncclGetVersion", api->get_version, true);
  bind("ncclGetErrorString", api->get_error_string, true);
  bind("ncclGetLastError", api->get_last_error, true);
  bind("ncclGetUniqueId", api->get_unique_id, true);
  bind("ncclCommInitRankConfig", api->comm_init_rank_config, true);
  bind("ncclCommFinalize", api->comm_finalize, true);
  bind("ncclCommDestroy", api->comm_destroy, true);
  bind("ncclCommAbort", api->comm_abort, true);
  bind("ncclCommGetAsyncError", api->comm_get_async_error, true);
  bind("ncclCommCount", api->comm_count, true);
  bind("ncclCommUserRank", api->comm_user_rank, true);
  bind("ncclCommCuDevice", api->comm_cu_device, true);
  bind("ncclCommSplit", api->comm_split, true);
  bind("ncclRedOpCreatePreMulSum", api->redop_create_premul_sum, true);
  bind("ncclRedOpDestroy", api->redop_destroy, true);
  bind("ncclAllReduce", api->all_reduce, true);
  bind("ncclReduce", api->reduce, true);
  bind("ncclBroadcast", api->broadcast, true);
  bind("ncclAllGather", api->all_gather, true);
  bind("ncclReduceScatter", api->reduce_scatter, true);
  bind("ncclSend", api->send, true);
  bind("ncclRecv", api->recv, true);
  bind("ncclGroupStart", api->group_start, true);
  bind("ncclGroupEnd", api->group_end, true);
  bind("ncclAlltoAll", api->all_to_all, false);
  bind("ncclGather", api->gather, false);
  bind("ncclScatter", api->scatter, false);
  int version = 0;
  if (api->get_version != nullptr && api->get_version(&version) == kNcclSuccess) {
    api->version = version;
  }
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr) {
    api->path = map->l_name;
  }
  // An old library lacks functions, too: its version is the better reason.
  if (api->version != 0 && api->version < kNcclOldest) return api;
  if (!missing.empty()) {
    problem = "it has no function " + missing;
    return nullptr;
  }
  return api;
}

std::string NcclApi::describe(int code) const {
  const char* name = get_error_string != nullptr ? get_error_string(code) : nullptr;
  std::string text = (name != nullptr ? std::string(name) : "NCCL error") + " (" +
                     std::to_string(code) + ")";
  const char* last = get_last_error != nullptr ? get_last_error(nullptr) : nullptr;
  if (last != nullptr && *last != '\0') text += ": " + std::string(last);
  return text;
}

}  // namespace commrt
