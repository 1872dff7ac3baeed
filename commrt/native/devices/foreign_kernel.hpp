// SPDX-License-Identifier: Apache-2.0
// Stands for a kernel of another library on devices without hardware. Tests use it with a pretended
// form of the library.
//
// The kernel begins when its stream reaches it. It stays at the head of the stream until it may
// end, as a kernel does that waits for its peers, and is ordered after the kernels that it met.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace commrt {

struct ForeignRange {
  void* at;
  std::size_t nbytes;
  bool writes;
};

struct ForeignKernel {
  std::uint64_t id = 0;  // no other kernel of the process has it
  void* argument = nullptr;
  // Called by the device, and must not call it. `may_end` must take no lock.
  void (*begin)(void* argument) = nullptr;
  bool (*may_end)(void* argument) = nullptr;
  void (*end)(void* argument) = nullptr;
  // The kernels that it has met, of any device; asked once it may end.
  const std::vector<std::uint64_t>& (*met)(void* argument) = nullptr;
  // A captured kernel has these instead of the others. `again` makes a kernel for one more run;
  // `drop` is called when the graph goes.
  ForeignKernel (*again)(void* argument) = nullptr;
  void (*drop)(void* argument) = nullptr;
  std::vector<ForeignRange> ranges;  // of memory that it touches
  // An address that stands for what only one kernel at a time may have, such as the room that
  // kernels need to run at once; null: nothing.
  const void* holds = nullptr;
};

}  // namespace commrt
