// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver's interface that commrt calls, declared by hand.
//
// Nothing of CUDA is needed to build this: libcuda.so.1 is opened when a device is, and its
// functions are looked up by cuGetProcAddress, as of CUDA 12.0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "devices/device.hpp"

namespace commrt::cuda {

using Result = int;
using Handle = void*;  // of a context, stream, event, module, function
using Pointer = unsigned long long;
using Ordinal = int;

struct Uuid {
  unsigned char bytes[16];
};

// From cuda.h.
enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kStub = 34,  // the driver library is the toolkit's stub
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kEccUncorrectable = 214,
  kInvalidPtx = 218,
  kNvlinkUncorrectable = 220,
  kJitCompilerNotFound = 221,
  kUnsupportedPtx = 222,  // of a newer CUDA
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextDestroyed = 709,
  kAssert = 710,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemDriverMismatch = 803,
  kCaptureUnsupported = 900,  // and what follows, up to
  kCaptureLast = 908,
  kUnknown = 999,
};
constexpr int kMultiprocessors = 16;      // attributes of devices
constexpr int kUnifiedAddressing = 41;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;
constexpr int kStreamMemoryOperations = 122;
constexpr int kPointerMemoryType = 2;     // attributes of pointers
constexpr int kPointerIsManaged = 8;
constexpr int kPointerOrdinal = 9;
constexpr int kPointerRangeStart = 11;
constexpr int kPointerRangeSize = 12;
constexpr unsigned kTypeHost = 1, kTypeDevice = 2;
constexpr unsigned kNonBlocking = 1;      // streams
constexpr unsigned kDisableTiming = 2;    // events
constexpr unsigned kPortableMapped = 1 | 2;
constexpr unsigned kLazyPeerAccess = 1;
constexpr unsigned kWaitGeq = 0;
constexpr unsigned kExternal = 1;         // records of events and waits for them, in captures
constexpr int kCaptureActive = 1;
constexpr int kLeastDriver = 12000;
constexpr int kFuncLoadDriver = 12040;

struct Driver {
  int version = 0;
  // Null before CUDA 12.4; then looking a kernel up loads it.
  Result (*cuFuncLoad)(Handle) = nullptr;

  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(Ordinal*, int);
  Result (*cuDeviceGetName)(char*, int, Ordinal);
  Result (*cuDeviceGetUuid)(Uuid*, Ordinal);
  Result (*cuDeviceGetPCIBusId)(char*, int, Ordinal);
  Result (*cuDeviceGetAttribute)(int*, int attribute, Ordinal);
  Result (*cuDevicePrimaryCtxRetain)(Handle*, Ordinal);
  Result (*cuDevicePrimaryCtxRelease)(Ordinal);
  Result (*cuCtxGetCurrent)(Handle*);
  Result (*cuCtxPushCurrent)(Handle);
  Result (*cuCtxPopCurrent)(Handle*);
  Result (*cuCtxGetDevice)(Ordinal*);
  Result (*cuMemAlloc)(Pointer*, std::size_t);
  Result (*cuMemFree)(Pointer);
  Result (*cuMemHostAlloc)(void**, std::size_t, unsigned);
  Result (*cuMemFreeHost)(void*);
  Result (*cuMemcpyAsync)(Pointer, Pointer, std::size_t, Handle);
  Result (*cuStreamCreateWithPriority)(Handle*, unsigned, int);
  Result (*cuStreamDestroy)(Handle);
  Result (*cuStreamSynchronize)(Handle);
  Result (*cuStreamWaitEvent)(Handle, Handle, unsigned);
  Result (*cuStreamWriteValue32)(Handle, Pointer, std::uint32_t, unsigned);
  Result (*cuStreamWaitValue32)(Handle, Pointer, std::uint32_t, unsigned);
  Result (*cuStreamGetCtx)(Handle, Handle*);
  Result (*cuStreamIsCapturing)(Handle, int*);
  Result (*cuThreadExchangeStreamCaptureMode)(int*);
  Result (*cuStreamBeginCapture)(Handle, int mode);
  Result (*cuStreamEndCapture)(Handle, Handle* graph);
  Result (*cuStreamGetCaptureInfo)(Handle, int* state, std::uint64_t* id, Handle* graph,
                                   const Handle** dependencies, std::size_t* count);
  Result (*cuEventRecordWithFlags)(Handle, Handle, unsigned);
  Result (*cuGraphInstantiateWithFlags)(Handle* made, Handle graph, unsigned long long flags);
  Result (*cuGraphDestroy)(Handle);
  Result (*cuGraphLaunch)(Handle, Handle);
  Result (*cuGraphExecDestroy)(Handle);
  Result (*cuEventCreate)(Handle*, unsigned);
  Result (*cuEventRecord)(Handle, Handle);
  Result (*cuEventQuery)(Handle);
  Result (*cuEventDestroy)(Handle);
  Result (*cuEventElapsedTime)(float* elapsed_ms, Handle from, Handle to);
  Result (*cuModuleLoadData)(Handle*, const void*);
  Result (*cuModuleUnload)(Handle);
  Result (*cuModuleGetFunction)(Handle*, Handle, const char*);
  Result (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, Handle, void**, void**);
  Result (*cuLaunchHostFunc)(Handle, void (*)(void*), void*);
  Result (*cuPointerGetAttributes)(unsigned, int*, void**, Pointer);
  Result (*cuIpcGetMemHandle)(IpcHandle*, Pointer);
  Result (*cuIpcOpenMemHandle)(Pointer*, IpcHandle, unsigned);
  Result (*cuIpcCloseMemHandle)(Pointer);
};

// Facts that a driver tells without opening a device.
struct Card {
  std::string name;
  int capability;
  bool can_memory_flags;
};
std::vector<Card> list_cards(const Driver* driver);
// The file of the library.
std::string path_of(const Driver* driver);

// The driver, opened and initialised; null, with a reason that names the cure, where there is
// none. `library` is the name or path of another one, for tests; empty: libcuda.so.1.
const Driver* open_driver(const std::string& library, std::string* why);

}  // namespace commrt::cuda
