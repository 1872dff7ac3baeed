// SPDX-License-Identifier: Apache-2.0
// Texts for errors of the CUDA driver.
#pragma once

#include "devices/cuda_device.hpp"

namespace commrt::cuda {

DeviceStatus meaning(Result result);
// The status of a call of the driver by its name; keeps a text for last_error() where it failed.
DeviceStatus done(CudaDevice* device, const char* call, Result result);

}  // namespace commrt::cuda
