// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: what a stream is given happens at once. It writes down how it was
// called, and can be told to fail; tests/unit/devices/test_cuda_device.py builds it.
// With COMMRT_SILENT calls are only counted, and cost next to nothing (tests/support/host_cost.py).
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

using Result = int;
using Handle = void*;
using Pointer = unsigned long long;
struct IpcHandle {
  unsigned char bytes[64];
};

std::string log_text;
int version = 12040, devices = 1, memory_operations = 1, depth = 0, mode = 0, captures = 0;
std::string failing;  // a function, which then returns `failure`
Result failure = 0;
std::uint64_t handles = 0x1000;
struct Block {
  std::size_t nbytes;
  unsigned type;
  bool managed = false;
};
std::map<Pointer, Block> blocks;

// The policy for memory and the CPUs of the thread that last asked for pinned memory.
std::string place;
void note_place() {
  int policy = 0;
  unsigned long nodes[16] = {};
  const bool known = syscall(SYS_get_mempolicy, &policy, nodes, 1024, nullptr, 0) == 0;
  place = known ? std::to_string(policy) + " " + std::to_string(nodes[0]) : "unknown";
  cpu_set_t cpus;
  sched_getaffinity(0, sizeof cpus, &cpus);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) place += "," + std::to_string(cpu);
  }
}

long num_calls = 0;
#ifdef COMMRT_SILENT
#define called(...) (++num_calls, 0)
#else
Result called(const char* name, const std::string& arguments = "") {
  log_text += std::string(name) + "(" + arguments + ")\n";
  return failing == name ? failure : 0;
}
#endif
std::string text(std::uint64_t number) { return std::to_string(number); }
std::string text(Handle handle) { return text(reinterpret_cast<std::uint64_t>(handle)); }
Handle fresh() { return reinterpret_cast<Handle>(handles += 16); }
Result give(Pointer* out, std::size_t nbytes, unsigned type) {
  *out = reinterpret_cast<Pointer>(std::malloc(nbytes));
  blocks[*out] = {nbytes, type};
  return 0;
}

Result cuInit(unsigned) { return called("cuInit"); }
Result cuDriverGetVersion(int* out) { return *out = version, 0; }
Result cuGetErrorName(Result result, const char** out) {
  static std::string name;
  name = "CUDA_ERROR_" + std::to_string(result);
  return *out = name.c_str(), 0;
}
Result cuGetErrorString(Result, const char** out) { return *out = "as it was told to", 0; }
Result cuDeviceGetCount(int* out) { return *out = devices, 0; }
Result cuDeviceGet(int* out, int ordinal) { return *out = ordinal, 0; }
Result cuDeviceGetName(char* out, int size, int) { return std::strncpy(out, "Fake", size), 0; }
Result cuDeviceGetUuid(unsigned char* out, int) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<unsigned char>(17 * i);
  return 0;
}
Result cuDeviceGetPCIBusId(char* out, int size, int) {
  return std::strncpy(out, "0000:1A:00.0", size), 0;
}
Result cuDeviceGetAttribute(int* out, int which, int) {
  *out = which == 41 ? 1 : which == 122 ? memory_operations : which == 16 ? 4 : which == 75 ? 9 : which == 76 ? 0 : -1;
  return 0;
}
Result cuDevicePrimaryCtxRetain(Handle* out, int) {
  return *out = reinterpret_cast<Handle>(0xc0), called("cuDevicePrimaryCtxRetain");
}
Result cuDevicePrimaryCtxRelease(int) { return called("cuDevicePrimaryCtxRelease"); }
Result cuCtxGetCurrent(Handle* out) { return *out = nullptr, 0; }
Handle pushed = nullptr;
std::uint64_t foreign = 0;  // a stream of another device
Result cuCtxPushCurrent(Handle context) { return ++depth, pushed = context, 0; }
Result cuCtxGetDevice(int* out) { return *out = pushed == reinterpret_cast<Handle>(0xd0), 0; }
Result cuStreamGetCtx(Handle stream, Handle* out) {
  const bool is_foreign = reinterpret_cast<std::uint64_t>(stream) == foreign;
  return *out = reinterpret_cast<Handle>(is_foreign ? 0xd0 : 0xc0), called("cuStreamGetCtx");
}
Result cuCtxPopCurrent(Handle*) { return --depth, 0; }
Result cuMemAlloc(Pointer* out, std::size_t nbytes) {
  if (Result result = called("cuMemAlloc", text(nbytes))) return result;
  return give(out, nbytes, 2);
}
Result cuMemFree(Pointer ptr) {
  blocks.erase(ptr);
  std::free(reinterpret_cast<void*>(ptr));
  return called("cuMemFree");
}
Result cuMemHostAlloc(void** out, std::size_t nbytes, unsigned flags) {
  note_place();
  if (Result result = called("cuMemHostAlloc", text(nbytes) + "," + text(flags))) return result;
  return give(reinterpret_cast<Pointer*>(out), nbytes, 1);
}
Result cuMemFreeHost(void* ptr) { return cuMemFree(reinterpret_cast<Pointer>(ptr)); }
Result cuMemcpyAsync(Pointer dst, Pointer src, std::size_t nbytes, Handle stream) {
  if (Result result = called("cuMemcpyAsync", text(nbytes) + "," + text(stream))) return result;
  std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), nbytes);
  return 0;
}
Result cuStreamCreateWithPriority(Handle* out, unsigned flags, int priority) {
  *out = fresh();
  return called("cuStreamCreateWithPriority", text(flags) + "," + std::to_string(priority));
}
Result cuStreamDestroy(Handle) { return called("cuStreamDestroy"); }
Result cuStreamSynchronize(Handle) { return called("cuStreamSynchronize"); }
Result cuStreamWaitEvent(Handle, Handle, unsigned flags) {
  return called("cuStreamWaitEvent", text(flags));
}
Result cuStreamWriteValue32(Handle, Pointer flag, std::uint32_t value, unsigned flags) {
  __atomic_store_n(reinterpret_cast<std::uint32_t*>(flag), value, __ATOMIC_RELEASE);
  return called("cuStreamWriteValue32", text(value) + "," + text(flags));
}
Result cuStreamWaitValue32(Handle, Pointer, std::uint32_t value, unsigned flags) {
  return called("cuStreamWaitValue32", text(value) + "," + text(flags));
}
Result cuStreamIsCapturing(Handle, int* out) { return *out = 0, called("cuStreamIsCapturing"); }
Result cuStreamBeginCapture(Handle, int capture_mode) {
  return captures = 1, called("cuStreamBeginCapture", std::to_string(capture_mode));
}
Result cuStreamEndCapture(Handle, Handle* graph) {
  return captures = 0, *graph = fresh(), called("cuStreamEndCapture");
}
Result cuStreamGetCaptureInfo(Handle, int* state, std::uint64_t* id, Handle* graph,
                              const Handle** dependencies, std::size_t* count) {
  if (graph || dependencies || count) return 1;
  return *state = captures, *id = 77, called("cuStreamGetCaptureInfo");
}
Result cuEventRecordWithFlags(Handle, Handle, unsigned flags) {
  return called("cuEventRecordWithFlags", text(std::uint64_t(flags)));
}
Result cuGraphInstantiateWithFlags(Handle* made, Handle, unsigned long long flags) {
  return *made = fresh(), called("cuGraphInstantiateWithFlags", text(std::uint64_t(flags)));
}
Result cuGraphDestroy(Handle) { return called("cuGraphDestroy"); }
Result cuGraphLaunch(Handle, Handle stream) { return called("cuGraphLaunch", text(stream)); }
Result cuGraphExecDestroy(Handle) { return called("cuGraphExecDestroy"); }
Result cuThreadExchangeStreamCaptureMode(int* both) {
  const int before = mode;
  mode = *both;
  return *both = before, 0;
}
Result cuEventCreate(Handle* out, unsigned flags) {
  return *out = fresh(), called("cuEventCreate", text(flags));
}
Result cuEventRecord(Handle, Handle) { return called("cuEventRecord"); }
Result cuEventQuery(Handle) { return called("cuEventQuery"); }
Result cuEventDestroy(Handle) { return called("cuEventDestroy"); }
Result cuEventElapsedTime(float* elapsed_ms, Handle, Handle) {
  return *elapsed_ms = 1.5f, called("cuEventElapsedTime");
}
Result cuModuleLoadData(Handle* out, const void* image) {
  return *out = fresh(), called("cuModuleLoadData", static_cast<const char*>(image));
}
Result cuModuleUnload(Handle) { return called("cuModuleUnload"); }
Result cuModuleGetFunction(Handle* out, Handle, const char* name) {
  return *out = fresh(), called("cuModuleGetFunction", name);
}
Result cuFuncLoad(Handle) { return called("cuFuncLoad"); }
Result cuLaunchKernel(Handle, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                      unsigned, Handle stream, void** arguments, void**) {
  const auto count = *static_cast<std::uint64_t*>(arguments[2]);
  return called("cuLaunchKernel", text(x) + "," + text(threads) + "," + text(count) + "," +
                                      text(stream));
}
Result cuLaunchHostFunc(Handle, void (*function)(void*), void* argument) {
  if (Result result = called("cuLaunchHostFunc")) return result;
  return function(argument), 0;
}
Result cuPointerGetAttributes(unsigned, int* which, void** into, Pointer ptr) {
  auto next = blocks.upper_bound(ptr);
  if (next == blocks.begin() || ptr - std::prev(next)->first >= std::prev(next)->second.nbytes)
    return 0;  // as the driver does for memory that it does not know
  const auto& [base, block] = *std::prev(next);
  for (int i = 0; i < 5; ++i) switch (which[i]) {
      case 2: *static_cast<unsigned*>(into[i]) = block.type; break;
      case 8: *static_cast<int*>(into[i]) = block.managed; break;
      case 9: *static_cast<int*>(into[i]) = 0; break;
      case 11: *static_cast<Pointer*>(into[i]) = base; break;
      case 12: *static_cast<std::size_t*>(into[i]) = block.nbytes; break;
    }
  return 0;
}
Result cuIpcGetMemHandle(IpcHandle* out, Pointer) {
  return std::memset(out, 7, sizeof(*out)), called("cuIpcGetMemHandle");
}
Result cuIpcOpenMemHandle(Pointer* out, IpcHandle handle, unsigned flags) {
  *out = 0x5000;
  return called("cuIpcOpenMemHandle", text(handle.bytes[63]) + "," + text(flags));
}
Result cuIpcCloseMemHandle(Pointer ptr) { return called("cuIpcCloseMemHandle", text(ptr)); }

}  // namespace

extern "C" {

const char* fake_log() { return log_text.c_str(); }
const char* fake_place() { return place.c_str(); }
int fake_depth() { return depth; }
long fake_num_calls() { return num_calls; }
// What one call takes, in nanoseconds.
double fake_call_ns() {
  constexpr int kCalls = 100000;
  Result (*volatile call)(Handle, Handle) = &cuEventRecord;
  const long before = num_calls;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call(nullptr, nullptr);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  num_calls = before;
  return took.count() / kCalls;
}
void fake_reset(int driver_version, int num_devices, int operations) {
  version = driver_version, devices = num_devices, memory_operations = operations;
  log_text.clear(), failing.clear(), foreign = 0;
}
void fake_managed(Pointer ptr) { blocks.at(ptr).managed = true; }
void fake_foreign(std::uint64_t stream) { foreign = stream; }
void fake_fail(const char* function, Result result) { failing = function, failure = result; }

Result cuGetProcAddress_v2(const char* name, void** out, int asked, std::uint64_t, int* answer) {
#define ENTRY(function) {#function, reinterpret_cast<void*>(&function)}
  static const std::map<std::string, void*> all = {
      ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
      ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName), ENTRY(cuDeviceGetUuid),
      ENTRY(cuDeviceGetPCIBusId), ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain),
      ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxPushCurrent),
      ENTRY(cuCtxPopCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuStreamGetCtx), ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemHostAlloc),
      ENTRY(cuMemFreeHost), ENTRY(cuMemcpyAsync), ENTRY(cuStreamCreateWithPriority),
      ENTRY(cuStreamDestroy), ENTRY(cuStreamSynchronize), ENTRY(cuStreamWaitEvent),
      ENTRY(cuStreamWriteValue32), ENTRY(cuStreamWaitValue32), ENTRY(cuStreamIsCapturing),
      ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture), ENTRY(cuStreamGetCaptureInfo),
      ENTRY(cuEventRecordWithFlags), ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphDestroy),
      ENTRY(cuGraphLaunch), ENTRY(cuGraphExecDestroy),
      ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuEventCreate), ENTRY(cuEventRecord),
      ENTRY(cuEventQuery), ENTRY(cuEventDestroy), ENTRY(cuEventElapsedTime),
      ENTRY(cuModuleLoadData), ENTRY(cuModuleUnload),
      ENTRY(cuModuleGetFunction), ENTRY(cuLaunchKernel), ENTRY(cuLaunchHostFunc),
      ENTRY(cuPointerGetAttributes), ENTRY(cuIpcGetMemHandle), ENTRY(cuIpcOpenMemHandle),
      ENTRY(cuIpcCloseMemHandle)};
  const auto found = all.find(name);
  *answer = 0;
  *out = found == all.end() || asked != 12000 ? nullptr : found->second;
  if (std::strcmp(name, "cuFuncLoad") == 0 && asked == 12040 && version >= 12040)
    *out = reinterpret_cast<void*>(&cuFuncLoad);
  return *out ? 0 : 500;
}

}  // extern "C"
