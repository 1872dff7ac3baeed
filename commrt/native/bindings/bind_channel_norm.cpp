// SPDX-License-Identifier: Apache-2.0
// Binds the kernels of normalizations as _native.channel_norm. Memory is said by address:
// commrt/layers/spatial/channel_sums.py checks.
#include <nanobind/nanobind.h>

#include <string>

#include "bindings/bindings.hpp"
#include "gil.hpp"
#include "kernels/channel_norm.hpp"

namespace nb = nanobind;

namespace commrt {
namespace {

using Address = std::uint64_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

const channel_norm::Kernels& checked(int dtype) {
  const bool is_float = dtype == static_cast<int>(DType::F32) ||
                        dtype == static_cast<int>(DType::F64);
  if (!is_float) {
    throw nb::value_error(("channel_norm: dtype code " + std::to_string(dtype) +
                           ": expected float32 or float64")
                              .c_str());
  }
  return channel_norm::kernels_of(static_cast<DType>(dtype));
}

}  // namespace

void bind_channel_norm(nb::module_& m) {
  using std::int64_t;
  nb::module_ s = m.def_submodule(
      "channel_norm", "Kernels of normalizations of samples x channels x elements.");
  s.def(
      "statistics",
      [](int dtype, Address x, int64_t samples, int64_t channels, int64_t elements, Address mean,
         Address deviation) {
        const auto& kernels = checked(dtype);
        ReleasedGil released;
        kernels.statistics({at<void>(x), {samples, channels, elements}, at<double>(mean),
                            at<double>(deviation)});
      },
      nb::arg("dtype"), nb::arg("x"), nb::arg("num_samples"), nb::arg("num_channels"),
      nb::arg("num_elements"), nb::arg("mean"), nb::arg("deviation"),
      "Write mean and sum of squared deviations of each channel, in float64.");
  s.def(
      "sums",
      [](int dtype, Address gradient, Address x, Address mean, int64_t samples, int64_t channels,
         int64_t elements, Address of_gradient, Address of_products) {
        const auto& kernels = checked(dtype);
        ReleasedGil released;
        kernels.sums({at<void>(gradient), at<void>(x), at<double>(mean),
                      {samples, channels, elements}, at<double>(of_gradient),
                      at<double>(of_products)});
      },
      nb::arg("dtype"), nb::arg("gradient"), nb::arg("x"), nb::arg("mean"),
      nb::arg("num_samples"), nb::arg("num_channels"), nb::arg("num_elements"),
      nb::arg("of_gradient"), nb::arg("of_products"),
      "Write each channel's sums of the gradient and of gradient * (x - mean), in float64.");
  s.def(
      "combine",
      [](int dtype, Address gradient, Address x, Address mean, Address a, Address b, Address c,
         int64_t samples, int64_t channels, int64_t elements, Address out) {
        const auto& kernels = checked(dtype);
        ReleasedGil released;
        kernels.combine({at<void>(gradient), at<void>(x), at<double>(mean), at<double>(a),
                         at<double>(b), at<double>(c), {samples, channels, elements},
                         at<void>(out)});
      },
      nb::arg("dtype"), nb::arg("gradient"), nb::arg("x"), nb::arg("mean"), nb::arg("a"),
      nb::arg("b"), nb::arg("c"), nb::arg("num_samples"), nb::arg("num_channels"),
      nb::arg("num_elements"), nb::arg("out"),
      "Write a * gradient + b * (x - mean) + c, with float64 a, b and c for each channel.");
}

}  // namespace commrt
