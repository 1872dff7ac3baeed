// SPDX-License-Identifier: Apache-2.0
// Groups as kernels in streams of commrt's devices without hardware.
#include "stub.hpp"

namespace stub {

namespace {

using Lock = std::unique_lock<std::mutex>;

thread_local std::vector<Group> to_launch;

// What a device holds of a kernel.
struct Held {
  std::shared_ptr<Kernel> kernel;
  Group group;
};

Held* held(void* argument) { return static_cast<Held*>(argument); }

void begin(void* argument) {
  Lock lock(world.mutex);
  Group group = std::move(held(argument)->group);
  Comm* comm = group.comm;
  if (comm->life == Life::Aborted) {
    group.kernel->done.store(true, std::memory_order_release);
    return;
  }
  for (auto& [key, queue] : world.streams) {
    if (queue.empty() || queue.front().kernel == nullptr) continue;
    const Comm* other = queue.front().comm;
    if (other->gpu == comm->gpu && other != comm) {
      violation("kernels of two communicators run at the same time on a device: where there is no "
                "room for both, ranks may begin with different ones");
    }
  }
  // As they run, so their collectives meet: what a graph holds runs at its launches.
  for (Op& op : group.ops)
    if (!is_message(op.kind)) op.seq = comm->run++;
  const std::pair<int, void*> own(-1, reinterpret_cast<void*>(group.kernel->id));
  world.streams[own].push_back(std::move(group));
  advance();
}

bool may_end(void* argument) {
  return held(argument)->kernel->done.load(std::memory_order_acquire);
}

const std::vector<uint64_t>& met(void* argument) { return held(argument)->kernel->met; }

void end(void* argument) { delete held(argument); }

commrt::ForeignKernel again(void* argument);

// A graph that holds it goes.
void drop(void* argument) {
  {
    Lock lock(world.mutex);
    held(argument)->group.comm->graphs--;
    world.changed.notify_all();
  }
  delete held(argument);
}

std::vector<commrt::ForeignRange> ranges_of(const Group& group) {
  std::vector<commrt::ForeignRange> ranges;
  const Comm* comm = group.comm;
  for (const Op& op : group.ops) {
    const auto [read, written] = touched(op, comm->rank, comm->size);
    if (read) ranges.push_back({const_cast<void*>(op.in), read, false});
    if (written) ranges.push_back({op.out, written, true});
  }
  return ranges;
}

commrt::ForeignKernel kernel_of(Group group) {
  static std::atomic<uint64_t> next{1};
  group.kernel = std::make_shared<Kernel>();
  group.kernel->id = next.fetch_add(1);
  commrt::ForeignKernel kernel;
  kernel.id = group.kernel->id;
  kernel.begin = begin;
  kernel.may_end = may_end;
  kernel.end = end;
  kernel.met = met;
  kernel.again = again;
  kernel.drop = drop;
  kernel.ranges = ranges_of(group);
  kernel.holds = group.comm->gpu;
  auto* argument = new Held{group.kernel, std::move(group)};
  kernel.argument = argument;
  return kernel;
}

commrt::ForeignKernel again(void* argument) { return kernel_of(held(argument)->group); }

}  // namespace

void launch_on_device(Group group) { to_launch.push_back(std::move(group)); }

Launches::~Launches() {
  std::vector<Group> groups;
  groups.swap(to_launch);
  for (Group& group : groups) {
    Comm* comm = group.comm;
    const auto stream = reinterpret_cast<commrt::Stream>(group.stream);
    const commrt::DeviceApi& api = *comm->gpu->api;
    uint64_t capture = 0;
    api.capture_id(comm->gpu, stream, &capture);
    const commrt::ForeignKernel kernel = kernel_of(std::move(group));
    const bool launched =
        api.launch_foreign(comm->gpu, kernel, stream) == commrt::DeviceStatus::Ok;
    Lock lock(world.mutex);
    // A communicator does not end before the graphs that hold its work.
    if (launched && capture != 0) comm->graphs++;
    if (launched) continue;
    delete held(kernel.argument);
    comm->async = 1;  // unhandled cuda error
  }
}

void OnDevice::enter(Comm* comm, const char* function) {
  if (comm == nullptr || comm->gpu == nullptr || gpu_ != nullptr) return;
  const auto found = world.inside.find(comm->gpu);
  if (found != world.inside.end()) {
    if (found->second != std::this_thread::get_id()) {
      violation(std::string(function) + " while another thread calls NCCL for the same device");
    }
    return;
  }
  gpu_ = comm->gpu;
  world.inside[gpu_] = std::this_thread::get_id();
}

OnDevice::~OnDevice() {
  if (gpu_ == nullptr) return;
  Lock lock(world.mutex);
  world.inside.erase(gpu_);
}

}  // namespace stub
