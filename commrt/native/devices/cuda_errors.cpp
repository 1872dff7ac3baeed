// SPDX-License-Identifier: Apache-2.0
// Translates results of the CUDA driver into statuses and texts for the caller.
#include "devices/cuda_errors.hpp"

#include <string>

#include "devices/device_error.hpp"

namespace commrt::cuda {
namespace {

// Errors that a process does not recover from.
bool is_sticky(Result result) {
  switch (result) {
    case kDeinitialized:
    case kEccUncorrectable:
    case kNvlinkUncorrectable:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextDestroyed:
    case kAssert:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidPc:
    case kLaunchFailed:
    case kUnknown: return true;
    default: return false;
  }
}

}  // namespace

DeviceStatus meaning(Result result) {
  if (result >= kCaptureUnsupported && result <= kCaptureLast) return DeviceStatus::Capturing;
  switch (result) {
    case kSuccess: return DeviceStatus::Ok;
    case kNotReady: return DeviceStatus::NotReady;
    case kOutOfMemory: return DeviceStatus::OutOfMemory;
    case kInvalidValue:
    case kInvalidHandle:
    case kInvalidContext:
    case kNotPermitted: return DeviceStatus::Invalid;
    case kNoDevice:
    case kInvalidDevice:
    case kNotInitialized:
    case kStub:
    case kSystemDriverMismatch: return DeviceStatus::Missing;
    case kNotSupported: return DeviceStatus::Unsupported;
    case kInvalidImage:
    case kNoBinaryForGpu:
    case kInvalidPtx:
    case kJitCompilerNotFound:
    case kUnsupportedPtx:
    case kNotFound: return DeviceStatus::NoKernels;
    default: return DeviceStatus::Failed;
  }
}

DeviceStatus done(CudaDevice* device, const char* call, Result result) {
  if (result == kSuccess) return DeviceStatus::Ok;
  if (result == kNotReady) return DeviceStatus::NotReady;
  const char* name = nullptr;
  const char* text = nullptr;
  device->driver->cuGetErrorName(result, &name);
  device->driver->cuGetErrorString(result, &text);
  std::string why = std::string(call) + "() on CUDA device " + std::to_string(device->ordinal) +
                    ": " + (name ? name : std::to_string(result)) + (text ? ", " : "") +
                    (text ? text : "");
  if (is_sticky(result))
    why += ". An earlier kernel or copy of this process failed, maybe not one of commrt's; every "
           "later call fails, too: end the process";
  return device_fails(meaning(result), why);
}

}  // namespace commrt::cuda
