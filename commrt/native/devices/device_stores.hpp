// SPDX-License-Identifier: Apache-2.0
// Pools of flags, events and scratch memory that device work uses again and again. Destructors do
// not free them, as the device may still use them: their owner frees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "devices/device_error.hpp"

namespace commrt {

constexpr std::size_t kLine = 64;
inline std::size_t in_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

// Flags in pinned memory, each in a line of its own.
class FlagLines : DeviceUser {
 public:
  // All hold `value` at first. Throws DeviceFailure.
  FlagLines(Device* device, std::size_t count, std::uint32_t value);
  std::uint32_t* operator[](std::size_t number) const;
  void free();

 private:
  void* memory_ = nullptr;
};

// Events that wait for the next call.
class EventPool : DeviceUser {
 public:
  explicit EventPool(Device* device) : DeviceUser(device) {}
  Event take();  // throws DeviceFailure
  // After close(), the event is destroyed: it is of a call that outlives the work, and nobody
  // would take it.
  void give(Event event);
  std::size_t size();
  void close();

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
  bool closed_ = false;
};

// Memory of the device for operations that run one behind the other.
class Scratch : DeviceUser {
 public:
  explicit Scratch(Device* device) : DeviceUser(device) {}
  // Returns memory of at least so many bytes; null for 0. May wait for all that the device was
  // given. Throws DeviceFailure.
  unsigned char* of(std::size_t nbytes);
  void free();

 private:
  std::vector<std::pair<void*, std::size_t>> blocks_;  // the last one is the largest
};

// While it lives, calls of this thread do not end captures, whoever began them.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(Device* device) : device_(device) {
    relaxed_ = device_->api->exchange_capture_mode(device_, &mode_) == DeviceStatus::Ok;
  }
  ~RelaxedCapture() {
    if (relaxed_) device_->api->exchange_capture_mode(device_, &mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  explicit operator bool() const { return relaxed_; }

 private:
  Device* const device_;
  CaptureMode mode_ = CaptureMode::Relaxed;
  bool relaxed_ = false;
};

}  // namespace commrt
