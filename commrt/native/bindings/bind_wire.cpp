// SPDX-License-Identifier: Apache-2.0
// Binds the wire formats as _native.wire. Memory is said by address: commrt/compression checks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "gil.hpp"
#include "kernels/wire.hpp"

namespace nb = nanobind;

namespace commrt {
namespace {

using Address = std::uint64_t;

void* at(Address address) { return reinterpret_cast<void*>(address); }

WireFormat format_of(int code) {
  if (code < 0 || code >= kNumWireFormats) {
    throw nb::value_error(("wire format code " + std::to_string(code) + " is unknown: expected 0 " +
                           "to " + std::to_string(kNumWireFormats - 1) +
                           ", as wire_format(name).code gives")
                              .c_str());
  }
  return static_cast<WireFormat>(code);
}

const WireKernels& kernels_of(int format, int dtype) {
  const auto type = static_cast<DType>(dtype);
  if (type != DType::F32 && type != DType::F64)
    throw nb::value_error(("elements of dtype code " + std::to_string(dtype) +
                           " have no wire format: pass float32 or float64")
                              .c_str());
  return wire_kernels(format_of(format), type);
}

}  // namespace

void bind_wire(nb::module_& m) {
  nb::module_ w = m.def_submodule("wire", "Floats in fewer bytes, and back; without the GIL.");
  using Free = nb::call_guard<ReleasedGil>;
  w.def("block", [](int format) { return wire_block(format_of(format)); }, nb::arg("format"),
        "Elements of a block.");
  w.def(
      "nbytes", [](int format, std::size_t count) { return wire_nbytes(format_of(format), count); },
      nb::arg("format"), nb::arg("count"), "Bytes that so many elements take.");
  w.def(
      "encode",
      [](int format, int dtype, Address x, Address residual, std::size_t count, Address wire) {
        kernels_of(format, dtype).encode(at(x), at(residual), count, at(wire));
      },
      nb::arg("format"), nb::arg("dtype"), nb::arg("x"), nb::arg("residual"), nb::arg("count"),
      nb::arg("wire"), Free(), "Write x plus residual (0: none) as it goes over the wire.");
  w.def(
      "decode",
      [](int format, int dtype, Address wire, std::size_t count, Address out) {
        kernels_of(format, dtype).decode(at(wire), count, at(out));
      },
      nb::arg("format"), nb::arg("dtype"), nb::arg("wire"), nb::arg("count"), nb::arg("out"),
      Free(), "Write what came as elements.");
  w.def(
      "sum",
      [](int format, int dtype, const std::vector<Address>& parts, int own, Address x,
         Address residual, std::size_t count, float divisor, Address wire, Address lost) {
        std::vector<const void*> from;
        for (const Address part : parts) from.push_back(at(part));
        kernels_of(format, dtype)
            .sum(from.data(), static_cast<int>(from.size()), own, at(x), at(residual), count,
                 divisor, at(wire), at(lost));
      },
      nb::arg("format"), nb::arg("dtype"), nb::arg("parts"), nb::arg("own"), nb::arg("x"),
      nb::arg("residual"), nb::arg("count"), nb::arg("divisor"), nb::arg("wire"), nb::arg("lost"),
      Free(),
      "Write the sum of all parts (of part own: x plus residual) over divisor as it goes over the "
      "wire, and to lost (0: nowhere) what that leaves out of the sum.");
  w.def(
      "settle",
      [](int format, int dtype, Address wire, std::size_t count, Address x, Address residual) {
        kernels_of(format, dtype).settle(at(wire), count, at(x), at(residual));
      },
      nb::arg("format"), nb::arg("dtype"), nb::arg("wire"), nb::arg("count"), nb::arg("x"),
      nb::arg("residual"), Free(), "Leave in residual what of x plus residual did not go.");
}

}  // namespace commrt
