// SPDX-License-Identifier: Apache-2.0
// Lets a C++ compiler take the kernels' CUDA C: the threads of a launch run one after the
// other. Kernels whose threads talk to each other would need more; commrt has none.
#pragma once

#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)

namespace emulated {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline thread_local Dim3 block_idx{0, 0, 0}, thread_idx{0, 0, 0}, block_dim, grid_dim;

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Threads in another order than their numbers': nothing may depend on it.
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, unsigned blocks, Arguments... arguments) {
  constexpr unsigned kThreads = 256;
  block_dim.x = kThreads;
  grid_dim.x = blocks;
  for (unsigned block = blocks; block-- > 0;) {
    for (unsigned i = 0; i < kThreads; ++i) {
      block_idx.x = block;
      thread_idx.x = i * 89 % kThreads;
      kernel(arguments...);
    }
  }
}

// One thread of a launch: what it does may be looked at where all would take too long.
struct Thread {
  unsigned blocks, block, thread;
};
template <class Kernel, class... Arguments>
void run_one(Kernel* kernel, const Thread& one, Arguments... arguments) {
  block_dim.x = 256;
  grid_dim.x = one.blocks;
  block_idx.x = one.block;
  thread_idx.x = one.thread;
  kernel(arguments...);
}

}  // namespace emulated

#define blockIdx emulated::block_idx
#define threadIdx emulated::thread_idx
#define blockDim emulated::block_dim
#define gridDim emulated::grid_dim

inline float __uint_as_float(unsigned bits) { return emulated::same_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulated::same_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulated::same_bits<double>(bits); }
inline long long __double_as_longlong(double value) {
  return emulated::same_bits<long long>(value);
}
