// SPDX-License-Identifier: Apache-2.0
// A checksum of 64 bits: two values of equal length that differ have the same one by chance only,
// once in 2^64; two that differ in one bit never.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commrt {

uint64_t checksum(const void* data, std::size_t nbytes, uint64_t seed = 0);

}  // namespace commrt
