// SPDX-License-Identifier: Apache-2.0
// Opens the CUDA driver and looks its functions up.
#include "devices/cuda_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace commrt::cuda {
namespace {

// The flags and the answer of cuGetProcAddress are not used: 0 is the default.
using Lookup2 = Result (*)(const char*, void**, int version, std::uint64_t flags, int* answer);

constexpr char kCure[] =
    ". commrt needs NVIDIA's driver 525 (CUDA 12.0) or newer; on a machine without a GPU use "
    "host arrays, or a simulated device";

template <class Function>
bool look_up(Lookup2 lookup, const char* name, Function* out, std::string* why) {
  void* found = nullptr;
  int answer = 0;
  const Result result = lookup(name, &found, kLeastDriver, 0, &answer);
  if (result == kSuccess && found) {
    *out = reinterpret_cast<Function>(found);
    return true;
  }
  *why = std::string("the CUDA driver has no ") + name + kCure;
  return false;
}

bool fill(Driver* driver, Lookup2 lookup, std::string* why) {
#define COMMRT_CUDA(name) \
  if (!look_up(lookup, #name, &driver->name, why)) return false
  COMMRT_CUDA(cuInit);
  COMMRT_CUDA(cuDriverGetVersion);
  COMMRT_CUDA(cuGetErrorName);
  COMMRT_CUDA(cuGetErrorString);
  COMMRT_CUDA(cuDeviceGetCount);
  COMMRT_CUDA(cuDeviceGet);
  COMMRT_CUDA(cuDeviceGetName);
  COMMRT_CUDA(cuDeviceGetUuid);
  COMMRT_CUDA(cuDeviceGetPCIBusId);
  COMMRT_CUDA(cuDeviceGetAttribute);
  COMMRT_CUDA(cuDevicePrimaryCtxRetain);
  COMMRT_CUDA(cuDevicePrimaryCtxRelease);
  COMMRT_CUDA(cuCtxGetCurrent);
  COMMRT_CUDA(cuCtxPushCurrent);
  COMMRT_CUDA(cuCtxPopCurrent);
  COMMRT_CUDA(cuCtxGetDevice);
  COMMRT_CUDA(cuMemAlloc);
  COMMRT_CUDA(cuMemFree);
  COMMRT_CUDA(cuMemHostAlloc);
  COMMRT_CUDA(cuMemFreeHost);
  COMMRT_CUDA(cuMemcpyAsync);
  COMMRT_CUDA(cuStreamCreateWithPriority);
  COMMRT_CUDA(cuStreamDestroy);
  COMMRT_CUDA(cuStreamSynchronize);
  COMMRT_CUDA(cuStreamWaitEvent);
  COMMRT_CUDA(cuStreamWriteValue32);
  COMMRT_CUDA(cuStreamWaitValue32);
  COMMRT_CUDA(cuStreamGetCtx);
  COMMRT_CUDA(cuStreamIsCapturing);
  COMMRT_CUDA(cuThreadExchangeStreamCaptureMode);
  COMMRT_CUDA(cuStreamBeginCapture);
  COMMRT_CUDA(cuStreamEndCapture);
  COMMRT_CUDA(cuStreamGetCaptureInfo);
  COMMRT_CUDA(cuEventRecordWithFlags);
  COMMRT_CUDA(cuGraphInstantiateWithFlags);
  COMMRT_CUDA(cuGraphDestroy);
  COMMRT_CUDA(cuGraphLaunch);
  COMMRT_CUDA(cuGraphExecDestroy);
  COMMRT_CUDA(cuEventCreate);
  COMMRT_CUDA(cuEventRecord);
  COMMRT_CUDA(cuEventQuery);
  COMMRT_CUDA(cuEventDestroy);
  COMMRT_CUDA(cuEventElapsedTime);
  COMMRT_CUDA(cuModuleLoadData);
  COMMRT_CUDA(cuModuleUnload);
  COMMRT_CUDA(cuModuleGetFunction);
  COMMRT_CUDA(cuLaunchKernel);
  COMMRT_CUDA(cuLaunchHostFunc);
  COMMRT_CUDA(cuPointerGetAttributes);
  COMMRT_CUDA(cuIpcGetMemHandle);
  COMMRT_CUDA(cuIpcOpenMemHandle);
  COMMRT_CUDA(cuIpcCloseMemHandle);
#undef COMMRT_CUDA
  void* found = nullptr;
  int answer = 0;
  if (lookup("cuFuncLoad", &found, kFuncLoadDriver, 0, &answer) == kSuccess && found)
    driver->cuFuncLoad = reinterpret_cast<Result (*)(Handle)>(found);
  return true;
}

std::unique_ptr<Driver> opened(const char* library, std::string* why) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    *why = std::string("there is no CUDA driver: ") + dlerror() + kCure;
    return nullptr;
  }
  // Since CUDA 12.0 under this name.
  const auto lookup = reinterpret_cast<Lookup2>(dlsym(handle, "cuGetProcAddress_v2"));
  if (!lookup) {
    *why = std::string("the CUDA driver ") + library + " is too old" + kCure;
    return nullptr;
  }
  auto driver = std::make_unique<Driver>();
  if (!fill(driver.get(), lookup, why)) return nullptr;
  int version = 0;
  const bool known = driver->cuDriverGetVersion(&version) == kSuccess;
  driver->version = version;
  if (known && version < kLeastDriver) {
    *why = "the CUDA driver is of CUDA " + std::to_string(version / 1000) + "." +
           std::to_string(version % 1000 / 10) + kCure;
    return nullptr;
  }
  const Result result = driver->cuInit(0);
  if (result != kSuccess) {
    const char* text = nullptr;
    driver->cuGetErrorString(result, &text);
    *why = std::string("the CUDA driver does not start: ") +
           (text ? text : std::to_string(result).c_str()) + kCure;
    return nullptr;
  }
  return driver;  // the library stays open: it is never safe to close
}

}  // namespace

std::vector<Card> list_cards(const Driver* driver) {
  std::vector<Card> cards;
  int count = 0;
  driver->cuDeviceGetCount(&count);
  for (int i = 0; i < count; ++i) {
    Ordinal device = 0;
    char name[128] = "";
    int major = 0, minor = 0, flags = 0;
    driver->cuDeviceGet(&device, i);
    driver->cuDeviceGetName(name, sizeof(name) - 1, device);
    driver->cuDeviceGetAttribute(&major, kCapabilityMajor, device);
    driver->cuDeviceGetAttribute(&minor, kCapabilityMinor, device);
    driver->cuDeviceGetAttribute(&flags, kStreamMemoryOperations, device);
    cards.push_back({name, major * 10 + minor, flags != 0});
  }
  return cards;
}

std::string path_of(const Driver* driver) {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(driver->cuInit), &info) || !info.dli_fname) return "";
  return info.dli_fname;
}

const Driver* open_driver(const std::string& library, std::string* why) {
  static std::mutex mutex;
  static auto* found = new std::map<std::string, std::unique_ptr<Driver>>;
  std::lock_guard<std::mutex> guard(mutex);
  const std::string name = library.empty() ? "libcuda.so.1" : library;
  auto& driver = (*found)[name];
  if (!driver) driver = opened(name.c_str(), why);
  return driver.get();
}

}  // namespace commrt::cuda
