// SPDX-License-Identifier: Apache-2.0
// The kinds of devices, each bound beside what all of them have.
#pragma once

#include <nanobind/nanobind.h>

#include "arrays/python_device.hpp"

namespace nb = nanobind;

namespace commrt {

void bind_sim(nb::module_& m, nb::class_<PyDevice>& device);
void bind_real_devices(nb::module_& m, nb::class_<PyDevice>& device);

}  // namespace commrt
