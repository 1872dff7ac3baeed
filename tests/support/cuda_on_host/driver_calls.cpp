// SPDX-License-Identifier: Apache-2.0
// A CUDA driver whose card is the CPU: the functions of libcuda.so.1 that commrt calls.
//
// What an H200 was seen to do, it does (docs/internals/device-tests.md lists it). Where a comment
// says so, the real driver does more, or what it does is not known.
#include <cstring>
#include <map>
#include <string>

#include "captures.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "refusals.hpp"
#include "settings.hpp"
#include "streams.hpp"

#define CALL extern "C" __attribute__((visibility("default"))) Result
#define REFUSE_OR_GO_ON(...) \
  if (const Result refused = refuse(__VA_ARGS__)) return refused
// Of calls that a capture of another thread does not bear.
#define REFUSE_BESIDE_CAPTURES() \
  if (const Result refused = refuse_beside_captures()) return refused

namespace {

using namespace cuda_on_host;

struct Uuid {
  unsigned char bytes[16];
};

constexpr unsigned kNonBlocking = 1, kDisableTiming = 2, kExternal = 1;
constexpr int kInvalidOrdinal = -2;

std::uint32_t load(Pointer flag) {
  return __atomic_load_n(static_cast<const std::uint32_t*>(memory().at(flag)), __ATOMIC_SEQ_CST);
}

// A flag: a word of memory that the card knows.
bool is_flag(Pointer flag) {
  return flag % 4 == 0 && memory().find(flag).kind != Kind::Unknown && memory().may_touch(flag, 4);
}

bool is_of_host(Pointer address) {
  const Kind kind = memory().find(address).kind;
  return kind == Kind::Unknown || kind == Kind::Pinned;
}

Command work(std::function<void()> run) {
  Command made;
  made.run = std::move(run);
  return made;
}

}  // namespace

// --- the driver and its card ---

CALL cuInit(unsigned flags) {
  if (flags) return kInvalidValue;
  initialise();
  return kSuccess;
}
CALL cuDriverGetVersion(int* out) {
  *out = settings().version;
  return kSuccess;
}
CALL cuGetErrorName(Result result, const char** out) {
  *out = name_of(result);
  return *out ? kSuccess : kInvalidValue;
}
CALL cuGetErrorString(Result result, const char** out) {
  *out = name_of(result) ? "told by the CUDA driver on the host" : nullptr;
  return *out ? kSuccess : kInvalidValue;
}
CALL cuDeviceGetCount(int* out) {
  REFUSE_OR_GO_ON("cuDeviceGetCount", false);
  *out = 1;
  return kSuccess;
}
CALL cuDeviceGet(int* out, int ordinal) {
  REFUSE_OR_GO_ON("cuDeviceGet", false);
  if (ordinal != 0) return kInvalidDevice;
  *out = 0;
  return kSuccess;
}
CALL cuDeviceGetName(char* out, int size, int) {
  std::strncpy(out, "the CPU, by tests/support/cuda_on_host", static_cast<std::size_t>(size));
  return kSuccess;
}
// The same in all processes, as of one card.
CALL cuDeviceGetUuid_v2(Uuid* out, int) {
  std::memcpy(out->bytes, "cuda on the host", sizeof out->bytes);
  return kSuccess;
}
CALL cuDeviceGetPCIBusId(char* out, int size, int) {
  std::strncpy(out, "ffff:ff:ff.0", static_cast<std::size_t>(size));  // no machine has it
  return kSuccess;
}
CALL cuDeviceGetAttribute(int* out, int attribute, int) {
  REFUSE_OR_GO_ON("cuDeviceGetAttribute", false);
  switch (attribute) {
    case 10: *out = 32; break;                          // threads of a warp
    case 16: *out = 2; break;                           // multiprocessors
    case 41: *out = 1; break;                           // unified addressing
    case 75: *out = settings().capability / 10; break;  // compute capability
    case 76: *out = settings().capability % 10; break;
    case 122: *out = 1; break;                          // stream memory operations
    default: *out = 0;
  }
  return kSuccess;
}

// The one context is never destroyed; that of a card is, with all that it has.
CALL cuDevicePrimaryCtxRetain(Handle* out, int) {
  REFUSE_OR_GO_ON("cuDevicePrimaryCtxRetain", false);
  *out = the_context();
  return kSuccess;
}
CALL cuDevicePrimaryCtxRelease_v2(int) { return refuse("cuDevicePrimaryCtxRelease", false); }
CALL cuCtxGetCurrent(Handle* out) {
  *out = has_context() ? the_context() : nullptr;
  return kSuccess;
}
CALL cuCtxPushCurrent_v2(Handle context) {
  if (context != the_context()) return kInvalidContext;
  push_context();
  return kSuccess;
}
CALL cuCtxPopCurrent_v2(Handle* out) {
  if (!pop_context()) return kInvalidContext;
  if (out) *out = the_context();
  return kSuccess;
}
CALL cuCtxSetCurrent(Handle context) {
  while (pop_context()) {
  }
  return context ? cuCtxPushCurrent_v2(context) : kSuccess;
}
CALL cuCtxGetDevice(int* out) {
  if (!has_context()) return kInvalidContext;
  *out = 0;
  return kSuccess;
}

// --- memory ---

CALL cuMemAlloc_v2(Pointer* out, std::size_t nbytes) {
  REFUSE_OR_GO_ON("cuMemAlloc");
  REFUSE_BESIDE_CAPTURES();
  return memory().alloc(out, nbytes);
}

// Waits for all that the card was given, and holds up whoever gives more.
CALL cuMemFree_v2(Pointer base) {
  REFUSE_OR_GO_ON("cuMemFree");
  if (!base) return kSuccess;
  REFUSE_BESIDE_CAPTURES();
  if (!memory().owns(base, Kind::Device)) return kInvalidValue;
  std::lock_guard<std::mutex> guard(card().giving);
  if (const Result result = card().wait_for_all()) return result;
  return memory().free(base);
}

CALL cuMemHostAlloc(void** out, std::size_t nbytes, unsigned) {
  REFUSE_OR_GO_ON("cuMemHostAlloc");
  REFUSE_BESIDE_CAPTURES();
  return memory().alloc_host(out, nbytes, Kind::Pinned);
}

CALL cuMemAllocManaged(Pointer* out, std::size_t nbytes, unsigned) {
  REFUSE_OR_GO_ON("cuMemAllocManaged");
  void* made = nullptr;
  const Result result = memory().alloc_host(&made, nbytes, Kind::Managed);
  *out = reinterpret_cast<Pointer>(made);
  return result;
}

// Waits as cuMemFree does.
CALL cuMemFreeHost(void* base) {
  REFUSE_OR_GO_ON("cuMemFreeHost");
  REFUSE_BESIDE_CAPTURES();
  if (!memory().owns(reinterpret_cast<Pointer>(base), Kind::Pinned)) return kInvalidValue;
  std::lock_guard<std::mutex> guard(card().giving);
  if (const Result result = card().wait_for_all()) return result;
  return memory().free_host(base);
}

// For memory that nobody allocated here it tells of nothing, as the driver does.
CALL cuPointerGetAttributes(unsigned count, int* attributes, void** out, Pointer address) {
  REFUSE_OR_GO_ON("cuPointerGetAttributes");
  const Block block = memory().find(address);
  const bool is_known = block.kind != Kind::Unknown;
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case 2:
        *static_cast<unsigned*>(out[i]) = !is_known ? 0 : block.kind == Kind::Pinned ? 1 : 2;
        break;
      case 8: *static_cast<int*>(out[i]) = block.kind == Kind::Managed; break;
      case 9: *static_cast<int*>(out[i]) = is_known ? 0 : kInvalidOrdinal; break;
      case 11: *static_cast<Pointer*>(out[i]) = block.base; break;
      case 12: *static_cast<std::size_t*>(out[i]) = block.nbytes; break;
      default: return kInvalidValue;
    }
  }
  return kSuccess;
}

CALL cuIpcGetMemHandle(IpcHandle* out, Pointer address) {
  REFUSE_OR_GO_ON("cuIpcGetMemHandle");
  return memory().handle_of(address, out);
}
CALL cuIpcOpenMemHandle_v2(Pointer* out, IpcHandle handle, unsigned) {
  REFUSE_OR_GO_ON("cuIpcOpenMemHandle");
  return memory().open(handle, out);
}
CALL cuIpcCloseMemHandle(Pointer base) {
  REFUSE_OR_GO_ON("cuIpcCloseMemHandle");
  return memory().close(base);
}

// --- streams ---

CALL cuStreamCreateWithPriority(Handle* out, unsigned flags, int) {
  REFUSE_OR_GO_ON("cuStreamCreateWithPriority");
  std::lock_guard<std::mutex> guard(card().tables);
  const StreamPtr made = card().add_stream(!(flags & kNonBlocking));
  card().streams[made->handle] = made;
  *out = made->handle;
  return kSuccess;
}

CALL cuStreamDestroy_v2(Handle handle) {
  REFUSE_OR_GO_ON("cuStreamDestroy");
  const StreamPtr stream = card().stream(handle);
  if (!stream || stream == card().legacy) return kInvalidHandle;
  card().drop_stream(stream);
  return kSuccess;
}

CALL cuStreamSynchronize(Handle handle) {
  REFUSE_OR_GO_ON("cuStreamSynchronize");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (const Result result = end_if_captured(stream, kCaptureUnsupported)) return result;
  REFUSE_BESIDE_CAPTURES();
  return card().wait_for(stream);
}

CALL cuStreamGetCtx(Handle handle, Handle* out) {
  REFUSE_OR_GO_ON("cuStreamGetCtx", false);
  if (!card().stream(handle)) return kInvalidHandle;
  *out = the_context();
  return kSuccess;
}

CALL cuMemcpyAsync(Pointer dst, Pointer src, std::size_t nbytes, Handle handle) {
  REFUSE_OR_GO_ON("cuMemcpyAsync");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  const auto may_touch = [=] {
    return memory().may_touch(dst, nbytes) && memory().may_touch(src, nbytes);
  };
  if (!may_touch()) return kInvalidValue;
  const bool is_pageable = memory().find(dst).kind == Kind::Unknown ||
                           memory().find(src).kind == Kind::Unknown;
  // A copy within the host's memory, pinned or not, blocks its caller: so an H200 was seen to do.
  const bool blocks = is_pageable || (is_of_host(dst) && is_of_host(src));
  const bool is_captured = state_of(stream, nullptr) != kNone;
  const Result result = card().give(stream, work([=] {
    if (!may_touch()) return card().fail(kIllegalAddress);
    std::memmove(memory().at(dst), memory().at(src), nbytes);
  }));
  return result || !blocks || is_captured ? result : card().wait_for(stream);
}

CALL cuStreamWriteValue32_v2(Handle handle, Pointer flag, std::uint32_t value, unsigned) {
  REFUSE_OR_GO_ON("cuStreamWriteValue32");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (!is_flag(flag)) return kInvalidValue;
  return card().give(stream, work([=] {
    if (!memory().may_touch(flag, 4)) return card().fail(kIllegalAddress);
    __atomic_store_n(static_cast<std::uint32_t*>(memory().at(flag)), value, __ATOMIC_SEQ_CST);
  }));
}

// Until the flag has come to the value, cyclically; of the driver's ways to wait only this one.
CALL cuStreamWaitValue32_v2(Handle handle, Pointer flag, std::uint32_t value, unsigned flags) {
  REFUSE_OR_GO_ON("cuStreamWaitValue32");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (!is_flag(flag)) return kInvalidValue;
  if (flags) return kNotSupported;
  Command command;
  command.ready = [=] { return static_cast<std::int32_t>(load(flag) - value) >= 0; };
  return card().give(stream, std::move(command));
}

CALL cuLaunchHostFunc(Handle handle, void (*function)(void*), void* argument) {
  REFUSE_OR_GO_ON("cuLaunchHostFunc");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  return card().give(stream, work([=] {
    in_host_function = true;
    function(argument);
    in_host_function = false;
  }));
}

// --- events ---

CALL cuEventCreate(Handle* out, unsigned flags) {
  REFUSE_OR_GO_ON("cuEventCreate");
  const auto made = std::make_shared<Event>();
  made->timed = !(flags & kDisableTiming);
  std::lock_guard<std::mutex> guard(card().tables);
  *out = card().fresh();
  card().events[*out] = made;
  return kSuccess;
}

CALL cuEventDestroy_v2(Handle handle) {
  REFUSE_OR_GO_ON("cuEventDestroy");
  std::lock_guard<std::mutex> guard(card().tables);
  return card().events.erase(handle) ? kSuccess : kInvalidHandle;
}

CALL cuEventRecordWithFlags(Handle event_handle, Handle handle, unsigned flags) {
  REFUSE_OR_GO_ON("cuEventRecordWithFlags");
  const EventPtr event = card().event(event_handle);
  const StreamPtr stream = card().stream(handle);
  return event && stream ? record_event(event, stream, flags & kExternal) : kInvalidHandle;
}

CALL cuEventRecord(Handle event_handle, Handle handle) {
  REFUSE_OR_GO_ON("cuEventRecord");
  const EventPtr event = card().event(event_handle);
  const StreamPtr stream = card().stream(handle);
  return event && stream ? record_event(event, stream, false) : kInvalidHandle;
}

CALL cuEventQuery(Handle handle) {
  REFUSE_OR_GO_ON("cuEventQuery");
  const EventPtr event = card().event(handle);
  if (!event) return kInvalidHandle;
  if (const Result result = query_event(event); result != kSuccess && result != kNotReady)
    return result;
  REFUSE_BESIDE_CAPTURES();
  return query_event(event);
}

CALL cuStreamWaitEvent(Handle handle, Handle event_handle, unsigned flags) {
  REFUSE_OR_GO_ON("cuStreamWaitEvent");
  const EventPtr event = card().event(event_handle);
  const StreamPtr stream = card().stream(handle);
  return event && stream ? wait_event(stream, event, flags & kExternal) : kInvalidHandle;
}

CALL cuEventElapsedTime(float* elapsed_ms, Handle from, Handle to) {
  REFUSE_OR_GO_ON("cuEventElapsedTime");
  RecordPtr records[2];
  const Handle handles[2] = {from, to};
  for (int i = 0; i < 2; ++i) {
    const EventPtr event = card().event(handles[i]);
    if (!event || !event->timed) return kInvalidHandle;
    std::lock_guard<std::mutex> guard(card().tables);
    records[i] = event->latest;
    if (!records[i]) return kInvalidHandle;
  }
  if (!records[0]->done || !records[1]->done) return kNotReady;
  const std::chrono::duration<float, std::milli> took = records[1]->at - records[0]->at;
  *elapsed_ms = took.count();
  return kSuccess;
}

// --- captures and graphs ---

CALL cuThreadExchangeStreamCaptureMode(int* mode) {
  REFUSE_OR_GO_ON("cuThreadExchangeStreamCaptureMode", false);
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  const Mode before = capture_mode;
  capture_mode = static_cast<Mode>(*mode);
  *mode = before;
  return kSuccess;
}

CALL cuStreamBeginCapture_v2(Handle handle, int mode) {
  REFUSE_OR_GO_ON("cuStreamBeginCapture");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (mode < kGlobal || mode > kRelaxed) return kInvalidValue;
  return begin_capture(stream, static_cast<Mode>(mode));
}

CALL cuStreamEndCapture(Handle handle, Handle* out) {
  REFUSE_OR_GO_ON("cuStreamEndCapture");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  *out = nullptr;
  GraphPtr graph;
  const Result result = end_capture(stream, &graph);
  if (result == kSuccess) *out = new GraphPtr(std::move(graph));
  return result;
}

CALL cuStreamIsCapturing(Handle handle, int* out) {
  REFUSE_OR_GO_ON("cuStreamIsCapturing");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  *out = state_of(stream, nullptr);
  return kSuccess;
}

// Of the graph itself, and what comes before its next command, nothing is told.
CALL cuStreamGetCaptureInfo_v2(Handle handle, int* state, std::uint64_t* id, Handle* graph,
                               const Handle** dependencies, std::size_t* count) {
  REFUSE_OR_GO_ON("cuStreamGetCaptureInfo");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (graph || dependencies || count) return kNotSupported;
  *state = state_of(stream, id);
  return kSuccess;
}

// A graph that can be launched has its own record of its latest launch.
CALL cuGraphInstantiateWithFlags(Handle* out, Handle graph, unsigned long long) {
  REFUSE_OR_GO_ON("cuGraphInstantiateWithFlags");
  if (!graph) return kInvalidValue;
  *out = new GraphPtr(std::make_shared<Graph>(**static_cast<GraphPtr*>(graph)));
  return kSuccess;
}
CALL cuGraphDestroy(Handle graph) {
  if (!graph) return kInvalidValue;
  delete static_cast<GraphPtr*>(graph);
  return refuse("cuGraphDestroy");
}
CALL cuGraphExecDestroy(Handle graph) {
  if (!graph) return kInvalidValue;
  delete static_cast<GraphPtr*>(graph);
  return refuse("cuGraphExecDestroy");
}

// Graphs within graphs are not built here; the driver has them.
CALL cuGraphLaunch(Handle graph, Handle handle) {
  REFUSE_OR_GO_ON("cuGraphLaunch");
  const StreamPtr stream = card().stream(handle);
  if (!stream || !graph) return kInvalidHandle;
  if (state_of(stream, nullptr) != kNone) return kNotSupported;
  return launch_graph(*static_cast<GraphPtr*>(graph), stream);
}

// --- kernels ---

// Waits for all that the card was given, as an H200 did.
CALL cuModuleLoadData(Handle* out, const void* image) {
  REFUSE_OR_GO_ON("cuModuleLoadData");
  REFUSE_BESIDE_CAPTURES();
  std::lock_guard<std::mutex> guard(card().giving);
  if (const Result result = card().wait_for_all()) return result;
  return load_module(image, out);
}
CALL cuModuleUnload(Handle module) {
  REFUSE_OR_GO_ON("cuModuleUnload");
  std::lock_guard<std::mutex> guard(card().giving);
  if (const Result result = card().wait_for_all()) return result;
  return unload_module(module);
}
CALL cuModuleGetFunction(Handle* out, Handle module, const char* name) {
  REFUSE_OR_GO_ON("cuModuleGetFunction");
  return find_kernel(module, name, out);
}
CALL cuFuncLoad(Handle function) {
  REFUSE_OR_GO_ON("cuFuncLoad");
  return function ? kSuccess : kInvalidHandle;
}

CALL cuLaunchKernel(Handle function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                    unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared,
                    Handle handle, void** parameters, void** extra) {
  REFUSE_OR_GO_ON("cuLaunchKernel");
  const StreamPtr stream = card().stream(handle);
  if (!stream) return kInvalidHandle;
  if (blocks_y != 1 || blocks_z != 1 || threads_y != 1 || threads_z != 1 || shared || extra)
    return kNotSupported;
  std::function<void()> run;
  if (const Result result = launch_of(function, blocks, threads, parameters, &run)) return result;
  return card().give(stream, work(std::move(run)));
}

// --- for tests ---

// Lets the nth call from now of a function fail, or of all (*); see refusals.hpp.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_fail(const char* function,
                                                                         long nth,
                                                                         Result result) {
  fail_at(function, nth, result);
}
// Calls of that function since then.
extern "C" __attribute__((visibility("default"))) long cuda_on_host_calls() { return num_calls(); }
// What each hardware queue is doing, as a text; for a debugger.
extern "C" __attribute__((visibility("default"))) const char* cuda_on_host_report() {
  static thread_local std::string text;
  text = card().report();
  return text.c_str();
}

// --- how they are found ---

// Names are those without a version; all are as of CUDA 12.0, and cuFuncLoad as of 12.4.
CALL cuGetProcAddress_v2(const char* name, void** out, int asked, std::uint64_t, int* answer) {
#define ENTRY(function) {#function, reinterpret_cast<void*>(&function)}
#define VERSION_2(function) {#function, reinterpret_cast<void*>(&function##_v2)}
  static const std::map<std::string, void*> all = {
      ENTRY(cuInit),
      ENTRY(cuDriverGetVersion),
      ENTRY(cuGetErrorName),
      ENTRY(cuGetErrorString),
      ENTRY(cuDeviceGetCount),
      ENTRY(cuDeviceGet),
      ENTRY(cuDeviceGetName),
      VERSION_2(cuDeviceGetUuid),
      ENTRY(cuDeviceGetPCIBusId),
      ENTRY(cuDeviceGetAttribute),
      ENTRY(cuDevicePrimaryCtxRetain),
      VERSION_2(cuDevicePrimaryCtxRelease),
      ENTRY(cuCtxGetCurrent),
      ENTRY(cuCtxSetCurrent),
      VERSION_2(cuCtxPushCurrent),
      VERSION_2(cuCtxPopCurrent),
      ENTRY(cuCtxGetDevice),
      VERSION_2(cuMemAlloc),
      VERSION_2(cuMemFree),
      ENTRY(cuMemHostAlloc),
      ENTRY(cuMemFreeHost),
      ENTRY(cuMemAllocManaged),
      ENTRY(cuMemcpyAsync),
      ENTRY(cuStreamCreateWithPriority),
      VERSION_2(cuStreamDestroy),
      ENTRY(cuStreamSynchronize),
      ENTRY(cuStreamWaitEvent),
      VERSION_2(cuStreamWriteValue32),
      VERSION_2(cuStreamWaitValue32),
      ENTRY(cuStreamGetCtx),
      ENTRY(cuStreamIsCapturing),
      ENTRY(cuThreadExchangeStreamCaptureMode),
      VERSION_2(cuStreamBeginCapture),
      ENTRY(cuStreamEndCapture),
      VERSION_2(cuStreamGetCaptureInfo),
      ENTRY(cuEventRecordWithFlags),
      ENTRY(cuGraphInstantiateWithFlags),
      ENTRY(cuGraphDestroy),
      ENTRY(cuGraphLaunch),
      ENTRY(cuGraphExecDestroy),
      ENTRY(cuEventCreate),
      ENTRY(cuEventRecord),
      ENTRY(cuEventQuery),
      VERSION_2(cuEventDestroy),
      ENTRY(cuEventElapsedTime),
      ENTRY(cuModuleLoadData),
      ENTRY(cuModuleUnload),
      ENTRY(cuModuleGetFunction),
      ENTRY(cuFuncLoad),
      ENTRY(cuLaunchKernel),
      ENTRY(cuLaunchHostFunc),
      ENTRY(cuPointerGetAttributes),
      ENTRY(cuIpcGetMemHandle),
      VERSION_2(cuIpcOpenMemHandle),
      ENTRY(cuIpcCloseMemHandle),
  };
  const auto found = all.find(name);
  const bool is_known = found != all.end() && settings().version >= asked &&
                        (found->first != "cuFuncLoad" || asked >= 12040);
  if (answer) *answer = is_known ? 0 : 1;
  *out = is_known ? found->second : nullptr;
  return kSuccess;  // also where there is none, as the driver has it
}
