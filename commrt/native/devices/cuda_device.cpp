// SPDX-License-Identifier: Apache-2.0
// The table of a CUDA device: each call is one of the driver.
#include "devices/cuda_device.hpp"

#include <sched.h>

#include <algorithm>
#include <iterator>

#include "devices/cuda_errors.hpp"
#include "devices/device_error.hpp"
#include "devices/near_node.hpp"
#include "kernels/kernels.hpp"

namespace commrt::cuda {
namespace {

CudaDevice* cuda(Device* device) { return static_cast<CudaDevice*>(device); }
Pointer pointer(const void* ptr) { return reinterpret_cast<Pointer>(ptr); }
Handle handle(std::uint64_t number) { return reinterpret_cast<Handle>(number); }
std::uint64_t number(Handle of) { return reinterpret_cast<std::uint64_t>(of); }

// Makes the device's context the thread's own for a call.
class Current {
 public:
  explicit Current(CudaDevice* device) : driver_(device->driver) {
    Handle now = nullptr;
    if (driver_->cuCtxGetCurrent(&now) == kSuccess && now == device->context) return;
    pushed_ = driver_->cuCtxPushCurrent(device->context) == kSuccess;
  }
  ~Current() {
    Handle popped = nullptr;
    if (pushed_) driver_->cuCtxPopCurrent(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver* driver_;
  bool pushed_ = false;
};

// Calls `function` of the driver in the device's context.
#define COMMRT_DRIVER(device, function, ...)                                           \
  [&] {                                                                                \
    CudaDevice* on = cuda(device);                                                     \
    Current in_context(on);                                                            \
    return done(on, #function, on->driver->function(__VA_ARGS__));                     \
  }()

DeviceStatus alloc(Device* device, std::size_t nbytes, void** out) {
  Pointer made = 0;
  // The driver refuses 0 bytes.
  const auto status = COMMRT_DRIVER(device, cuMemAlloc, &made, std::max<std::size_t>(nbytes, 1));
  if (status == DeviceStatus::Ok) *out = reinterpret_cast<void*>(made);
  return status;
}

DeviceStatus free_(Device* device, void* ptr) {
  return COMMRT_DRIVER(device, cuMemFree, pointer(ptr));
}

DeviceStatus pinned_alloc(Device* device, std::size_t nbytes, void** out) {
  // The driver takes pages for the thread that calls it.
  const NearNode near(cuda(device)->sysfs, cuda(device)->node);
  return COMMRT_DRIVER(device, cuMemHostAlloc, out, std::max<std::size_t>(nbytes, 1),
                       kPortableMapped);
}

DeviceStatus pinned_free(Device* device, void* ptr) {
  if (!ptr) return DeviceStatus::Ok;
  return COMMRT_DRIVER(device, cuMemFreeHost, ptr);
}

DeviceStatus stream_create(Device* device, int priority, bool blocking, Stream* out) {
  Handle made = nullptr;
  const auto status = COMMRT_DRIVER(device, cuStreamCreateWithPriority, &made,
                                    blocking ? 0 : kNonBlocking, priority);
  if (status == DeviceStatus::Ok) *out = number(made);
  return status;
}

DeviceStatus stream_destroy(Device* device, Stream stream) {
  if (!stream)
    return device_fails(DeviceStatus::Invalid,
                        "stream_destroy(): the legacy stream cannot be destroyed");
  for (auto& known : cuda(device)->known_streams) {
    std::uint64_t gone = stream;
    known.compare_exchange_strong(gone, 0, std::memory_order_relaxed);
  }
  return COMMRT_DRIVER(device, cuStreamDestroy, handle(stream));
}

DeviceStatus stream_synchronize(Device* device, Stream stream) {
  return COMMRT_DRIVER(device, cuStreamSynchronize, handle(stream));
}

DeviceStatus memcpy_async(Device* device, void* dst, const void* src, std::size_t nbytes,
                          Stream stream) {
  if (!nbytes) return DeviceStatus::Ok;
  return COMMRT_DRIVER(device, cuMemcpyAsync, pointer(dst), pointer(src), nbytes, handle(stream));
}

DeviceStatus make_event(Device* device, unsigned flags, Event* out) {
  Handle made = nullptr;
  const auto status = COMMRT_DRIVER(device, cuEventCreate, &made, flags);
  if (status == DeviceStatus::Ok) *out = number(made);
  return status;
}

DeviceStatus event_create(Device* device, Event* out) {
  return make_event(device, kDisableTiming, out);
}

DeviceStatus timed_event_create(Device* device, Event* out) { return make_event(device, 0, out); }

// The driver counts milliseconds, and resolves about half a microsecond.
DeviceStatus event_elapsed(Device* device, Event from, Event to, double* elapsed_us) {
  float elapsed_ms = 0;
  const auto status =
      COMMRT_DRIVER(device, cuEventElapsedTime, &elapsed_ms, handle(from), handle(to));
  if (status == DeviceStatus::Ok) *elapsed_us = 1000.0 * static_cast<double>(elapsed_ms);
  return status;
}

DeviceStatus event_record(Device* device, Event event, Stream stream) {
  return COMMRT_DRIVER(device, cuEventRecord, handle(event), handle(stream));
}

DeviceStatus event_query(Device* device, Event event) {
  return COMMRT_DRIVER(device, cuEventQuery, handle(event));
}

DeviceStatus event_destroy(Device* device, Event event) {
  return COMMRT_DRIVER(device, cuEventDestroy, handle(event));
}

DeviceStatus stream_wait_event(Device* device, Stream stream, Event event) {
  return COMMRT_DRIVER(device, cuStreamWaitEvent, handle(stream), handle(event), 0);
}

DeviceStatus write_value32(Device* device, Stream stream, std::uint32_t* flag,
                           std::uint32_t value) {
  if (!device->memory_flags) return device_fails(DeviceStatus::Unsupported, kNoFlags);
  // 0: earlier writes of the stream are visible to the whole system first. Pinned memory has
  // the same address on the device (unified addressing is checked in open()).
  return COMMRT_DRIVER(device, cuStreamWriteValue32, handle(stream), pointer(flag), value, 0);
}

DeviceStatus wait_value32_geq(Device* device, Stream stream, std::uint32_t* flag,
                              std::uint32_t value) {
  if (!device->memory_flags) return device_fails(DeviceStatus::Unsupported, kNoFlags);
  return COMMRT_DRIVER(device, cuStreamWaitValue32, handle(stream), pointer(flag), value,
                       kWaitGeq);
}

// --- kernels: kernel(dst, src, count), any grid of 256 threads a block ---

// The newest module's that has it; the device's mutex is held.
DeviceStatus look_up(CudaDevice* self, const std::string& kernel, Handle* out) {
  const std::string launch = "the launch of " + kernel;
  if (self->modules.empty())
    return device_fails(DeviceStatus::NoKernels,
                        launch + ": no kernels are loaded on CUDA device " +
                            std::to_string(self->ordinal) + "; load_kernels() loads commrt's");
  Result result = kNotFound;
  for (auto module = self->modules.rbegin(); module != self->modules.rend(); ++module) {
    result = self->driver->cuModuleGetFunction(out, *module, kernel.c_str());
    if (result != kNotFound) break;
  }
  return done(self, (launch + ": cuModuleGetFunction").c_str(), result);
}

// Launches a kernel with these arguments, for `count` elements.
DeviceStatus launch_with(Device* device, const std::string& kernel, void** arguments,
                         std::uint64_t count, Stream stream) {
  if (!count) return DeviceStatus::Ok;
  CudaDevice* self = cuda(device);
  Handle function = nullptr;
  Current current(self);
  {
    std::lock_guard<std::mutex> guard(self->mutex);
    Handle& known = self->kernels[kernel];
    if (!known) {
      const DeviceStatus status = look_up(self, kernel, &known);
      if (status != DeviceStatus::Ok) {
        self->kernels.erase(kernel);
        return status;
      }
    }
    function = known;
  }
  constexpr unsigned kThreads = 256;
  const auto most = static_cast<std::uint64_t>(self->multiprocessors) * 8;
  const auto blocks =
      static_cast<unsigned>(std::min<std::uint64_t>((count + kThreads - 1) / kThreads, most));
  return done(self, "cuLaunchKernel",
              self->driver->cuLaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0,
                                           handle(stream), arguments, nullptr));
}

DeviceStatus launch(Device* device, const std::string& kernel, void* dst, const void* src,
                    std::uint64_t count, Stream stream) {
  Pointer to = pointer(dst), from = pointer(src);
  void* arguments[] = {&to, &from, &count};
  return launch_with(device, kernel, arguments, count, stream);
}

DeviceStatus launch_reduce(Device* device, RedOp op, DType dtype, void* dst, const void* src,
                           std::size_t count, Stream stream) {
  if (!combine_for(dtype, op))
    return device_fails(DeviceStatus::Unsupported,
                        "launch_reduce(): the reduction is not defined for the type");
  return launch(device, kernel_name(op, dtype), dst, src, count, stream);
}

DeviceStatus launch_copy(Device* device, void* dst, const void* src, std::size_t nbytes,
                         Stream stream) {
  return launch(device, "commrt_copy", dst, src, nbytes, stream);
}

// The parameters as commrt/kernels/text/vectors.cuh has them.
DeviceStatus launch_scaled_sum(Device* device, DType dtype, void* dst, const void* src,
                               std::size_t count, unsigned which, Scale factor, Stream stream) {
  if (const char* why = why_no_scaled_sum(dtype, which))
    return device_fails(DeviceStatus::Unsupported, why);
  Pointer to = pointer(dst), from = pointer(src);
  auto items = static_cast<std::uint64_t>(count);
  std::uint32_t bits = which;
  struct Factor {
    double real;
    std::int64_t integer;
  } by{factor.real, factor.integer};
  void* arguments[] = {&to, &from, &items, &bits, &by};
  return launch_with(device, "commrt_scaled_sum_" + type_name(dtype), arguments, items, stream);
}

DeviceStatus launch_divide(Device* device, DType dtype, void* dst, std::size_t count,
                           std::int64_t divisor, Stream stream) {
  if (const char* why = why_no_divide(dtype, divisor))
    return device_fails(DeviceStatus::Unsupported, why);
  Pointer to = pointer(dst);
  auto items = static_cast<std::uint64_t>(count);
  void* arguments[] = {&to, &items, &divisor};
  return launch_with(device, "commrt_divide_" + type_name(dtype), arguments, items, stream);
}

// The parameters as commrt/kernels/text/boxes.cuh has them.
DeviceStatus launch_boxes(Device* device, const BoxLaunch& boxes, Stream stream) {
  if (const char* why = why_no_launch(boxes))
    return device_fails(DeviceStatus::Unsupported, std::string("launch_boxes(): ") + why);
  struct Arrays {
    Pointer first[kMostLaunchArrays];
  } arrays;
  for (int i = 0; i < kMostLaunchArrays; ++i) arrays.first[i] = pointer(boxes.arrays[i]);
  struct Table {
    Pointer boxes, terms;
    std::uint32_t num_boxes;
    std::uint64_t units;
  } table{pointer(boxes.table), pointer(boxes.table + boxes.terms_at), boxes.num_boxes,
          boxes.units};
  Pointer buffer = pointer(boxes.buffer);
  auto op = static_cast<std::uint32_t>(boxes.op);
  void* arguments[] = {&buffer, &arrays, &table, &op};
  std::string kernel = std::string("commrt_") + box_kind_name(boxes.kind);
  if (boxes.kind == BoxKind::Combine) kernel = "commrt_boxes_" + type_name(boxes.dtype);
  return launch_with(device, kernel, arguments, boxes.units, stream);
}

DeviceStatus launch_host(Device* device, Stream stream, HostFunction function, void* argument) {
  return COMMRT_DRIVER(device, cuLaunchHostFunc, handle(stream), function, argument);
}

DeviceStatus load_kernels(Device* device, const void* image, std::size_t,
                          const char* const* names, std::size_t num_names) {
  CudaDevice* self = cuda(device);
  const Driver* driver = self->driver;
  Current current(self);
  Handle module = nullptr;
  DeviceStatus status = done(self, "cuModuleLoadData", driver->cuModuleLoadData(&module, image));
  if (status != DeviceStatus::Ok) return status;
  std::map<std::string, Handle> found;
  for (std::size_t i = 0; i < num_names && status == DeviceStatus::Ok; ++i) {
    const std::string about = std::string("load_kernels(): ") + names[i] + ": ";
    Handle& function = found[names[i]];
    status = done(self, (about + "cuModuleGetFunction").c_str(),
                  driver->cuModuleGetFunction(&function, module, names[i]));
    if (status == DeviceStatus::Ok && driver->cuFuncLoad)
      status = done(self, (about + "cuFuncLoad").c_str(), driver->cuFuncLoad(function));
  }
  if (status != DeviceStatus::Ok) {
    driver->cuModuleUnload(module);
    return status;
  }
  std::lock_guard<std::mutex> guard(self->mutex);
  self->modules.push_back(module);
  // Others are looked up anew: this module may have them, too.
  if (!num_names) self->kernels.clear();
  for (const auto& [name, function] : found) self->kernels[name] = function;
  return DeviceStatus::Ok;
}

DeviceStatus ptr_attributes(Device* device, const void* ptr, PointerFacts* out) {
  unsigned type = 0;
  int managed = 0, ordinal = kHost;
  Pointer base = 0;
  std::size_t nbytes = 0;
  int which[] = {kPointerMemoryType, kPointerIsManaged, kPointerOrdinal, kPointerRangeStart,
                 kPointerRangeSize};
  void* into[] = {&type, &managed, &ordinal, &base, &nbytes};
  const auto status =
      COMMRT_DRIVER(device, cuPointerGetAttributes, 5, which, into, pointer(ptr));
  if (status != DeviceStatus::Ok) return status;
  *out = {};
  if (managed)
    out->kind = MemoryKind::Managed;
  else if (type == kTypeDevice)
    out->kind = MemoryKind::Device;
  else if (type == kTypeHost)
    out->kind = MemoryKind::Pinned;
  if (out->kind == MemoryKind::Unknown) return status;
  out->device = ordinal;
  out->base = base;
  out->nbytes = nbytes;
  return status;
}

// Calls check their stream before they give anything. A stream of another device would otherwise
// be refused in the middle of a call, when peers count on it.
DeviceStatus check_stream(CudaDevice* on, Stream stream) {
  constexpr Stream kPerThread = 2;  // it and what is less are streams of any device
  if (stream <= kPerThread) return DeviceStatus::Ok;
  for (const auto& known : on->known_streams) {
    if (known.load(std::memory_order_relaxed) == stream) return DeviceStatus::Ok;
  }
  const Driver& driver = *on->driver;
  Handle context = nullptr;
  const Result result = driver.cuStreamGetCtx(handle(stream), &context);
  if (meaning(result) == DeviceStatus::Invalid) return done(on, "cuStreamGetCtx", result);
  if (result != kSuccess) return DeviceStatus::Ok;  // what it is given will tell
  // Others than the primary one may be the device's own, too.
  Ordinal where = on->handle;
  if (context != on->context && driver.cuCtxPushCurrent(context) == kSuccess) {
    driver.cuCtxGetDevice(&where);
    driver.cuCtxPopCurrent(&context);
  }
  if (where != on->handle) {
    return device_fails(DeviceStatus::Invalid,
                        "stream " + std::to_string(stream) + " is on CUDA device " +
                            std::to_string(where) + ", the array on device " +
                            std::to_string(on->ordinal) +
                            ": a stream orders work of its own device only");
  }
  const unsigned place = on->next_known.fetch_add(1, std::memory_order_relaxed);
  on->known_streams[place % std::size(on->known_streams)].store(stream, std::memory_order_relaxed);
  return DeviceStatus::Ok;
}

DeviceStatus is_capturing(Device* device, Stream stream, CaptureState* out) {
  const DeviceStatus known = check_stream(cuda(device), stream);
  if (known != DeviceStatus::Ok) return known;
  int state = 0;
  const auto status = COMMRT_DRIVER(device, cuStreamIsCapturing, handle(stream), &state);
  *out = static_cast<CaptureState>(state);
  return status;
}

DeviceStatus exchange_capture_mode(Device* device, CaptureMode* mode) {
  int both = static_cast<int>(*mode);
  const auto status = COMMRT_DRIVER(device, cuThreadExchangeStreamCaptureMode, &both);
  *mode = static_cast<CaptureMode>(both);
  return status;
}

DeviceStatus begin_capture(Device* device, Stream stream, CaptureMode mode) {
  return COMMRT_DRIVER(device, cuStreamBeginCapture, handle(stream), static_cast<int>(mode));
}

DeviceStatus end_capture(Device* device, Stream stream, Graph* out) {
  Handle graph = nullptr, made = nullptr;
  auto status = COMMRT_DRIVER(device, cuStreamEndCapture, handle(stream), &graph);
  if (status != DeviceStatus::Ok) return status;
  status = COMMRT_DRIVER(device, cuGraphInstantiateWithFlags, &made, graph, 0);
  const std::string why = status == DeviceStatus::Ok ? "" : device_error();
  COMMRT_DRIVER(device, cuGraphDestroy, graph);  // what can be launched does not need it
  if (status != DeviceStatus::Ok) return device_fails(status, why);
  *out = number(made);
  return status;
}

DeviceStatus capture_id(Device* device, Stream stream, std::uint64_t* out) {
  const DeviceStatus known = check_stream(cuda(device), stream);
  if (known != DeviceStatus::Ok) return known;
  int state = 0;
  std::uint64_t id = 0;
  const auto status = COMMRT_DRIVER(device, cuStreamGetCaptureInfo, handle(stream), &state, &id,
                                    nullptr, nullptr, nullptr);
  *out = state == kCaptureActive ? id : 0;
  return status;
}

DeviceStatus event_record_external(Device* device, Event event, Stream stream) {
  return COMMRT_DRIVER(device, cuEventRecordWithFlags, handle(event), handle(stream), kExternal);
}

DeviceStatus stream_wait_external(Device* device, Stream stream, Event event) {
  return COMMRT_DRIVER(device, cuStreamWaitEvent, handle(stream), handle(event), kExternal);
}

DeviceStatus graph_launch(Device* device, Graph graph, Stream stream) {
  return COMMRT_DRIVER(device, cuGraphLaunch, handle(graph), handle(stream));
}

DeviceStatus graph_destroy(Device* device, Graph graph) {
  return COMMRT_DRIVER(device, cuGraphExecDestroy, handle(graph));
}

DeviceStatus ipc_export(Device* device, const void* ptr, IpcHandle* out, std::size_t* offset) {
  PointerFacts facts;
  const auto status = ptr_attributes(device, ptr, &facts);
  if (status != DeviceStatus::Ok) return status;
  if (facts.kind != MemoryKind::Device)
    return device_fails(DeviceStatus::Invalid,
                        "ipc_export(): " + hex(ptr) + " is not device memory");
  *offset = pointer(ptr) - facts.base;
  return COMMRT_DRIVER(device, cuIpcGetMemHandle, out, pointer(ptr));
}

DeviceStatus ipc_open(Device* device, const IpcHandle* given, void** base) {
  Pointer mapped = 0;
  const auto status =
      COMMRT_DRIVER(device, cuIpcOpenMemHandle, &mapped, *given, kLazyPeerAccess);
  if (status == DeviceStatus::Ok) *base = reinterpret_cast<void*>(mapped);
  return status;
}

DeviceStatus ipc_close(Device* device, void* base) {
  return COMMRT_DRIVER(device, cuIpcCloseMemHandle, pointer(base));
}

// --- host threads: plain loads and stores, no call of the driver ---

DeviceStatus host_access(Device*, const void*, std::size_t, bool) { return DeviceStatus::Ok; }

DeviceStatus flag_load(Device*, const std::uint32_t* flag, std::uint32_t* value) {
  *value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  return DeviceStatus::Ok;
}

DeviceStatus flag_store(Device*, std::uint32_t* flag, std::uint32_t value) {
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  return DeviceStatus::Ok;
}

// A GPU cannot wake a thread.
DeviceStatus pause(Device*) {
  sched_yield();
  return DeviceStatus::Ok;
}

DeviceStatus launch_foreign(Device*, const ForeignKernel&, Stream) {
  return device_fails(DeviceStatus::Unsupported,
                      "launch_foreign(): kernels of pretended libraries do not run on hardware");
}

DeviceStatus make_current(Device* device, bool enter) {
  CudaDevice* self = cuda(device);
  Handle popped = nullptr;
  return enter ? done(self, "cuCtxPushCurrent", self->driver->cuCtxPushCurrent(self->context))
               : done(self, "cuCtxPopCurrent", self->driver->cuCtxPopCurrent(&popped));
}

const DeviceApi kApi = {
    "cuda",        alloc,          free_,         pinned_alloc,       pinned_free,
    stream_create, stream_destroy, stream_synchronize, memcpy_async,  event_create,
    event_record,  event_query,    event_destroy, stream_wait_event,  timed_event_create,
    event_elapsed, write_value32,
    wait_value32_geq, launch_reduce, launch_copy, launch_scaled_sum, launch_divide,
    launch_boxes,  launch_host,    load_kernels,  ptr_attributes,     is_capturing,
    exchange_capture_mode, begin_capture, end_capture, capture_id,    event_record_external,
    stream_wait_external, graph_launch, graph_destroy, ipc_export,    ipc_open,
    ipc_close,     last_device_error, host_access, flag_load,         flag_store,
    nullptr,       nullptr,        pause,         launch_foreign,     make_current,
};

}  // namespace

std::string type_name(DType dtype) {
  static const char* const types[kNumDTypes] = {
      "bool",    "int8",     "int16",   "int32",   "int64",     "uint8",         "uint16",
      "uint32",  "uint64",   "float16", "bfloat16", "float32",  "float64",       "complex64",
      "complex128", "float8_e4m3fn", "float8_e5m2"};
  return types[static_cast<int>(dtype)];
}

std::string kernel_name(RedOp op, DType dtype) {
  static const char* const ops[kNumRedOps] = {"sum", "prod", "min",  "max", "avg",  "land",
                                              "lor", "lxor", "band", "bor", "bxor", "premul_sum"};
  return std::string("commrt_") + ops[static_cast<int>(op)] + "_" + type_name(dtype);
}

std::unique_ptr<CudaDevice> CudaDevice::open(int ordinal, bool memory_flags,
                                             const std::string& library,
                                             const std::string& sysfs) {
  std::string why;
  const auto missing = [](const std::string& text) {
    device_fails(DeviceStatus::Missing, text);
    return nullptr;
  };
  const Driver* driver = open_driver(library, &why);
  if (!driver) return missing(why);
  auto made = std::make_unique<CudaDevice>();
  made->api = &kApi;
  made->driver = driver;
  made->ordinal = ordinal;
  int count = 0;
  driver->cuDeviceGetCount(&count);
  if (ordinal < 0 || ordinal >= count)
    return missing("there is no CUDA device " + std::to_string(ordinal) + ": the driver shows " +
                   std::to_string(count) + "; look at CUDA_VISIBLE_DEVICES and nvidia-smi");
  const auto attribute = [&](int which) {
    int value = 0;
    driver->cuDeviceGetAttribute(&value, which, made->handle);
    return value;
  };
  char name[128] = "";
  Result result = driver->cuDeviceGet(&made->handle, ordinal);
  if (result == kSuccess) result = driver->cuDeviceGetName(name, sizeof(name) - 1, made->handle);
  if (result == kSuccess) result = driver->cuDeviceGetUuid(&made->uuid, made->handle);
  if (result == kSuccess) {
    if (!attribute(kUnifiedAddressing))
      return missing("CUDA device " + std::to_string(ordinal) +
                     " has no unified addressing, which commrt needs");
    result = driver->cuDevicePrimaryCtxRetain(&made->context, made->handle);
  }
  if (result != kSuccess) {
    done(made.get(), "opening", result);
    return missing(device_error());
  }
  made->name = name;
  char bus_id[32] = "";
  driver->cuDeviceGetPCIBusId(bus_id, sizeof(bus_id) - 1, made->handle);
  made->sysfs = sysfs;
  made->node = node_of_device(sysfs, bus_id);
  made->multiprocessors = std::max(1, attribute(kMultiprocessors));
  made->capability = attribute(kCapabilityMajor) * 10 + attribute(kCapabilityMinor);
  made->driver_version = driver->version;
  made->can_memory_flags = attribute(kStreamMemoryOperations) != 0;
  made->memory_flags = memory_flags && made->can_memory_flags;
  return made;
}

CudaDevice::~CudaDevice() {
  if (!context) return;
  {
    Current current(this);
    for (Handle module : modules) driver->cuModuleUnload(module);
  }
  driver->cuDevicePrimaryCtxRelease(handle);
}

}  // namespace commrt::cuda
