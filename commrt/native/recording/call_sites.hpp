// SPDX-License-Identifier: Apache-2.0
// Finds the place in the program that a call comes from, by code object and instruction.
//
// A frame belongs to the program, is skipped, or is commrt's own: Python says which, once per
// instruction (commrt/trace/call_sites.py). The line is looked up when a log is written.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <unordered_map>

namespace commrt {

namespace nb = nanobind;

class CallSites {
 public:
  // `classify` returns what a frame is: a place, `core`, or None for one to be passed over.
  // `beyond` returns the place of a frame that nothing but such frames led to; `nowhere` stands
  // for calls that no Python made.
  CallSites(nb::object classify, nb::object beyond, nb::object core, nb::object nowhere)
      : classify_(std::move(classify)), beyond_(std::move(beyond)), core_(std::move(core)),
        nowhere_(std::move(nowhere)) {}
  ~CallSites() { clear(); }
  CallSites(const CallSites&) = delete;
  CallSites& operator=(const CallSites&) = delete;

  // The place that a frame is called from: `core` where the frame itself is commrt's own.
  nb::object of_caller(PyFrameObject* frame);
  // The same of the code that runs now.
  nb::object of_running();
  bool is_core(const nb::object& site) const { return site.is(core_); }
  void clear();

 private:
  struct Key {
    PyObject* code;  // kept alive, so that no other one can get its address
    int instruction;
    bool operator==(const Key& other) const {
      return code == other.code && instruction == other.instruction;
    }
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      const auto address = reinterpret_cast<size_t>(key.code) >> 4;
      return (address ^ static_cast<size_t>(key.instruction) << 20) * 0x9E3779B97F4A7C15ull >> 20;
    }
  };

  nb::object look(PyFrameObject* frame, const Key& key);

  std::unordered_map<Key, nb::object, Hash> known_;
  nb::object classify_, beyond_, core_, nowhere_;
};

}  // namespace commrt
