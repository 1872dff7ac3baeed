// SPDX-License-Identifier: Apache-2.0
// The table of functions that commrt asks of a device. A simulated device, threads and CUDA
// implement it (docs/internals/devices.md). Code above it is the same for all of them.
//
// The second part of the table is what a host thread does with memory that it shares with a
// device. On hardware these are plain loads, stores and nothing; the simulated device learns from
// them what orders what. So all code that shares memory with a device goes through them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "devices/box_launch.hpp"
#include "devices/foreign_kernel.hpp"
#include "devices/scaled_launch.hpp"
#include "types.hpp"

namespace commrt {

// The codes of commrt/devices/base.py; a unit test compares.
enum class DeviceStatus : int {
  Ok = 0,
  NotReady,     // an event that has not happened yet; no error
  Invalid,      // a wrong argument, or a call where it is not allowed
  OutOfMemory,
  Missing,      // no driver, no device, or one too old
  Unsupported,  // the device cannot do this
  NoKernels,    // load_kernels() has not been called
  Capturing,    // not allowed while a stream is captured; the capture may be lost
  Failed,       // the device failed earlier, and every call fails from then on
  Deadlock,     // nothing can go on (simulated device only)
};
const char* status_name(DeviceStatus status);

enum class MemoryKind : int { Unknown = 0, Device, Pinned, Managed };
enum class CaptureState : int { None = 0, Active, Invalidated };
enum class CaptureMode : int { Global = 0, ThreadLocal, Relaxed };

struct PointerFacts {
  MemoryKind kind = MemoryKind::Unknown;
  int device = kHost;
  std::uint64_t base = 0;  // of the allocation
  std::uint64_t nbytes = 0;
};

struct IpcHandle {
  unsigned char bytes[64];
};

using Stream = std::uint64_t;  // 0 is the legacy default stream
using Event = std::uint64_t;
using Graph = std::uint64_t;  // one that can be launched
using HostFunction = void (*)(void* argument);

struct Device;

// Calls that return a status leave a text for last_error() of the same thread when they fail.
struct DeviceApi {
  const char* kind;

  DeviceStatus (*alloc)(Device*, std::size_t nbytes, void** out);
  DeviceStatus (*free)(Device*, void* ptr);
  DeviceStatus (*pinned_alloc)(Device*, std::size_t nbytes, void** out);
  DeviceStatus (*pinned_free)(Device*, void* ptr);

  // Lower priority numbers go first. A blocking stream takes turns with the legacy stream.
  DeviceStatus (*stream_create)(Device*, int priority, bool blocking, Stream* out);
  DeviceStatus (*stream_destroy)(Device*, Stream);
  DeviceStatus (*stream_synchronize)(Device*, Stream);

  DeviceStatus (*memcpy_async)(Device*, void* dst, const void* src, std::size_t nbytes, Stream);

  // A stream waits for the record that is the latest when it is told to; for none: not at all.
  DeviceStatus (*event_create)(Device*, Event* out);
  DeviceStatus (*event_record)(Device*, Event, Stream);
  DeviceStatus (*event_query)(Device*, Event);  // Ok or NotReady
  DeviceStatus (*event_destroy)(Device*, Event);
  DeviceStatus (*stream_wait_event)(Device*, Stream, Event);
  // An event whose records know their time; it costs a little more. Microseconds between the
  // latest records of two of them: NotReady before both have happened, Invalid without a record
  // or a time, Unsupported where time means nothing (simulated devices).
  DeviceStatus (*timed_event_create)(Device*, Event* out);
  DeviceStatus (*event_elapsed)(Device*, Event from, Event to, double* elapsed_us);

  // Flags are aligned 32-bit words. A reader that sees a write also sees everything that came
  // before it in its stream. The wait is cyclic: int32(*flag - value) >= 0.
  DeviceStatus (*write_value32)(Device*, Stream, std::uint32_t* flag, std::uint32_t value);
  DeviceStatus (*wait_value32_geq)(Device*, Stream, std::uint32_t* flag, std::uint32_t value);

  // dst[i] = dst[i] op src[i]; avg is the sum, as in kernels.hpp.
  DeviceStatus (*launch_reduce)(Device*, RedOp, DType, void* dst, const void* src,
                                std::size_t count, Stream);
  DeviceStatus (*launch_copy)(Device*, void* dst, const void* src, std::size_t nbytes, Stream);
  // dst = dst + src with factors where `which` says so, or dst = factor * src
  // (scaled_launch.hpp); short floats are rounded once. For what premul_sum is defined for.
  DeviceStatus (*launch_scaled_sum)(Device*, DType, void* dst, const void* src,
                                    std::size_t count, unsigned which, Scale factor, Stream);
  // dst[i] = dst[i] / divisor toward zero, for integers.
  DeviceStatus (*launch_divide)(Device*, DType, void* dst, std::size_t count,
                                std::int64_t divisor, Stream);
  // All boxes of one table, into a buffer or out of it; it is read while the stream runs.
  DeviceStatus (*launch_boxes)(Device*, const BoxLaunch& launch, Stream);
  // For conformance tests only. The function must not call the device.
  DeviceStatus (*launch_host)(Device*, Stream, HostFunction, void* argument);
  // Adds a CUDA module (cubin, or PTX with its 0) with kernels of the launches. Those that are
  // named are made ready at once, as a first launch would otherwise wait for the device; they
  // take the place of earlier ones of the same name. Ignored where there is no GPU.
  DeviceStatus (*load_kernels)(Device*, const void* image, std::size_t nbytes,
                               const char* const* names, std::size_t num_names);

  DeviceStatus (*ptr_attributes)(Device*, const void* ptr, PointerFacts* out);
  DeviceStatus (*is_capturing)(Device*, Stream, CaptureState* out);
  // Sets the capture mode of this thread, and leaves the earlier one in `mode`.
  DeviceStatus (*exchange_capture_mode)(Device*, CaptureMode* mode);

  // --- graphs ---
  // From begin to end a stream's commands are recorded, and not run; so are those of streams that
  // wait for an event that was recorded meanwhile. These must be waited for in turn before the end.
  DeviceStatus (*begin_capture)(Device*, Stream, CaptureMode);
  DeviceStatus (*end_capture)(Device*, Stream, Graph* out);
  // The number of the capture that a stream is a part of, which no other has; 0: none.
  DeviceStatus (*capture_id)(Device*, Stream, std::uint64_t* out);
  // Recorded only, and done at each launch: as if the host recorded the event, or let a stream
  // wait for its latest record, when it calls graph_launch().
  DeviceStatus (*event_record_external)(Device*, Event, Stream);
  DeviceStatus (*stream_wait_external)(Device*, Stream, Event);
  // Runs behind what the stream was given, and behind the launch before of the same graph.
  DeviceStatus (*graph_launch)(Device*, Graph, Stream);
  DeviceStatus (*graph_destroy)(Device*, Graph);  // what was launched still runs

  // A handle means the whole allocation: `offset` says where in it ptr is.
  DeviceStatus (*ipc_export)(Device*, const void* ptr, IpcHandle* out, std::size_t* offset);
  DeviceStatus (*ipc_open)(Device*, const IpcHandle*, void** base);
  DeviceStatus (*ipc_close)(Device*, void* base);

  // Why the latest failed call of this thread failed.
  const char* (*last_error)(Device*);

  // --- what a host thread does with shared memory ---
  DeviceStatus (*host_access)(Device*, const void* ptr, std::size_t nbytes, bool writes);
  DeviceStatus (*flag_load)(Device*, const std::uint32_t* flag, std::uint32_t* value);
  DeviceStatus (*flag_store)(Device*, std::uint32_t* flag, std::uint32_t value);
  // Null where a mutex is enough (HostLock).
  DeviceStatus (*lock)(Device*, const void* token);
  DeviceStatus (*unlock)(Device*, const void* token);
  // For a thread that looked at its flags and found nothing to do. Pauses until something may have
  // changed, or for a little while.
  DeviceStatus (*pause)(Device*);

  // --- other libraries ---
  // A kernel of a library's pretended form. Not on hardware.
  DeviceStatus (*launch_foreign)(Device*, const ForeignKernel& kernel, Stream);
  // Makes the device the calling thread's current one, as libraries take it that are not told, or
  // gives the thread back the one before.
  DeviceStatus (*make_current)(Device*, bool enter);
};

struct Device {
  const DeviceApi* api = nullptr;
  // True if streams can write flags and wait for them. Otherwise both calls are Unsupported, and
  // code that builds on flags polls events instead.
  bool memory_flags = true;
};

inline constexpr char kNoFlags[] =
    "streams of this device do not write flags or wait for them (memory_flags is false): "
    "poll events instead";

// The current one of this thread, of those that are not hardware; null if there is none.
Device* current_device();

// While it lives, a device is this thread's current one; null: nothing.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device* device) : device_(device) {
    entered_ = device_ != nullptr && device_->api->make_current(device_, true) == DeviceStatus::Ok;
  }
  ~CurrentDevice() {
    if (entered_) device_->api->make_current(device_, false);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device* const device_;
  bool entered_ = false;
};

// Holds a mutex that other host threads take too, in a way that a simulated device can follow:
// a thread that waits for a mutex it does not know of would stop the whole simulation.
class HostLock {
 public:
  HostLock(Device* device, std::mutex& mutex) : device_(device), mutex_(mutex) {
    if (device_->api->lock)
      status_ = device_->api->lock(device_, &mutex_);
    else
      mutex_.lock();
  }
  ~HostLock() {
    if (!device_->api->lock)
      mutex_.unlock();
    else if (status_ == DeviceStatus::Ok)
      device_->api->unlock(device_, &mutex_);
  }
  HostLock(const HostLock&) = delete;
  HostLock& operator=(const HostLock&) = delete;
  DeviceStatus status() const { return status_; }

 private:
  Device* device_;
  std::mutex& mutex_;
  DeviceStatus status_ = DeviceStatus::Ok;
};

// True if a flag has come to `value`, cyclically.
inline bool flag_reached(std::uint32_t flag, std::uint32_t value) {
  return static_cast<std::int32_t>(flag - value) >= 0;
}

}  // namespace commrt
