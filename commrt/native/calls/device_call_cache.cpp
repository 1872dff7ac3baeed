// SPDX-License-Identifier: Apache-2.0
// Finds and starts calls on device arrays that are like ones before (device_call_cache.hpp).
#include "calls/device_call_cache.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <type_traits>

#include "calls/device_request.hpp"
#include "calls/fusion.hpp"
#include "calls/group_methods.hpp"
#include "library_calls/mpi_work.hpp"
#include "library_calls/nccl_work.hpp"
#include "peer_memory/peer_work.hpp"
#include "python_callbacks.hpp"
#include "staging/staging.hpp"

namespace commrt {

namespace {

// Bytes of a map, a list and a function for an entry, roughly.
constexpr std::size_t kEntryBytes = 256;

unsigned char* end_of(const DeviceView& view) {
  return as_memory(view.address) + static_cast<std::size_t>(view.count) * item_size(view.dtype);
}

bool overlap(const DeviceView& a, const DeviceView& b) {
  return as_memory(a.address) < end_of(b) && as_memory(b.address) < end_of(a);
}

// True if the output is one that the entry was made for.
bool fits(const DeviceView& x, const DeviceView& out, const DeviceCallCache::Entry& entry) {
  if (out.device.ptr() != x.device.ptr() || out.dtype != x.dtype || !out.writable ||
      out.count != entry.out_count) {
    return false;
  }
  const bool is_same = out.address == x.address && out.count == x.count;
  return !overlap(x, out) || (is_same && entry.in_place);
}

// Raises the error that Python has for a call that could not be started.
[[noreturn]] void raise_explained(nb::handle group, PyObject* name, nb::python_error& error) {
  const nb::object said =
      group.attr(group_methods::kDevices).attr("why_not_started")(nb::handle(name), error.value());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(said.ptr())), said.ptr());
  throw nb::python_error();
}

// The stream that a call is given. False where it is none of that device's, or is no stream.
bool read_stream(const AskedCall& asked, const nb::object& device, Stream* stream) {
  try {
    *stream = nb::cast<Stream>(callback(Callback::AsStream)(nb::handle(asked.stream), device,
                                                            nb::handle(asked.name)));
    return true;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

// Lets the call come after the stream that an array says it is ordered by.
void order_after(nb::handle group, const DeviceView& view, Stream stream) {
  if (!view.exports || view.exported == stream) return;
  group.attr(group_methods::kDevices).attr("order_after")(view.device, stream, view.exported);
}

nb::object run(nb::handle group_object, const AskedCall& asked) {
  Group& group = *nb::inst_ptr<Group>(group_object);
  DeviceView x, out;
  if (!view_on_device(asked.x, x)) return {};
  const PlanKey plain{x.count, PlanKey::pack(asked.coll, x.dtype, asked.reduction, kHost),
                      static_cast<std::int32_t>(asked.root)};
  const DeviceCallCache::EntryPtr entry =
      group.device_call_cache->find({plain, x.device.ptr(), asked.out != nullptr});
  if (entry == nullptr) return {};
  if (!entry->detours.is_none() && PyList_GET_SIZE(entry->detours.ptr()) != 0) return {};
  if (entry->receives && asked.out == nullptr && !x.writable) return {};
  const bool has_out = entry->receives && asked.out != nullptr;
  if (has_out && (!view_on_device(asked.out, out) || !fits(x, out, *entry))) return {};
  const nb::handle written(asked.out != nullptr ? asked.out : asked.x);
  const nb::handle result = entry->receives ? written : nb::handle(Py_None);
  unsigned char* const from = entry->sends ? as_memory(x.address) : nullptr;
  unsigned char* const to =
      entry->receives ? as_memory(has_out ? out.address : x.address) : nullptr;
  Stream stream = x.stream;
  if (asked.stream != nullptr && !read_stream(asked, x.device, &stream)) return {};
  // Before a collective that is in none of the open buckets.
  if (group.fusion != nullptr && !group.fusion->make_way(group_object)) throw nb::python_error();
  try {
    if (entry->sends || !has_out) order_after(group_object, x, stream);
    if (has_out) order_after(group_object, out, stream);
    PyDeviceCall call = started(
        entry->work, entry->sends ? nb::handle(asked.x) : nb::handle(Py_None), result,
        asked.timeout_s,
        [&](void* const* kept) {
          return entry->start(from, to, stream, !asked.nonblocking, kept, asked.timeout_s);
        });
    if (!asked.nonblocking) return nb::borrow(result);
    return make_device_request(group_object, std::move(call), result, nb::handle(asked.name),
                               asked.timeout_s, x.device, stream, nb::handle(asked.x));
  } catch (nb::python_error& error) {
    raise_explained(group_object, asked.name, error);
  }
}

// Returns a function that starts a plan by the work of its kind, which takes one array for each
// way, or a list of them. Null where the plan is of another kind.
template <class Plan, class Work>
DeviceCallCache::Start start_by(const PyDeviceWork& runner, nb::handle given,
                                std::size_t* nbytes) {
  std::shared_ptr<const Plan> plan;
  if (!nb::try_cast(given, plan)) return nullptr;
  *nbytes = plan->memory_nbytes();
  return [plan = std::move(plan), work = static_cast<Work*>(runner.work.get())](
             unsigned char* in, unsigned char* out, Stream stream, bool orders,
             void* const* keep, double timeout_s) {
    using Pointer = unsigned char*;
    if constexpr (std::is_invocable_v<decltype(&Work::start), Work*, decltype((plan)), Pointer,
                                      Pointer, Stream, bool, void* const*, double>) {
      return work->start(plan, in, out, stream, orders, keep, timeout_s);
    } else {
      return work->start(plan, {in, out}, stream, orders, keep, timeout_s);
    }
  };
}

DeviceCallCache::Start start_of(const PyDeviceWork& runner, nb::handle plan,
                                std::size_t* nbytes) {
  for (const auto& by : {start_by<StagedPlan, Stager>, start_by<NcclPlan, NcclWork>,
                         start_by<PeerPlan, PeerWork>, start_by<MpiDevicePlan, MpiWork>}) {
    if (DeviceCallCache::Start found = by(runner, plan, nbytes)) return found;
  }
  throw nb::type_error("a plan that no work on devices starts");
}

}  // namespace

std::size_t DeviceCallCache::Kept::nbytes() const {
  return sizeof *this + sizeof *entry + kEntryBytes + entry->plan_nbytes;
}

DeviceCallCache::EntryPtr DeviceCallCache::find(const Key& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  order_.splice(order_.begin(), order_, found->second);
  return found->second->entry;
}

void DeviceCallCache::insert(const Key& key, Entry entry, std::size_t limit_nbytes) {
  Order gone;  // what goes with them may call here: they go last
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    nbytes_ -= found->second->nbytes();
    gone.splice(gone.begin(), order_, found->second);
  }
  order_.push_front({key, std::make_shared<const Entry>(std::move(entry))});
  entries_[key] = order_.begin();
  nbytes_ += order_.front().nbytes();
  while (nbytes_ > limit_nbytes && order_.size() > 1) {
    const auto last = std::prev(order_.end());
    nbytes_ -= last->nbytes();
    entries_.erase(last->key);
    gone.splice(gone.begin(), order_, last);
  }
}

void DeviceCallCache::forget() {
  Order gone;
  gone.swap(order_);  // what goes with them may call here
  entries_.clear();
  nbytes_ = 0;
}

PyObject* run_cached(PyObject* group, const AskedCall& asked) {
  try {
    return run(nb::handle(group), asked).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void bind_device_call_cache(nb::module_& m) {
  m.def("cache_device_call",
        [](Group& group, int coll, int reduction, int root, int dtype, std::int64_t count,
           nb::object device, const PyDeviceWork& runner, nb::object plan, bool gives_out,
           bool sends, bool receives, bool in_place, std::int64_t out_count, nb::object detours) {
          const PlanKey plain{count,
                              PlanKey::pack(coll, static_cast<DType>(dtype), reduction, kHost),
                              static_cast<std::int32_t>(root)};
          const DeviceCallCache::Key key{plain, device.ptr(), gives_out};
          std::size_t plan_nbytes = 0;
          DeviceCallCache::Start start = start_of(runner, plan, &plan_nbytes);
          group.device_call_cache->insert(
              key, {std::move(device), runner, std::move(start), sends, receives, in_place,
                    out_count, std::move(detours), plan_nbytes},
              group.plans.limit_nbytes);
        },
        nb::arg("group"), nb::kw_only(), nb::arg("coll"), nb::arg("reduction"), nb::arg("root"),
        nb::arg("dtype"), nb::arg("count"), nb::arg("device"), nb::arg("runner"), nb::arg("plan"),
        nb::arg("gives_out"), nb::arg("sends"), nb::arg("receives"), nb::arg("in_place"),
        nb::arg("out_count"), nb::arg("detours").none(),
        "Start collectives like this one without Python from now on, but while there is "
        "something in the list `detours`.");
  m.def("forget_device_calls", [](Group& group) { group.device_call_cache->forget(); },
        nb::arg("group"), "Look at all of them in full again.");
  m.def("view_on_device",
        [](nb::handle array) -> nb::object {
          DeviceView view;
          if (!view_on_device(array.ptr(), view)) return nb::none();
          const nb::object exported = view.exports ? nb::object(nb::int_(view.exported))
                                                   : nb::object(nb::none());
          return nb::make_tuple(view.address, view.count, static_cast<int>(view.dtype),
                                view.writable, view.device, view.stream, exported);
        },
        nb::arg("array").none(),
        "Return (address, count, dtype code, whether it is writable, device, current stream, the "
        "stream that the array names or None); None for what is left to Python. For tests.");
  m.def("num_cached_device_calls", [](const Group& group) { return group.device_call_cache->size(); },
        nb::arg("group"), "Number of device calls in the cache.");
  m.def("cached_device_calls_nbytes",
        [](const Group& group) { return group.device_call_cache->nbytes(); }, nb::arg("group"),
        "Bytes of memory that they take, with their plans.");
}

}  // namespace commrt
