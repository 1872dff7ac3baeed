// SPDX-License-Identifier: Apache-2.0
// A ring of records, all of one size, of the latest calls of this process's ranks, for a log.
//
// A record refers to the Kind of its call (commrt/trace/recorder.py) and to a place in the
// program. Both are Python objects that many records share; their names and lines are looked up
// when a log is written. A record has a number, and is gone when later calls have overwritten it.
// All of it needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>

namespace commrt {

namespace nb = nanobind;

// Python's time.monotonic_ns(): ranks of one machine share it.
inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Counts the calls of a group, or the messages of a pair.
struct RecordCounter {
  int64_t next = 0;
};

struct LoggedCall {
  PyObject* kind;  // null: the call was refused, and counts on no rank
  PyObject* site;
  int64_t seq;
  int64_t start_ns;
  int64_t end_ns;  // 0: not seen so far; negative: it failed then
};

class RecordRing {
 public:
  explicit RecordRing(size_t capacity) : capacity_(std::max<size_t>(capacity, 1)) {}
  ~RecordRing() { clear(); }
  RecordRing(const RecordRing&) = delete;
  RecordRing& operator=(const RecordRing&) = delete;

  // Takes memory for as many records as there may be.
  void reserve();
  void resize(size_t capacity);
  void clear();

  size_t capacity() const { return capacity_; }
  // Records that are there.
  size_t size() const { return static_cast<size_t>(next_ - oldest_) - holes_; }
  // Records that later ones have pushed out.
  uint64_t num_dropped() const { return dropped_; }

  // Adds a record of a call that begins now, and returns its number.
  uint64_t append(PyObject* kind, PyObject* site, RecordCounter& counter, int64_t start_ns);
  // The end of `num` records from `first` on was seen.
  void end(uint64_t first, uint32_t num) { end_at(first, num, monotonic_ns()); }
  // They have failed, and who wants to know is told why.
  void fail(uint64_t first, uint32_t num, nb::handle error);
  // They were refused on this rank.
  void take_back(uint64_t first, uint32_t num);

  nb::object kind_of(uint64_t number) const;
  nb::list snapshot() const;

  static void tell(nb::handle error);

 private:
  struct Free {
    void operator()(LoggedCall* memory) const { std::free(memory); }
  };
  LoggedCall& at(uint64_t number) const { return slots_[number % capacity_]; }
  LoggedCall* find(uint64_t number) const {
    return number >= oldest_ && number < next_ ? &at(number) : nullptr;
  }
  void end_at(uint64_t first, uint32_t num, int64_t end_ns);
  void drop_oldest();

  size_t capacity_;
  std::unique_ptr<LoggedCall[], Free> slots_;  // null before the first recording
  uint64_t next_ = 0, oldest_ = 0;         // numbers
  size_t holes_ = 0;                       // records that were taken back, in between
  uint64_t dropped_ = 0;
};

}  // namespace commrt
