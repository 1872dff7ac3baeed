// SPDX-License-Identifier: Apache-2.0
// Groups in streams: host functions of the CUDA driver. With NCCL_STUB_STREAMS=none there is no
// driver, and streams do everything at once.
#include <cstdlib>
#include <cstring>

// As commrt finds it; this library has its own copy.
#include "devices/cuda_driver.cpp"
#include "library.hpp"

namespace stub {

namespace {

namespace cuda = commrt::cuda;

bool has_streams() {
  const char* said = getenv("NCCL_STUB_STREAMS");
  return said == nullptr || strcmp(said, "none") != 0;
}

const cuda::Driver* driver() {
  std::string why;
  return cuda::open_driver("", &why);
}

// Makes the communicator's context the thread's own for a while.
class Current {
 public:
  explicit Current(void* context) { driver()->cuCtxPushCurrent(context); }
  ~Current() {
    void* popped = nullptr;
    driver()->cuCtxPopCurrent(&popped);
  }
};

// Of one rank there is nothing to do but a copy, where no factor asks for more.
bool is_a_copy(const Comm& comm, const Op& op) {
  return comm.size == 1 && !is_message(op.kind) && !op.scaled;
}

bool copy(const Op& op, void* stream) {
  if (op.in == op.out) return true;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    world.counters["copies"]++;
  }
  const size_t nbytes = op.count * type_size(op.dtype);
  if (!has_streams()) {
    memcpy(op.out, op.in, nbytes);
    return true;
  }
  const auto pointer = [](const void* at) { return reinterpret_cast<cuda::Pointer>(at); };
  return driver()->cuMemcpyAsync(pointer(op.out), pointer(op.in), nbytes, stream) ==
         cuda::kSuccess;
}

bool is_captured(void* stream) {
  int state = 0;
  driver()->cuStreamIsCapturing(stream, &state);
  return state != 0;
}

// Where the driver takes it, the group is the stream's.
bool give(Group* group) {
  Comm& comm = *group->comm;
  std::vector<Op> left;
  for (const Op& op : group->ops) {
    if (!is_a_copy(comm, op)) {
      left.push_back(op);
    } else if (!copy(op, group->stream)) {
      return false;
    }
  }
  group->ops = std::move(left);
  if (group->ops.empty()) {
    delete group;
    return true;
  }
  group->is_captured = has_streams() && is_captured(group->stream);
  if (!group->is_captured) {
    std::lock_guard<std::mutex> own(comm.mutex);
    group->ticket = comm.next_ticket++;
  }
  if (has_streams()) {
    return driver()->cuLaunchHostFunc(group->stream, run_group, group) == cuda::kSuccess;
  }
  run_group(group);
  return true;
}

}  // namespace

int current_card(Card* card) {
  if (!has_streams()) {
    card->bus = 0x60;
    return Success;
  }
  const cuda::Driver* const found = driver();
  if (found == nullptr || found->cuCtxGetDevice(&card->ordinal) != cuda::kSuccess) return CudaError;
  found->cuCtxGetCurrent(&card->context);
  char text[32] = "";
  found->cuDeviceGetPCIBusId(text, sizeof text - 1, card->ordinal);
  std::string digits;  // 0000:00:06.0 is 60
  for (const char each : std::string(text)) {
    if (each != ':' && each != '.') digits += each;
  }
  card->bus = strtoull(digits.c_str(), nullptr, 16);
  return Success;
}

void* found_by_card(const void* at, size_t nbytes) {
  using Find = void* (*)(cuda::Pointer, size_t);
  // A driver on the CPU has it, whose card alone may touch its memory.
  static const auto find = [] {
    void* const library = has_streams() ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) : nullptr;
    return reinterpret_cast<Find>(library == nullptr ? nullptr : dlsym(library, "cuda_on_host_at"));
  }();
  if (find == nullptr || nbytes == 0) return const_cast<void*>(at);
  return find(reinterpret_cast<cuda::Pointer>(at), nbytes);
}

int launch(const std::vector<Group*>& groups) {
  int code = Success;
  for (Group* group : groups) {
    Comm* const comm = group->comm;
    std::unique_ptr<Current> current;
    if (has_streams()) current = std::make_unique<Current>(comm->context);
    if (give(group)) continue;
    code = CudaError;
    std::lock_guard<std::mutex> lock(world.mutex);
    comm->async = code;
  }
  return code;
}

}  // namespace stub
