// SPDX-License-Identifier: Apache-2.0
// A multi_sendrecv bound to its arrays: checked once, started any number of times.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays/places.hpp"
#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "calls/group_methods.hpp"
#include "engine/p2p.hpp"
#include "kernels/finite.hpp"
#include "python_callbacks.hpp"

namespace commrt {

namespace {

using Row = std::tuple<uint64_t, uint64_t, int, int, TypeCode, bool>;

MessageLists lists_of(const std::vector<Row>& sends, const std::vector<Row>& recvs) {
  MessageLists lists;
  auto fill = [&lists](const std::vector<Row>& rows, std::vector<Message>& list) {
    list.reserve(rows.size());
    for (const auto& [address, nbytes, peer, tag, type, replaced] : rows) {
      list.push_back({reinterpret_cast<void*>(address), nbytes, peer, tag, type, replaced});
      lists.in_place = lists.in_place || replaced;
    }
  };
  fill(sends, lists.sends);
  fill(recvs, lists.recvs);
  return lists;
}

class PersistentMessages {
 public:
  PersistentMessages(nb::object group, const std::vector<Row>& sends,
                     const std::vector<Row>& recvs, nb::object keep_sends, nb::object keep_recvs,
                     nb::object result, nb::object operation, std::shared_ptr<Places> places)
      : group_(std::move(group)), lists_(lists_of(sends, recvs)),
        keep_sends_(std::move(keep_sends)), keep_recvs_(std::move(keep_recvs)),
        result_(std::move(result)), operation_(std::move(operation)),
        places_(std::move(places)) {}

  nb::object run(bool nonblocking, double timeout_s) const {
    Group& group = *nb::inst_ptr<Group>(group_);
    if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
        Engine::forked.load(std::memory_order_relaxed)) {
      group_.attr(group_methods::kCheckUsable)();
    }
    try {
      check_arrays(group);
    } catch (nb::python_error& error) {
      callback(Callback::RefuseMessages)(group_, error.value(), places_of(lists_.sends),
                                         places_of(lists_.recvs));
      throw;
    }
    return run_multi(group_, lists_, keep_sends_, keep_recvs_, result_, operation_, nonblocking,
                     timeout_s);
  }
  nb::object run(bool nonblocking) const {
    return run(nonblocking, nb::inst_ptr<Group>(group_)->timeout_s);
  }

  // The call that users make. It is recorded while somebody records.
  nb::object call(bool nonblocking) const {
    if (!recorded.is_valid()) return run(nonblocking);
    return recorded(nb::arg("nonblocking") = nonblocking);
  }

  nb::object recorded;  // calls run()

  nb::object operation() const { return operation_; }
  size_t num_sends() const { return lists_.sends.size(); }
  size_t num_recvs() const { return lists_.recvs.size(); }

 private:
  // Raises an error where they have other memory, or values that are not to be sent.
  void check_arrays(const Group& group) const {
    if (places_) places_->check(nb::cast<std::string>(operation_));
    for (size_t i = 0; group.nan_check && i < lists_.sends.size(); ++i) {
      const Message& one = lists_.sends[i];
      if (one.type >= kNumDTypes) continue;
      const auto dtype = static_cast<DType>(one.type);
      const auto count = static_cast<int64_t>(one.nbytes / item_size(dtype));
      const int64_t index = first_not_finite(dtype, one.data, count);
      if (index < 0) continue;
      group_.attr(group_methods::kRefuseNotFinite)(operation_, "sends[" + std::to_string(i) + "]: x",
                                                   index, count, is_nan_at(dtype, one.data, index));
    }
  }

  static nb::list places_of(const std::vector<Message>& messages) {
    nb::list found;
    for (const Message& one : messages) found.append(nb::make_tuple(one.peer, one.tag));
    return found;
  }

  nb::object group_;
  MessageLists lists_;
  nb::object keep_sends_, keep_recvs_, result_, operation_;
  std::shared_ptr<Places> places_;
};

}  // namespace

void bind_multi(nb::module_& m) {
  nb::class_<PersistentMessages>(m, "PersistentMessages", nb::is_weak_referenceable(),
                                 "A multi_sendrecv bound to its arrays; call it, or start() it.")
      .def(nb::init<nb::object, const std::vector<Row>&, const std::vector<Row>&, nb::object,
                    nb::object, nb::object, nb::object, std::shared_ptr<Places>>(),
           nb::arg("group"), nb::arg("sends"), nb::arg("recvs"), nb::arg("keep_sends"),
           nb::arg("keep_recvs"), nb::arg("result"), nb::arg("operation"),
           nb::arg("places") = nb::none(),
           "Rows are (address, nbytes, peer, tag, code of the type, replaced), all checked.")
      .def("run",
           [](const PersistentMessages& self, bool nonblocking, double timeout_s) {
             return self.run(nonblocking, timeout_s);
           }, nb::arg("nonblocking"), nb::arg("timeout_s"))
      .def("run_bound", [](const PersistentMessages& self, bool nonblocking) {
        return self.run(nonblocking);
      }, nb::arg("nonblocking"))
      .def("record_by",
           [](PersistentMessages& self, const nb::object& method) {
             self.recorded = method.is_none() ? nb::object() : method;
           }, nb::arg("method").none(), "Let runs go through a method that calls run_bound.")
      .def("__call__", [](const PersistentMessages& self) { return self.call(false); },
           "Run the operation and return its output.")
      .def("start", [](const PersistentMessages& self) { return self.call(true); },
           "Start the operation and return its Request; wait before starting it again.")
      .def_prop_ro("operation", &PersistentMessages::operation, "Name of the operation.")
      .def_prop_ro("label", [](const PersistentMessages&) { return "messages"; },
                   "What runs it: the engine's messages.")
      .def("__repr__", [](const PersistentMessages& self) {
        return nb::str("<commrt.PersistentMessages {} of {} sends and {} receives>")
            .format(self.operation(), self.num_sends(), self.num_recvs());
      });
}

}  // namespace commrt
