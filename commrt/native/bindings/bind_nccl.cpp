// SPDX-License-Identifier: Apache-2.0
// NCCL's table and communicators for Python; pointers and streams are integers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "arrays/python_device.hpp"
#include "bindings/bindings.hpp"
#include "gil.hpp"
#include "nccl/nccl_comm.hpp"

namespace nb = nanobind;

namespace commrt {

namespace {

using Free = nb::call_guard<ReleasedGil>;
using Messages = std::vector<std::tuple<uint64_t, uint64_t, int>>;  // address, bytes, peer

void* at(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

// None where the library is not there; the reason is the second.
std::tuple<std::shared_ptr<NcclApi>, std::string> open(const std::string& path, bool only_loaded) {
  std::string problem;
  auto api = NcclApi::open(path, only_loaded, problem);
  return {api, problem};
}

struct Options {
  bool blocking;
  std::optional<int> cga_cluster_size, min_ctas, max_ctas, split_share, traffic_class, cta_policy,
      nvls_ctas, max_p2p_peers;
  std::string net_name, comm_name;
};

// Returns the name of a field that the library does not know, empty if it knows all.
std::string configure(NcclComm::Slot& slot, const Options& options, int version) {
  NcclConfig& config = slot.config;
  config.blocking = options.blocking ? 1 : 0;
  auto set = [](int& field, const std::optional<int>& value) {
    if (value) field = *value;
  };
  set(config.cga_cluster_size, options.cga_cluster_size);
  set(config.min_ctas, options.min_ctas);
  set(config.max_ctas, options.max_ctas);
  set(config.split_share, options.split_share);
  set(config.traffic_class, options.traffic_class);
  set(config.cta_policy, options.cta_policy);
  set(config.nvls_ctas, options.nvls_ctas);
  set(config.max_p2p_peers, options.max_p2p_peers);
  slot.net_name = options.net_name;
  slot.comm_name = options.comm_name;
  if (!slot.net_name.empty()) config.net_name = slot.net_name.c_str();
  if (!slot.comm_name.empty()) config.comm_name = slot.comm_name.c_str();
  return config.settle(version);
}

std::vector<NcclMessage> collect(const NcclComm& comm, const Messages& sends,
                                 const Messages& recvs) {
  std::vector<NcclMessage> messages;
  messages.reserve(sends.size() + recvs.size());
  auto add = [&](const Messages& list, bool is_send) {
    for (const auto& [address, nbytes, peer] : list) {
      if (peer < 0 || peer >= comm.size) {
        throw std::invalid_argument("a message names peer " + std::to_string(peer) +
                                    "; expected a rank from 0 to " +
                                    std::to_string(comm.size - 1));
      }
      messages.push_back({is_send, at(address), nbytes, peer});
    }
  };
  add(sends, true);
  add(recvs, false);
  return messages;
}

// A factor in its type's memory format.
struct Scalar {
  explicit Scalar(const nb::bytes& factor) {
    std::memcpy(bytes, factor.c_str(), std::min(sizeof(bytes), factor.size()));
  }
  alignas(8) char bytes[8] = {0};
};

// Blocks of different lengths: a count per rank, each not negative.
void check_counts(const NcclComm& comm, const std::vector<int64_t>& counts) {
  if (counts.size() != static_cast<size_t>(comm.size)) {
    throw std::invalid_argument(std::to_string(counts.size()) + " counts were passed for " +
                                std::to_string(comm.size) + " ranks: pass one count per rank");
  }
  for (int64_t count : counts) {
    if (count < 0) {
      throw std::invalid_argument("count " + std::to_string(count) +
                                  " is negative: pass 0 for a rank without elements");
    }
  }
}

}  // namespace

void bind_nccl(nb::module_& m) {
  nb::class_<NcclApi>(m, "NcclLibrary", "A libnccl.so.2 that was opened, and its functions.")
      .def_ro("path", &NcclApi::path)
      .def_ro("version", &NcclApi::version)
      .def_prop_ro("has_alltoall", [](const NcclApi& api) { return api.all_to_all != nullptr; })
      .def("unique_id",
           [](const NcclApi& api) {
             NcclUniqueId id;
             int code;
             {
               ReleasedGil release;
               code = api.get_unique_id(&id);
             }
             return std::tuple(code, nb::bytes(id.internal, sizeof(id.internal)));
           },
           "The result code, and a new id to give to all ranks.")
      .def("describe", [](const NcclApi& api, int code) { return api.describe(code); },
           nb::arg("code"));

  m.def("nccl_open", &open, nb::arg("path"), nb::kw_only(), nb::arg("only_loaded"),
        "Open a libnccl; returns it, or None and the reason.");

  nb::class_<Options>(m, "NcclOptions", "Values for ncclConfig_t; None: NCCL's default.")
      .def("__init__",
           [](Options* self, bool blocking, std::optional<int> cga_cluster_size,
              std::optional<int> min_ctas, std::optional<int> max_ctas,
              std::optional<int> split_share, std::optional<int> traffic_class,
              std::optional<int> cta_policy, std::optional<int> nvls_ctas,
              std::optional<int> max_p2p_peers, std::string net_name, std::string comm_name) {
             new (self) Options{blocking,      cga_cluster_size, min_ctas,   max_ctas,
                                split_share,   traffic_class,    cta_policy, nvls_ctas,
                                max_p2p_peers, net_name,         comm_name};
           },
           nb::kw_only(), nb::arg("blocking"), nb::arg("cga_cluster_size").none(),
           nb::arg("min_ctas").none(), nb::arg("max_ctas").none(),
           nb::arg("split_share").none(), nb::arg("traffic_class").none(),
           nb::arg("cta_policy").none(), nb::arg("nvls_ctas").none(),
           nb::arg("max_p2p_peers").none(), nb::arg("net_name"), nb::arg("comm_name"))
      .def("unknown_to",
           [](const Options& self, int version) {
             NcclComm::Slot slot;
             return configure(slot, self, version);
           },
           nb::arg("version"), "The first field that a library of this version does not know.")
      .def("size_and_version",
           [](const Options& self, int version) {
             NcclComm::Slot slot;
             configure(slot, self, version);
             return std::tuple(slot.config.size, slot.config.version);
           },
           nb::arg("version"),
           "Size and version, as they stand at the beginning of ncclConfig_t.");

  nb::class_<NcclComm>(m, "NcclComm", "One rank of an NCCL communicator; see commrt/nccl.")
      .def("split",
           [](NcclComm& self, int color, int key, const Options& options, double timeout_s) {
             auto slot = std::make_shared<NcclComm::Slot>();
             configure(*slot, options, self.api->version);
             int code;
             {
               ReleasedGil release;
               code = self.split(color, key, slot, timeout_s);
             }
             std::shared_ptr<NcclComm> child;
             if (code == kNcclSuccess && slot->comm != nullptr) {
               child = std::make_shared<NcclComm>(self.api, slot, true);
               code = child->adopt();
             }
             return std::tuple(child, code);
           },
           nb::arg("color"), nb::arg("key"), nb::arg("options"), nb::arg("timeout_s"),
           "The child, None for a rank without one, and the code.")
      .def_ro("size", &NcclComm::size)
      .def_ro("rank", &NcclComm::rank)
      .def_ro("device", &NcclComm::device)
      .def_ro("owned", &NcclComm::owned)
      .def_prop_ro("pointer",
                   [](const NcclComm& self) { return reinterpret_cast<uint64_t>(self.slot->comm); })
      .def_prop_ro("state", [](const NcclComm& self) { return static_cast<int>(self.state.load()); })
      .def_prop_ro("error", [](const NcclComm& self) { return self.error.load(); })
      .def_prop_ro("num_calls", [](const NcclComm& self) { return self.num_calls.load(); })
      .def_prop_ro("num_groups", [](const NcclComm& self) { return self.num_groups.load(); })
      .def_rw("most_distances", &NcclComm::most_distances)
      .def_rw("most_messages", &NcclComm::most_messages)
      .def_rw("most_reductions", &NcclComm::most_reductions)
      .def("describe", &NcclComm::describe, nb::arg("code"))
      .def("wait", &NcclComm::wait, nb::arg("timeout_s"), Free())
      .def("poll", &NcclComm::poll, Free())
      .def("finalize", &NcclComm::finalize, nb::arg("timeout_s"), Free())
      .def("destroy", &NcclComm::destroy, nb::arg("timeout_s"), Free())
      .def("forget", [](NcclComm& self) { self.state.store(NcclComm::State::Closed); },
           "Use it no more; for adopted ones.")
      .def("abort", &NcclComm::abort, nb::arg("timeout_s"), Free())
      .def("collective",
           [](NcclComm& self, int coll, uint64_t x, uint64_t out, uint64_t count, int dtype, int op,
              int root, uint64_t stream, double timeout_s) {
             return self.collective(static_cast<NcclColl>(coll), at(x), at(out), count, dtype, op,
                                    root, at(stream), timeout_s);
           },
           nb::arg("coll"), nb::arg("x"), nb::arg("out"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("op"), nb::arg("root"), nb::arg("stream"), nb::arg("timeout_s"), Free())
      .def("premul",
           [](NcclComm& self, int coll, uint64_t x, uint64_t out, uint64_t count, int dtype,
              nb::bytes factor, int root, uint64_t stream, double timeout_s) {
             Scalar scalar(factor);
             ReleasedGil release;
             return self.premul(static_cast<NcclColl>(coll), at(x), at(out), count, dtype, scalar.bytes,
                                root, at(stream), timeout_s);
           },
           nb::arg("coll"), nb::arg("x"), nb::arg("out"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("factor"), nb::arg("root"), nb::arg("stream"), nb::arg("timeout_s"))
      .def("counted",
           [](NcclComm& self, int coll, uint64_t x, uint64_t out,
              const std::vector<int64_t>& send_counts, const std::vector<int64_t>& recv_counts,
              uint64_t itemsize, int dtype, int op, nb::bytes factor, int root, uint64_t stream,
              double timeout_s) {
             check_counts(self, send_counts);
             check_counts(self, recv_counts);
             Scalar scalar(factor);
             ReleasedGil release;
             return self.counted(static_cast<NcclColl>(coll), static_cast<char*>(at(x)),
                                 static_cast<char*>(at(out)), send_counts, recv_counts, itemsize,
                                 dtype, op, factor.size() == 0 ? nullptr : scalar.bytes, root,
                                 at(stream), timeout_s);
           },
           nb::arg("coll"), nb::arg("x"), nb::arg("out"), nb::arg("send_counts"),
           nb::arg("recv_counts"), nb::arg("itemsize"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("factor"), nb::arg("root"), nb::arg("stream"), nb::arg("timeout_s"))
      .def("exchange",
           [](NcclComm& self, const Messages& sends, const Messages& recvs, uint64_t stream,
              double timeout_s) {
             auto messages = collect(self, sends, recvs);
             ReleasedGil release;
             return self.exchange(std::move(messages), at(stream), timeout_s);
           },
           nb::arg("sends"), nb::arg("recvs"), nb::arg("stream"), nb::arg("timeout_s"));

  m.def("nccl_init",
        [](std::shared_ptr<NcclApi> api, int size, int rank, nb::bytes id, const Options& options,
           const PyDevice* device) {
          if (id.size() != kNcclIdBytes) {
            throw std::invalid_argument("nccl_init() was given an id of " +
                                        std::to_string(id.size()) + " bytes; expected " +
                                        std::to_string(kNcclIdBytes) +
                                        ", as unique_id() returns on one rank");
          }
          NcclUniqueId unique;
          std::memcpy(unique.internal, id.c_str(), kNcclIdBytes);
          auto slot = std::make_shared<NcclComm::Slot>();
          configure(*slot, options, api->version);
          auto comm = std::make_shared<NcclComm>(std::move(api), slot, true);
          std::function<void(bool)> enter;
          if (device != nullptr) {
            enter = [on = device->device, keeps = device->keeps](bool enters) {
              on->api->make_current(on, enters);
            };
          }
          int code;
          {
            ReleasedGil release;
            code = comm->init(size, unique, rank, enter);
          }
          return std::tuple(comm, code);
        },
        nb::arg("library"), nb::arg("size"), nb::arg("rank"), nb::arg("id"), nb::arg("options"),
        nb::arg("device").none() = nb::none(),
        "Begin to join; _wait finishes it. One that blocks joins in a thread, on `device`; "
        "without it, in this call.");
  m.def("nccl_adopt",
        [](std::shared_ptr<NcclApi> api, uint64_t pointer) {
          auto slot = std::make_shared<NcclComm::Slot>();
          slot->comm = at(pointer);
          auto comm = std::make_shared<NcclComm>(std::move(api), slot, false);
          int code;
          {
            ReleasedGil release;
            code = comm->adopt();
          }
          return std::tuple(comm, code);
        },
        nb::arg("library"), nb::arg("pointer"),
        "Use another program's communicator; it is never destroyed here.");
}

}  // namespace commrt
