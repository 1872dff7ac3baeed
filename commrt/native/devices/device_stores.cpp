// SPDX-License-Identifier: Apache-2.0
#include "devices/device_stores.hpp"

#include <algorithm>

namespace commrt {

FlagLines::FlagLines(Device* device, std::size_t count, std::uint32_t value)
    : DeviceUser(device) {
  call(&DeviceApi::pinned_alloc, count * kLine, &memory_);
  for (std::size_t i = 0; i < count; ++i) call(&DeviceApi::flag_store, (*this)[i], value);
}

std::uint32_t* FlagLines::operator[](std::size_t number) const {
  return reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(memory_) + number * kLine);
}

void FlagLines::free() { device_->api->pinned_free(device_, memory_); }

Event EventPool::take() {
  {
    const std::lock_guard<std::mutex> own(mutex_);
    if (!events_.empty()) {
      const Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  Event event = 0;
  call(&DeviceApi::event_create, &event);
  return event;
}

void EventPool::give(Event event) {
  {
    const std::lock_guard<std::mutex> own(mutex_);
    if (!closed_) {
      events_.push_back(event);
      return;
    }
  }
  device_->api->event_destroy(device_, event);
}

std::size_t EventPool::size() {
  const std::lock_guard<std::mutex> own(mutex_);
  return events_.size();
}

void EventPool::close() {
  std::vector<Event> all;
  {
    const std::lock_guard<std::mutex> own(mutex_);
    all.swap(events_);
    closed_ = true;
  }
  for (const Event event : all) device_->api->event_destroy(device_, event);
}

unsigned char* Scratch::of(std::size_t nbytes) {
  if (nbytes == 0) return nullptr;
  if (blocks_.empty() || blocks_.back().second < nbytes) {
    const std::size_t before = blocks_.empty() ? 256 : 2 * blocks_.back().second;
    const std::size_t wanted = std::max(nbytes, before);
    void* made = nullptr;
    call(&DeviceApi::alloc, wanted, &made);
    // The smaller ones stay: what was given to the device may use them.
    blocks_.emplace_back(made, wanted);
  }
  return static_cast<unsigned char*>(blocks_.back().first);
}

void Scratch::free() {
  for (const auto& [memory, nbytes] : blocks_) device_->api->free(device_, memory);
  blocks_.clear();
}

}  // namespace commrt
