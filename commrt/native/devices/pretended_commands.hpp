// SPDX-License-Identifier: Apache-2.0
// Commands of the devices that are not hardware, simulated ones and those of threads: their kinds,
// what they hold, and the kernels that they run on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "devices/device.hpp"
#include "devices/graph_recording.hpp"

namespace commrt::pretended {

// What a stream of an H200 held, by a driver of CUDA 13.0.
constexpr int kMostCommands = 1020;

enum class Kind : std::uint8_t {
  Copy,
  Stage,  // the rest of a copy that has taken pageable memory already
  Record,
  WaitEvent,
  Write,
  Wait,
  Reduce,
  KernelCopy,
  ScaledSum,
  Divide,
  Boxes,
  HostFunction,
  Foreign,     // a kernel of another library, or its beginning
  ForeignEnd,  // its end, where that is a command of its own
};
const char* kind_name(Kind kind);

// The work of a command, whatever the device.
struct Work {
  Kind kind = Kind::Copy;
  RedOp op = RedOp::Sum;
  DType dtype = DType::U8;
  std::uint32_t value = 0;  // of a flag; of a scaled sum what it scales
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t nbytes = 0;
  Scale factor;  // of a scaled sum; of a division the divisor
  HostFunction function = nullptr;
  void* argument = nullptr;
  std::shared_ptr<const BoxLaunch> boxes;
  std::shared_ptr<const ForeignKernel> foreign;
};

// Runs copies and the kernels that commrt has for elements. The memory must be there.
void run_on_host(const Work& work);

// Work with its place among a device's streams and events.
template <class StreamState, class Record, class EventState>
struct Ordered : Work {
  std::shared_ptr<Record> record;        // that it makes, or waits for
  std::shared_ptr<EventState> event;     // whose record that is
  std::shared_ptr<EventState> external;  // in a capture: an event outside of it
  // So many commands of these other streams must have run.
  std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>> after;
};

// The facts that the record of an event has of the capture that holds it.
template <class Command>
struct CapturedRecord {
  bool captured = false;  // then it happens at launches only
  std::weak_ptr<Capture<Command>> capture;
  Progress known;  // in a capture: what it comes after
};

// An event's state, which stays while somebody waits for it after the event is destroyed.
template <class Record>
struct LatestRecord {
  std::shared_ptr<Record> latest;  // null: never recorded
  bool is_timed = false;
};

// True while a host function runs on this thread; it must not call the device.
bool& in_host_function();

// Calls a function that must not call the device.
inline void call_host_function(HostFunction function, void* argument) {
  in_host_function() = true;
  function(argument);
  in_host_function() = false;
}

}  // namespace commrt::pretended
