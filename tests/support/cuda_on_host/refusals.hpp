// SPDX-License-Identifier: Apache-2.0
// What every call of the driver looks at first: may it be made, and is it told to fail?
#pragma once

#include "results.hpp"

namespace cuda_on_host {

void initialise();
// The contexts that are current for this thread, the last one on top. There is one context.
void push_context();
bool pop_context();
bool has_context();
inline Handle the_context() { return reinterpret_cast<Handle>(0xc0de); }

// Success, or why the call is not made. CUDA_ON_HOST_FAIL=cuMemcpyAsync:3:719 lets the third call
// of that function fail with 719; * stands for all functions. So does cuda_on_host_fail().
Result refuse(const char* function, bool needs_context = true);

void fail_at(const char* function, long nth, Result result);
long num_calls();  // that could have failed, since fail_at()

}  // namespace cuda_on_host
