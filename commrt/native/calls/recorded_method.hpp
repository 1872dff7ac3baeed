// SPDX-License-Identifier: Apache-2.0
// Wraps a method of a communicator or process group, and records each call of it in a log.
//
// During a recording, the wrapper is an attribute of the object and hides the wrapped method. It
// reads a call's arguments (lengths and types of arrays, numbers, words that cannot change), and
// finds by them what it knows of such calls. For a call that is new, or that it cannot read, it
// asks Python.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "recording/call_sites.hpp"
#include "recording/record_ring.hpp"

namespace commrt {

// The words that tell a call from others of the same method.
struct CallWords {
  static constexpr size_t kMost = 96, kMostObjects = 24;
  std::array<uint64_t, kMost> words;
  size_t num = 0;
  std::array<PyObject*, kMostObjects> objects;  // whose addresses are words
  size_t num_objects = 0;

  CallWords() = default;
  CallWords(const CallWords& other) { *this = other; }
  CallWords& operator=(const CallWords& other) {  // not what is unused
    num = other.num;
    num_objects = other.num_objects;
    std::copy_n(other.words.begin(), num, words.begin());
    std::copy_n(other.objects.begin(), num_objects, objects.begin());
    return *this;
  }

  bool add(uint64_t word) {
    if (num == kMost) return false;
    words[num++] = word;
    return true;
  }
  bool add_object(PyObject* object) {
    if (num_objects == kMostObjects || !add(reinterpret_cast<uint64_t>(object))) return false;
    objects[num_objects++] = object;
    return true;
  }
  bool operator==(const CallWords& other) const {
    return num == other.num && std::equal(words.begin(), words.begin() + num, other.words.begin());
  }
};

class RecordedCalls {
 public:
  nb::object function;  // what is recorded
  nb::object owner;     // what it is called with, or a weak reference; none where it is bound
  std::shared_ptr<RecordRing> ring;
  std::shared_ptr<CallSites> sites;
  // One letter for each positional argument says how it is read: `a` type and bytes of an array or
  // of several, `s` their types and shapes, `i` int, `w` a word that lasts, `r` the root of
  // torch's options or an int, `-` not at all.
  std::string reads;
  nb::object look;    // (args, kwargs) -> kinds, or None for a call that is not to be recorded
  nb::object watch;   // (result, first, num) -> what the caller gets
  nb::object raised;  // (first, num, error)
  nb::object calls;   // of torch's groups: says whether calls are coalesced
  nb::object asked;   // of torch's groups: what a program asks of single calls

  nb::object call(PyObject* const* args, size_t nargsf, PyObject* kwnames);
  // Visits the references that a cycle may go through, for the garbage collector.
  template <class Visit>
  int visit(Visit visit_one) const {
    for (const nb::object* each : {&function, &owner, &look, &watch, &raised, &calls, &asked}) {
      if (const int stop = each->is_valid() ? visit_one(each->ptr()) : 0; stop != 0) return stop;
    }
    return 0;
  }
  // Breaks such cycles: who calls it then gets a TypeError.
  void forget_owner() {
    const nb::object gone[] = {std::exchange(owner, nb::none()), std::exchange(look, nb::none())};
  }

 private:
  struct Kinds {
    std::vector<nb::object> each;
    std::vector<RecordCounter*> counters;  // of these
    bool on_device = false;
    std::vector<nb::object> kept;  // the objects of the words
  };
  struct Hash {
    size_t operator()(const CallWords& key) const;
  };

  bool read(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, CallWords& key) const;
  std::shared_ptr<const Kinds> find(const CallWords& key);
  // Asks Python about a call; null where it is not to be recorded.
  std::shared_ptr<const Kinds> looked_at(PyObject* const* args, Py_ssize_t nargs,
                                         PyObject* kwnames, const CallWords* key);
  nb::object pass_on(PyObject* const* args, size_t nargsf, PyObject* kwnames) const;
  nb::object ended(nb::object result, bool nonblocking, bool on_device, uint64_t first,
                   uint32_t num) const;
  bool asks_nothing() const;

  std::unordered_map<CallWords, std::shared_ptr<const Kinds>, Hash> known_;
  CallWords last_key_;
  std::shared_ptr<const Kinds> last_;
};

void bind_recording(nb::module_& m);

}  // namespace commrt
