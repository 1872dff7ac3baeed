// SPDX-License-Identifier: Apache-2.0
// How an implementation of a device says why a call failed.
#pragma once

#include <string>

#include "device.hpp"

namespace commrt {

std::string& device_error();  // of this thread
// Keeps the text for last_error(), and returns the status.
DeviceStatus device_fails(DeviceStatus status, std::string text);
const char* last_device_error(Device*);  // for the table
// For the tables of devices that are not hardware.
DeviceStatus make_current_here(Device*, bool enter);
std::string hex(std::uint64_t number);
inline std::string hex(const void* ptr) { return hex(reinterpret_cast<std::uint64_t>(ptr)); }

}  // namespace commrt
