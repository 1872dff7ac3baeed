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
  if (code < 0 || code >= kNumDTypes) {
    throw nb::value_error(("dtype code " + std::to_string(code) + " is unknown: expected 0 to " +
                           std::to_string(kNumDTypes - 1) + ", as dtype_by_name(name).code gives")
                              .c_str());
  }
  return static_cast<DType>(code);
}

RedOp op_of(int code) {
  if (code < 0 || code >= kNumRedOps) {
    throw nb::value_error(("reduction code " + std::to_string(code) +
                           " is unknown: expected 0 to " + std::to_string(kNumRedOps - 1) +
                           ", the value of a ReduceOp")
                              .c_str());
  }
  return static_cast<RedOp>(code);
}

Store store_of(int code) {
  if (code < 0 || code > 3) {
    throw nb::value_error(("store=" + std::to_string(code) + " is unknown: expected 0 (plain), "
                           "1 (streamed to dst), 2 (streamed to dst2) or 3 (streamed to both)")
                              .c_str());
  }
  return static_cast<Store>(code);
}

void combine(int dtype, int op, Bytes dst, const std::vector<ConstBytes>& srcs,
             const std::vector<int>& scaled, double factor, std::int64_t integer_factor,
             std::optional<Bytes> dst2, int store) {
  CombineFn fn = combine_for(dtype_of(dtype), op_of(op));
  if (!fn) {
    throw nb::value_error(("reduction code " + std::to_string(op) + " is not defined for dtype " +
                           "code " + std::to_string(dtype) + ": use another reduction or dtype")
                              .c_str());
  }
  if (srcs.empty()) {
    throw nb::value_error("combine() was given no srcs: pass at least one input");
  }
  std::size_t item = item_size(dtype_of(dtype));
  if (dst.size() % item) {
    throw nb::value_error(("dst has " + std::to_string(dst.size()) + " bytes; expected a whole " +
                           "number of elements of " + std::to_string(item) + " bytes")
                              .c_str());
  }
  std::vector<const void*> pointers;
  for (const ConstBytes& src : srcs) {
    if (src.size() != dst.size()) {
      throw nb::value_error(("dst and srcs differ in length: dst has " +
                             std::to_string(dst.size()) + " bytes and an input has " +
                             std::to_string(src.size()) + "; pass arrays of equal length")
                                .c_str());
    }
    pointers.push_back(src.data());
  }
  if (dst2 && dst2->size() != dst.size()) {
    throw nb::value_error(("dst and dst2 differ in length: they have " +
                           std::to_string(dst.size()) + " and " + std::to_string(dst2->size()) +
                           " bytes; pass arrays of equal length")
                              .c_str());
  }
  std::vector<std::uint64_t> bits(srcs.size() / 64 + 1);
  for (int k : scaled) {
    if (k < 0 || k >= int(srcs.size())) {
      throw nb::value_error(("scaled names input " + std::to_string(k) + ", but there are " +
                             std::to_string(srcs.size()) + " srcs, which count from 0")
                                .c_str());
    }
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
        if (dst.size() != src.size()) {
          throw nb::value_error(("dst and src differ in length: they have " +
                                 std::to_string(dst.size()) + " and " +
                                 std::to_string(src.size()) + " bytes; pass arrays of equal length")
                                    .c_str());
        }
        copy(dst.data(), src.data(), dst.size(), store_of(store) != Store::Plain);
        store_fence();
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("store") = 0, "Copy src to dst.");
  k.def(
      "divide_inplace",
      [](int dtype, Bytes x, std::int64_t divisor) {
        if (divisor <= 0) {
          throw nb::value_error(
              ("divisor=" + std::to_string(divisor) + " is not positive: pass 1 or more").c_str());
        }
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
