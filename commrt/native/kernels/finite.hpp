// SPDX-License-Identifier: Apache-2.0
// Looks for NaN and infinity in arrays.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace commrt {

// The index of the first element that is NaN or infinite; -1: there is none, as in every array of
// integers. A complex number is either of these if one of its parts is.
int64_t first_not_finite(DType dtype, const void* data, int64_t count);

// True if that element is NaN, and not infinity.
bool is_nan_at(DType dtype, const void* data, int64_t index);

}  // namespace commrt
