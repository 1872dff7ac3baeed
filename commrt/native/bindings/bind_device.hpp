// SPDX-License-Identifier: Apache-2.0
// What the bindings of devices share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "devices/device.hpp"

namespace nb = nanobind;

namespace commrt {

struct PyDevice {
  Device* device = nullptr;
  std::shared_ptr<void> keeps;  // alive what the device lies in
};

// Raises what the status means, with the text of device_error().
void check_device(DeviceStatus status);
void bind_device(nb::module_& m);
void bind_sim(nb::module_& m, nb::class_<PyDevice>& device);
void bind_real_devices(nb::module_& m, nb::class_<PyDevice>& device);

}  // namespace commrt
