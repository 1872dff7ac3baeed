// SPDX-License-Identifier: Apache-2.0
// Modules and launches. A module's image is a text that libnvrtc here (tests/support/nvrtc_on_host)
// has made: it names a library of the host, with commrt's kernels, and which of them it has.
#pragma once

#include <functional>

#include "results.hpp"

namespace cuda_on_host {

Result load_module(const void* image, Handle* out);
Result unload_module(Handle module);
Result find_kernel(Handle module, const char* name, Handle* out);

// The launch of a kernel of commrt's: takes the parameters now, as the driver does, and runs later.
Result launch_of(Handle kernel, unsigned blocks, unsigned threads, void** parameters,
                 std::function<void()>* out);

}  // namespace cuda_on_host
