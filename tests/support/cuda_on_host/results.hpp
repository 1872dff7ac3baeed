// SPDX-License-Identifier: Apache-2.0
// Results of the CUDA driver's functions, as cuda.h numbers them.
#pragma once

#include <cstdint>

namespace cuda_on_host {

using Result = int;
using Handle = void*;
using Pointer = unsigned long long;

enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

// The name in cuda.h; null for a number that this library does not give by itself.
const char* name_of(Result result);

// True for errors that a process does not recover from: every later call returns them, too.
bool is_sticky(Result result);

}  // namespace cuda_on_host
