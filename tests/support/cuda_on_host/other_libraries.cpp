// SPDX-License-Identifier: Apache-2.0
// For pretended libraries whose kernels are host functions: memory as the card finds it.
#include "memory.hpp"
#include "streams.hpp"

using namespace cuda_on_host;

// Where threads that stand for the card find these bytes; null, and the card fails, if they are not
// of one block.
extern "C" __attribute__((visibility("default"))) void* cuda_on_host_at(Pointer address,
                                                                        std::size_t nbytes) {
  if (memory().may_touch(address, nbytes)) return memory().at(address);
  card().fail(kIllegalAddress);
  return nullptr;
}
