// SPDX-License-Identifier: Apache-2.0
// Binds the kinds of devices: the methods of all of them, and those of each kind.
#pragma once

#include <nanobind/nanobind.h>

#include "arrays/python_device.hpp"

namespace nb = nanobind;

namespace commrt {

void bind_sim(nb::module_& m, nb::class_<PyDevice>& device);
void bind_real_devices(nb::module_& m, nb::class_<PyDevice>& device);

}  // namespace commrt
