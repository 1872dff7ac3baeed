// SPDX-License-Identifier: Apache-2.0
// A GPU of this process, through its primary context.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devices/cuda_driver.hpp"
#include "devices/device.hpp"

namespace commrt::cuda {

struct CudaDevice : Device {
  // Returns null, with a text for last_error(), if the device cannot be opened.
  static std::unique_ptr<CudaDevice> open(int ordinal, bool memory_flags,
                                          const std::string& library,
                                          const std::string& sysfs);
  ~CudaDevice();

  const Driver* driver = nullptr;
  int ordinal = 0;
  Ordinal handle = 0;
  Handle context = nullptr;
  std::string name;
  Uuid uuid{};  // the same in all processes, whatever number the device has there
  // The node of the machine where pinned memory is to be (near_node.hpp); -1: anywhere.
  int node = -1;
  std::string sysfs;
  int multiprocessors = 1;
  bool can_memory_flags = false;  // the device; `memory_flags` is what is used

  // Streams that were seen to be of this device, in no order; 0: none. A handle may come again for
  // a stream of another device; then what it is given fails.
  std::atomic<std::uint64_t> known_streams[8] = {};
  std::atomic<unsigned> next_known{0};

  int capability = 0;  // 90 is 9.0
  int driver_version = 0;  // 12040 is CUDA 12.4

  // Kernels by their names, of the modules that load_kernels() took. None is unloaded before
  // the end: that waits for the device, and launches may hold what it had.
  std::mutex mutex;
  std::vector<Handle> modules;
  std::map<std::string, Handle> kernels;
};

// The name of a reduction's kernel in the module; copy is "commrt_copy".
std::string kernel_name(RedOp op, DType dtype);
std::string type_name(DType dtype);

}  // namespace commrt::cuda
