// SPDX-License-Identifier: Apache-2.0
// The arrays of a fusion bucket: the engine reads many short arrays as one long buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace commrt {

class Plan;

struct Part {
  int64_t first;  // element of the bucket that it begins with
  const unsigned char* in;
  unsigned char* out;
};

// The buffers of a bucket's operation, which has no `in` and `out`. The engine works on the parts
// where they lie; only what MPI is to send or reduce has to be packed.
class BucketParts {
 public:
  BucketParts() = default;
  // Adds a part. With an `itemsize`, memory right behind the last part becomes a piece of that
  // part.
  void add(const void* in, void* out, int64_t elems, size_t itemsize = 0) {
    if (itemsize != 0 && !list_.empty()) {
      const Part& last = list_.back();
      const size_t nbytes = static_cast<size_t>(elems_ - last.first) * itemsize;
      if (last.in + nbytes == in && last.out + nbytes == out) {
        elems_ += elems;
        return;
      }
    }
    list_.push_back({elems_, static_cast<const unsigned char*>(in),
                     static_cast<unsigned char*>(out)});
    elems_ += elems;
  }
  // The parts from number `at` on, once more; and without them.
  std::unique_ptr<BucketParts> tail(size_t at) const;
  void cut(size_t at);
  size_t num() const { return list_.size(); }
  int64_t elems() const { return elems_; }
  // The part that element `at` lies in; the one behind the last begins at elems().
  const Part* find(int64_t at) const;
  int64_t end_of(const Part* part) const {
    return part == &list_.back() ? elems_ : part[1].first;
  }

  bool is_packed() const { return is_packed_; }
  // Copies all parts into memory of their own, which takes their place.
  unsigned char* pack(size_t itemsize);
  // Copies the result from there to where it belongs.
  void unpack(size_t itemsize) const;
  // Does the rest of the work on a result (Plan::complete).
  void complete(const Plan& plan) const;

 private:
  std::vector<Part> list_;
  int64_t elems_ = 0;
  bool is_packed_ = false;
  std::unique_ptr<unsigned char[]> packed_;
};

}  // namespace commrt
