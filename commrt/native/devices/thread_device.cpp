// SPDX-License-Identifier: Apache-2.0
// The threads of a device of threads, and the memory of all such devices.
#include "devices/thread_device.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace commrt::threaded {

// Never destroyed: threads may outlast the end of main().
Blocks& blocks() {
  static Blocks* all = new Blocks;
  return *all;
}

namespace {

std::uint32_t load(const void* flag) {
  return __atomic_load_n(static_cast<const std::uint32_t*>(flag), __ATOMIC_SEQ_CST);
}

// Runs until the kernel may end. Whoever lets it end need not tell, because it looks again and
// again.
template <class GivenUp>
void run_foreign(const ForeignKernel& kernel, GivenUp given_up) {
  pretended::call_host_function(kernel.begin, kernel.argument);
  signal().changed();
  const auto may_go = [&] { return kernel.may_end(kernel.argument) || given_up(); };
  while (!may_go()) signal().wait_a_little(may_go);
  pretended::call_host_function(kernel.end, kernel.argument);
}

void execute(Command& command, ThreadDevice* device) {
  const auto given_up = [device] { return device->stopping.load() || device->failed.load(); };
  switch (command.kind) {
    case Kind::Copy:
    case Kind::KernelCopy:
    case Kind::Reduce:
    case Kind::ScaledSum:
    case Kind::Divide: pretended::run_on_host(command); break;
    case Kind::Boxes:
      // A GPU would read wherever that leads, and fail for good.
      if (run_boxes(*command.boxes) != nullptr) device->failed.store(true);
      break;
    case Kind::Record:
      if (command.record->is_timed) command.record->at = std::chrono::steady_clock::now();
      command.record->done.store(true);
      signal().changed();
      break;
    case Kind::WaitEvent:
      signal().wait([&] { return command.record->done.load() || given_up(); });
      break;
    case Kind::Write:
      __atomic_store_n(static_cast<std::uint32_t*>(command.dst), command.value, __ATOMIC_SEQ_CST);
      signal().changed();
      break;
    case Kind::Wait:
      signal().wait([&] {
        return flag_reached(load(command.dst), command.value) || given_up();
      });
      break;
    case Kind::HostFunction:
      pretended::call_host_function(command.function, command.argument);
      break;
    case Kind::Foreign: run_foreign(*command.foreign, given_up); break;
    case Kind::Stage:
    case Kind::ForeignEnd: break;  // of simulated devices only
  }
}

void run(StreamState* stream) {
  ThreadDevice* device = stream->device;
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->arrived.wait(lock, [&] {
      return !stream->commands.empty() || stream->closing || device->stopping.load();
    });
    if (device->stopping.load() || stream->commands.empty()) break;
    Command command = std::move(stream->commands.front());
    stream->commands.pop_front();
    if (device->max_delay_us) {
      const auto delay = std::chrono::microseconds(
          stream->random.below(static_cast<std::size_t>(device->max_delay_us) + 1));
      stream->arrived.wait_for(lock, delay, [device] { return device->stopping.load(); });
    }
    lock.unlock();
    for (auto& [other, number] : command.after)
      signal().wait([&, many = number, of = other.get()] {
        return of->done.load() >= many || device->stopping.load() || device->failed.load();
      });
    std::uint64_t left = device->fail_in.load();
    while (left && !device->fail_in.compare_exchange_weak(left, left - 1)) {
    }
    if (left == 1) device->failed.store(true);
    if (!device->failed.load() && !device->stopping.load()) execute(command, device);
    command = {};
    stream->done.fetch_add(1);
    signal().changed();
    lock.lock();
  }
  stream->ended.store(true);
}

}  // namespace

Stream add_stream(ThreadDevice* device, Stream handle, bool blocking) {
  join_ended(device);
  auto stream = std::make_shared<StreamState>();
  stream->device = device;
  stream->handle = handle;
  stream->blocking = blocking;
  stream->random = sim::Random(device->seed * 1000003 + handle);
  stream->thread = std::thread(run, stream.get());
  device->streams[handle] = std::move(stream);
  return handle;
}

void close_stream(const std::shared_ptr<StreamState>& stream) {
  {
    std::lock_guard<std::mutex> guard(stream->mutex);
    stream->closing = true;
  }
  stream->arrived.notify_one();
}

void join_ended(ThreadDevice* device) {
  auto& all = device->destroyed;
  for (std::size_t i = 0; i < all.size();) {
    if (all[i]->ended.load()) {
      all[i]->thread.join();
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

Signal& signal() {
  static Signal* all = new Signal;
  return *all;
}

ThreadDevice::ThreadDevice(std::uint64_t given_seed, int delay_us, int number)
    : seed(given_seed), max_delay_us(delay_us), ordinal(number) {
  api = &table();
  add_stream(this, 0, true);
}

void ThreadDevice::close() {
  std::vector<std::shared_ptr<StreamState>> all;
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (closed) return;
    closed = true;
    all = std::move(destroyed);
    for (auto& [handle, stream] : streams) all.push_back(stream);
    streams.clear();
    destroyed.clear();
    stopping.store(true);
  }
  signal().changed();
  for (auto& stream : all) close_stream(stream);
  for (auto& stream : all) stream->thread.join();
}

// Memory goes with the device, not with its threads. A thread that works on the device keeps it,
// and may look at flags until it has seen that the device is closed.
void ThreadDevice::free_all() {
  std::lock_guard<std::mutex> guard(blocks().mutex);
  auto& by_base = blocks().by_base;
  for (auto at = by_base.begin(); at != by_base.end();) {
    at->second.opened_by.erase(this);
    if (at->second.owner != this) {
      ++at;
      continue;
    }
    std::free(reinterpret_cast<void*>(at->first));
    at = by_base.erase(at);
  }
}

ThreadDevice::~ThreadDevice() {
  close();
  free_all();
}

}  // namespace commrt::threaded
