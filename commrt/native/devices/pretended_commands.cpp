// SPDX-License-Identifier: Apache-2.0
// Names of commands, and their kernels on the host (pretended_commands.hpp).
#include "devices/pretended_commands.hpp"

#include <cstring>

#include "kernels/kernels.hpp"

namespace commrt::pretended {

const char* kind_name(Kind kind) {
  static const char* const names[] = {"memcpy_async",   "memcpy_async (staged)",
                                      "event_record",   "stream_wait_event",
                                      "write_value32",  "wait_value32_geq",
                                      "launch_reduce",  "launch_copy",
                                      "launch_scaled_sum", "launch_divide",
                                      "launch_boxes",   "launch_host",
                                      "launch_foreign", "launch_foreign (its end)"};
  return names[static_cast<int>(kind)];
}

bool& in_host_function() {
  thread_local bool inside = false;
  return inside;
}

void run_on_host(const Work& work) {
  const std::size_t count = work.nbytes / item_size(work.dtype);
  switch (work.kind) {
    case Kind::Copy:
    case Kind::KernelCopy:
      if (work.nbytes) std::memmove(work.dst, work.src, work.nbytes);
      break;
    case Kind::Reduce: {
      const void* const inputs[] = {work.dst, work.src};
      combine_for(work.dtype, work.op)(work.dst, nullptr, inputs, 2, count, nullptr, Scale{},
                                       Store::Plain);
      break;
    }
    case Kind::ScaledSum:
      run_scaled_sum(work.dtype, work.dst, work.src, count, work.value, work.factor);
      break;
    case Kind::Divide: divide_inplace(work.dtype, work.dst, count, work.factor.integer); break;
    default: break;
  }
}

}  // namespace commrt::pretended
