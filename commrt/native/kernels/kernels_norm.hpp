// SPDX-License-Identifier: Apache-2.0
// Sums over channels, and combinations of them, with the vectors of one instruction set.
#pragma once

#include "kernels/channel_norm.hpp"
#include "kernels/kernels_vector.hpp"

namespace commrt {
namespace {

using Doubles = Vec<double>;
constexpr std::int64_t kDoubles = kVec / sizeof(double);
constexpr int kChains = 4;  // additions that do not wait for each other

// The elements at p, as many as a vector has of float64.
template <class T>
COMMRT_INLINE Doubles widened(const T* p) {
  typedef T Few __attribute__((vector_size(COMMRT_VEC_BYTES / sizeof(double) * sizeof(T))));
  Few few;
  __builtin_memcpy(&few, p, sizeof(few));
  return __builtin_convertvector(few, Doubles);
}

COMMRT_INLINE double sum_of(const Doubles (&chains)[kChains]) {
  const Doubles all = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  double sum = 0;
  for (int lane = 0; lane < kDoubles; ++lane) sum += all[lane];
  return sum;
}

// Calls step(i, chain) for whole vectors of n elements, and rest(i) for each element behind them.
template <class Step, class Rest>
COMMRT_INLINE void for_elements(std::int64_t n, Step step, Rest rest) {
  std::int64_t i = 0;
  for (; i + kChains * kDoubles <= n; i += kChains * kDoubles) {
    for (int chain = 0; chain < kChains; ++chain) step(i + chain * kDoubles, chain);
  }
  for (; i + kDoubles <= n; i += kDoubles) step(i, 0);
  for (; i < n; ++i) rest(i);
}

template <class T>
COMMRT_INLINE double sum_of_values(const T* x, std::int64_t n) {
  Doubles chains[kChains] = {};
  double rest = 0;
  for_elements(
      n, [&](std::int64_t i, int chain) { chains[chain] += widened(x + i); },
      [&](std::int64_t i) { rest += static_cast<double>(x[i]); });
  return sum_of(chains) + rest;
}

template <class T>
COMMRT_INLINE double sum_of_squares(const T* x, std::int64_t n, double mean) {
  Doubles chains[kChains] = {};
  const Doubles means = splat(mean);
  double rest = 0;
  for_elements(
      n,
      [&](std::int64_t i, int chain) {
        const Doubles off = widened(x + i) - means;
        chains[chain] += off * off;
      },
      [&](std::int64_t i) {
        const double off = static_cast<double>(x[i]) - mean;
        rest += off * off;
      });
  return sum_of(chains) + rest;
}

// Two passes for each channel: the second finds what it reads in a cache, for most networks.
template <class T>
void statistics_of(const channel_norm::Statistics& job) {
  const auto [samples, channels, n] = job.shape;
  const double count = static_cast<double>(samples) * static_cast<double>(n);
  for (std::int64_t channel = 0; channel < channels; ++channel) {
    const T* first = static_cast<const T*>(job.x) + channel * n;
    double sum = 0, squares = 0;
    for (std::int64_t s = 0; s < samples; ++s) sum += sum_of_values(first + s * channels * n, n);
    const double mean = sum / count;
    for (std::int64_t s = 0; s < samples; ++s) {
      squares += sum_of_squares(first + s * channels * n, n, mean);
    }
    job.mean[channel] = mean;
    job.deviation[channel] = squares;
  }
}

template <class T>
void sums_of(const channel_norm::Sums& job) {
  const auto [samples, channels, n] = job.shape;
  for (std::int64_t channel = 0; channel < channels; ++channel) {
    const double mean = job.mean[channel];
    const Doubles means = splat(mean);
    double sum = 0, products = 0;
    for (std::int64_t s = 0; s < samples; ++s) {
      const T* g = static_cast<const T*>(job.gradient) + (s * channels + channel) * n;
      const T* x = static_cast<const T*>(job.x) + (s * channels + channel) * n;
      Doubles of_g[kChains] = {}, of_both[kChains] = {};
      for_elements(
          n,
          [&](std::int64_t i, int chain) {
            const Doubles each = widened(g + i);
            of_g[chain] += each;
            of_both[chain] += each * (widened(x + i) - means);
          },
          [&](std::int64_t i) {
            const double each = static_cast<double>(g[i]);
            sum += each;
            products += each * (static_cast<double>(x[i]) - mean);
          });
      sum += sum_of(of_g);
      products += sum_of(of_both);
    }
    job.of_gradient[channel] = sum;
    job.of_products[channel] = products;
  }
}

template <class T>
void combine(const channel_norm::Combination& job) {
  const auto [samples, channels, n] = job.shape;
  for (std::int64_t row = 0; row < samples * channels; ++row) {
    const std::int64_t channel = row % channels;
    const T a = static_cast<T>(job.a[channel]), b = static_cast<T>(job.b[channel]);
    const T c = static_cast<T>(job.c[channel]), mean = static_cast<T>(job.mean[channel]);
    const T* __restrict g = static_cast<const T*>(job.gradient) + row * n;
    const T* __restrict x = static_cast<const T*>(job.x) + row * n;
    T* __restrict out = static_cast<T*>(job.out) + row * n;
    for (std::int64_t i = 0; i < n; ++i) out[i] = a * g[i] + (b * (x[i] - mean) + c);
  }
}

template <class T>
constexpr channel_norm::Kernels make_norm_kernels() {
  return {statistics_of<T>, sums_of<T>, combine<T>};
}

}  // namespace
}  // namespace commrt
