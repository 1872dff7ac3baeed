// SPDX-License-Identifier: Apache-2.0
// Finds out whether a program writes to an array while a nonblocking call sends it (check mode).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace commrt {

// What an array held as its operation began. Where the result goes to the same array, the
// operation runs in a copy, so that what the program writes can be told from what the engine does.
class InFlight {
 public:
  // `in` is of `in_nbytes`, and what of it lies in the output does not count.
  InFlight(const unsigned char* in, std::size_t in_nbytes, unsigned char* out,
           std::size_t out_nbytes);
  // The copy to run in, or null.
  unsigned char* copy() const { return copy_.get(); }
  // To be called once, at the end: true if the array holds something else. The result is where it
  // belongs then.
  bool has_changed();

 private:
  uint64_t sum() const;

  const unsigned char* in_;
  std::size_t in_nbytes_;
  unsigned char* out_;
  std::size_t out_nbytes_;
  std::unique_ptr<unsigned char[]> copy_;
  uint64_t before_ = 0;
};

}  // namespace commrt
