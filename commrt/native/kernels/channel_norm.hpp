// SPDX-License-Identifier: Apache-2.0
// Kernels of normalizations by channel: what a rank has to know of its piece, and the gradient of
// that piece once the sums of all ranks are known. Each reads its arrays once from memory: a
// channel of a sample stays in the core's cache between two passes. Sums are in float64.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace commrt::channel_norm {

// An array of samples x channels x elements, without gaps.
struct Shape {
  std::int64_t num_samples;
  std::int64_t num_channels;
  std::int64_t num_elements;
};

// Writes each channel's mean, and the sum of squared deviations from it.
struct Statistics {
  const void* x;
  Shape shape;
  double* mean;
  double* deviation;
};

// Writes each channel's sum of the gradient, and of its products with x - mean.
struct Sums {
  const void* gradient;
  const void* x;
  const double* mean;
  Shape shape;
  double* of_gradient;
  double* of_products;
};

// Writes a * gradient + b * (x - mean) + c, with one a, b and c for each channel.
struct Combination {
  const void* gradient;
  const void* x;
  const double* mean;
  const double* a;
  const double* b;
  const double* c;
  Shape shape;
  void* out;
};

struct Kernels {
  void (*statistics)(const Statistics&);
  void (*sums)(const Sums&);
  void (*combine)(const Combination&);
};

// The kernels of float32 or float64.
const Kernels& kernels_of(DType dtype);

}  // namespace commrt::channel_norm
