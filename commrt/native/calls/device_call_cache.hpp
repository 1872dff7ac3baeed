// SPDX-License-Identifier: Apache-2.0
// A cache of collectives on device arrays. device_calls/collectives.py prepares the first call; a
// call like it goes to the device from here, without Python.
//
// The key is operation, reduction, root, type, length and device, and whether there is an `out`.
// Each call still checks its own arrays. If a check does not plainly pass, the call takes the long
// way through Python, which says what is wrong.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <unordered_map>

#include "arrays/device_view.hpp"
#include "calls/device_call.hpp"
#include "calls/group.hpp"

namespace commrt {

class DeviceCallCache {
 public:
  struct Key {
    PlanKey plain;
    const void* device = nullptr;  // the Python object
    bool gives_out = false;
    bool operator==(const Key& other) const {
      return plain == other.plain && device == other.device && gives_out == other.gives_out;
    }
  };

  using Start = std::function<DeviceWork::CallPtr(unsigned char* in, unsigned char* out, Stream,
                                                  bool orders, void* const* keep,
                                                  double timeout_s)>;
  struct Entry {
    nb::object device;  // alive, so that no other object gets its address
    PyDeviceWork work;
    Start start;
    bool sends = false, receives = false;  // whether this rank's arrays are read, and written
    bool in_place = false;                 // whether the output may be the input
    std::int64_t out_count = 0;
    nb::object detours;  // a list or None: while there is something in it, calls go the long way
    std::size_t plan_nbytes = 0;  // of the plan that `start` has
  };
  using EntryPtr = std::shared_ptr<const Entry>;

  // Null where there is none.
  EntryPtr find(const Key& key);
  // Keeps an entry, and drops those that were not used for longest where all of them take more
  // than so many bytes; the last one stays.
  void insert(const Key& key, Entry entry, std::size_t limit_nbytes);
  void forget();
  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }
  std::size_t nbytes() const { return nbytes_; }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return PlanKeyHash()(key.plain) ^ (reinterpret_cast<std::uintptr_t>(key.device) >> 4) ^
             static_cast<std::size_t>(key.gives_out) << 20;
    }
  };
  struct Kept {
    Key key;
    EntryPtr entry;
    std::size_t nbytes() const;
  };
  using Order = std::list<Kept>;  // the last used first

  Order order_;
  std::unordered_map<Key, Order::iterator, Hash> entries_;
  std::size_t nbytes_ = 0;
};

// A call whose arguments are all of those that an entry can be found by.
struct AskedCall {
  int coll, reduction;
  int root;
  PyObject *x, *out;  // `out` is null where it was not given
  PyObject* name;     // of the operation
  PyObject* stream;   // null where it was not given
  double timeout_s;
  bool nonblocking;
};

// Runs a call that is known: a request, or the output. Null without an error where it is not.
PyObject* run_cached(PyObject* group, const AskedCall& asked);

void bind_device_call_cache(nb::module_& m);

}  // namespace commrt
