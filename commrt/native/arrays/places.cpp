// SPDX-License-Identifier: Apache-2.0
// Compares where arrays lie with where they lay (places.hpp).
#include "arrays/places.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "arrays/tensor_view.hpp"
#include "python_callbacks.hpp"

namespace commrt {

Places::Places(const std::vector<nb::object>& arrays, nb::object look) : look_(std::move(look)) {
  for (const nb::object& each : arrays) {
    const auto is_same = [&](const Place& place) { return place.array.is(each); };
    if (each.is_none() || std::any_of(places_.begin(), places_.end(), is_same)) continue;
    Place place{each, {}, false};
    place.at_a_glance = glance(each.ptr(), place.memory);
    if (place.at_a_glance || ask(place.array, place.memory)) places_.push_back(std::move(place));
  }
}

bool Places::glance(PyObject* array, Memory& memory) {
  return memory_of_numpy(array, memory.address, memory.nbytes) ||
         memory_of_tensor(array, memory.address, memory.nbytes);
}

bool Places::ask(const nb::object& array, Memory& memory) const {
  const nb::object said = look_(array);
  if (said.is_none()) return false;
  memory.address = reinterpret_cast<const void*>(nb::cast<uint64_t>(said[0]));
  memory.nbytes = nb::cast<int64_t>(said[1]);
  return true;
}

bool Places::holds(const Place& place) const {
  Memory now;
  const bool is_seen =
      place.at_a_glance ? glance(place.array.ptr(), now) : ask(place.array, now);
  return is_seen && now == place.memory;
}

bool Places::hold() const {
  try {
    return std::all_of(places_.begin(), places_.end(),
                       [this](const Place& place) { return holds(place); });
  } catch (nb::python_error&) {
    return false;
  }
}

void Places::check(const std::string& operation) const {
  for (const Place& place : places_) {
    if (holds(place)) continue;
    const std::string text =
        operation +
        ": an array that this call is bound to has other memory than when it was planned, as by "
        "resize(), x.data = y, or untyped_storage().resize_(): plan the call again";
    raise_error("UsageError", text.c_str());
  }
}

void bind_places(nb::module_& m) {
  nb::class_<Places>(m, "Places", "Where the arrays of a bound call lie.")
      .def(nb::init<const std::vector<nb::object>&, nb::object>(), nb::arg("arrays"), nb::arg("look"),
           "`look` returns (address, bytes) of an array that is neither numpy's nor torch's own, "
           "or None where neither can change.")
      .def("check", &Places::check, nb::arg("operation"),
           "Raise UsageError where an array has other memory than it had at first.");
}

}  // namespace commrt
