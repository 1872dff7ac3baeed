// SPDX-License-Identifier: Apache-2.0
// Binds the kernels as _native.kernels, for tests and measurements.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "kernels/kernels.hpp"

namespace nb = nanobind;

namespace commrt {
namespace {

// Arrays come as their bytes: the views of a type that numpy does not know, or that start at
// an odd address, need no support from it.
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

DType dtype_of(int code) {
  if (code < 0 || code >= kNumDTypes) throw nb::value_error("no such dtype code");
  return static_cast<DType>(code);
}

RedOp op_of(int code) {
  if (code < 0 || code >= kNumRedOps) throw nb::value_error("no such reduction code");
  return static_cast<RedOp>(code);
}

Store store_of(int code) {
  if (code < 0 || code > 3) throw nb::value_error("store is 0, 1, 2 or 3");
  return static_cast<Store>(code);
}

void combine(int dtype, int op, Bytes dst, const std::vector<ConstBytes>& srcs,
             const std::vector<int>& scaled, double factor, std::int64_t integer_factor,
             std::optional<Bytes> dst2, int store) {
  CombineFn fn = combine_for(dtype_of(dtype), op_of(op));
  if (!fn) throw nb::value_error("the reduction is not defined for this dtype");
  if (srcs.empty()) throw nb::value_error("combine needs at least one input");
  std::size_t item = item_size(dtype_of(dtype));
  if (dst.size() % item) throw nb::value_error("dst is not a whole number of elements");
  std::vector<const void*> pointers;
  for (const ConstBytes& src : srcs) {
    if (src.size() != dst.size()) throw nb::value_error("dst and srcs differ in length");
    pointers.push_back(src.data());
  }
  if (dst2 && dst2->size() != dst.size()) throw nb::value_error("dst and dst2 differ in length");
  std::vector<std::uint64_t> bits(srcs.size() / 64 + 1);
  for (int k : scaled) {
    if (k < 0 || k >= int(srcs.size())) throw nb::value_error("scaled names an unknown input");
    bits[k / 64] |= std::uint64_t{1} << (k % 64);
  }
  fn(dst.data(), dst2 ? dst2->data() : nullptr, pointers.data(), int(pointers.size()),
     dst.size() / item, scaled.empty() ? nullptr : bits.data(),
     Scale{factor, integer_factor}, store_of(store));
  store_fence();
}

// A user's reduction in C, for tests: first x -> scale * x + shift of the lower ranks, then
// that of the higher ones, modulo 2^64. Associative, and not commutative.
void compose(const void* in, void* inout, std::size_t count) {
  struct Map {
    std::uint64_t scale, shift;
  };
  for (std::size_t i = 0; i < count; ++i) {
    Map first, then;
    std::memcpy(&first, static_cast<const unsigned char*>(in) + i * sizeof(Map), sizeof(Map));
    auto* place = static_cast<unsigned char*>(inout) + i * sizeof(Map);
    std::memcpy(&then, place, sizeof(Map));
    then = {first.scale * then.scale, first.shift * then.scale + then.shift};
    std::memcpy(place, &then, sizeof(Map));
  }
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::module_ k = m.def_submodule("kernels", "Reductions and copies of raw bytes.");
  k.def("combine", &combine, nb::arg("dtype"), nb::arg("op"), nb::arg("dst"), nb::arg("srcs"),
        nb::arg("scaled") = std::vector<int>(), nb::arg("factor") = 1.0,
        nb::arg("integer_factor") = 1, nb::arg("dst2").none() = nb::none(), nb::arg("store") = 0,
        "Reduce srcs, element by element, into dst (and dst2).");
  k.def(
      "copy",
      [](Bytes dst, ConstBytes src, int store) {
        if (dst.size() != src.size()) throw nb::value_error("dst and src differ in length");
        copy(dst.data(), src.data(), dst.size(), store_of(store) != Store::Plain);
        store_fence();
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("store") = 0, "Copy src to dst.");
  k.def(
      "divide_inplace",
      [](int dtype, Bytes x, std::int64_t divisor) {
        if (divisor <= 0) throw nb::value_error("divisor must be positive");
        divide_inplace(dtype_of(dtype), x.data(), x.size() / item_size(dtype_of(dtype)), divisor);
      },
      nb::arg("dtype"), nb::arg("x"), nb::arg("divisor"), "Divide integers toward zero.");
  k.def(
      "defined",
      [](int dtype, int op) { return combine_for(dtype_of(dtype), op_of(op)) != nullptr; },
      nb::arg("dtype"), nb::arg("op"), "Whether the reduction is defined for the dtype.");
  k.def(
      "item_size", [](int dtype) { return item_size(dtype_of(dtype)); }, nb::arg("dtype"),
      "Bytes per element.");
  k.def("compose_address", [] { return reinterpret_cast<std::uint64_t>(&compose); },
        "Address of a C function for tests of users' reductions.");
  k.def("isa", [] { return std::string(isa()); }, "The instruction set in use.");
  k.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < num_isas(); ++i) names.emplace_back(isa_name(i));
        return names;
      },
      "The instruction sets of this machine, best last.");
  k.def("use_isa", [](const std::string& name) { return use_isa(name.c_str()); },
        nb::arg("name"), "Force an instruction set; false where the machine lacks it.");
}

}  // namespace commrt
