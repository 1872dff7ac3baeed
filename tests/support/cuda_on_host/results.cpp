// SPDX-License-Identifier: Apache-2.0
#include "results.hpp"

namespace cuda_on_host {

const char* name_of(Result result) {
  switch (result) {
    case kSuccess: return "CUDA_SUCCESS";
    case kInvalidValue: return "CUDA_ERROR_INVALID_VALUE";
    case kOutOfMemory: return "CUDA_ERROR_OUT_OF_MEMORY";
    case kNotInitialized: return "CUDA_ERROR_NOT_INITIALIZED";
    case kInvalidDevice: return "CUDA_ERROR_INVALID_DEVICE";
    case kInvalidImage: return "CUDA_ERROR_INVALID_IMAGE";
    case kInvalidContext: return "CUDA_ERROR_INVALID_CONTEXT";
    case kInvalidHandle: return "CUDA_ERROR_INVALID_HANDLE";
    case kNotFound: return "CUDA_ERROR_NOT_FOUND";
    case kNotReady: return "CUDA_ERROR_NOT_READY";
    case kIllegalAddress: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case kLaunchFailed: return "CUDA_ERROR_LAUNCH_FAILED";
    case kNotPermitted: return "CUDA_ERROR_NOT_PERMITTED";
    case kNotSupported: return "CUDA_ERROR_NOT_SUPPORTED";
    case kCaptureUnsupported: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    case kCaptureInvalidated: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    case kCaptureMerge: return "CUDA_ERROR_STREAM_CAPTURE_MERGE";
    case kCaptureUnmatched: return "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    case kCaptureUnjoined: return "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    case kCaptureIsolation: return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    case kCaptureImplicit: return "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    case kCapturedEvent: return "CUDA_ERROR_CAPTURED_EVENT";
    case kCaptureWrongThread: return "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
    default: return nullptr;
  }
}

bool is_sticky(Result result) {
  return result == 214 || result == 220 || (result >= 700 && result < 720 && result != 704) ||
         result == 999;
}

}  // namespace cuda_on_host
