// SPDX-License-Identifier: Apache-2.0
// DLPack's table of functions by which a library shows its arrays to C: the parts that are read.
//
// The layout is that of dlpack.h 1.x, which keeps it within a major version. A library offers the
// table as a capsule named "dlpack_exchange_api" at its array's class.
#pragma once

#include <cstdint>

namespace commrt::dlpack {

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr std::uint32_t kMajor = 1;
constexpr std::int32_t kCpu = 1;  // kDLCPU

enum class TypeCode : std::uint8_t {
  Int, UInt, Float, Opaque, BFloat, Complex, Bool,
  F8E3M4, F8E4M3, F8E4M3B11FNUZ, F8E4M3FN, F8E4M3FNUZ, F8E5M2
};

struct Tensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  TypeCode code;
  std::uint8_t bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements; null where they are those of C's order
  std::uint64_t byte_offset;
};

struct Header {
  std::uint32_t major, minor;
  const Header* older;
};

// Fills in a tensor that stays the object's: 0, or -1 with Python's error set.
using ViewOf = int (*)(void* object, Tensor* out);

struct ExchangeApi {
  Header header;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  ViewOf view_of;  // may be null
  void* current_stream;
};

}  // namespace commrt::dlpack
