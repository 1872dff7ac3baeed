// SPDX-License-Identifier: Apache-2.0
// Where the arrays of a bound call lie: a program may give an array other memory, or shorten it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

namespace commrt {

namespace nb = nanobind;

class Places {
 public:
  // `look` returns an array's address and bytes, or None where neither can change. It is asked for
  // arrays that the engine cannot see at a glance.
  Places(const std::vector<nb::object>& arrays, nb::object look);

  // True if every array has the memory that it had at first.
  bool hold() const;
  // Raises UsageError where one has other memory, and what `look` raises.
  void check(const std::string& operation) const;

 private:
  struct Memory {
    const void* address = nullptr;
    int64_t nbytes = 0;
    bool operator==(const Memory& other) const {
      return address == other.address && nbytes == other.nbytes;
    }
  };
  struct Place {
    nb::object array;
    Memory memory;
    bool at_a_glance;
  };

  static bool glance(PyObject* array, Memory& memory);
  // False: it cannot change. Throws what `look` raises.
  bool ask(const nb::object& array, Memory& memory) const;
  bool holds(const Place& place) const;

  std::vector<Place> places_;
  nb::object look_;
};

void bind_places(nb::module_& m);

}  // namespace commrt
