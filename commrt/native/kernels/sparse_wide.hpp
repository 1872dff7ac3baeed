// SPDX-License-Identifier: Apache-2.0
// Keys of sparse arrays with more elements than 64 bits can number, and coordinates per dimension.
//
// A key is an element's number in C order, as a signed integer of 128 bits. Arrays of keys need no
// more than the alignment of 64 bits. Elements beyond 2^63 are never held densely, so these kernels
// are the ones that work on entries alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/sparse.hpp"

namespace commrt::sparse {

__extension__ typedef __int128 Key;
typedef Key StoredKey __attribute__((aligned(8)));

// As merge() of sparse.hpp, for keys.
std::size_t merge_keys(DType dtype, Entries a, Entries b, void* keys, void* values);

// offsets[i] = number of keys below bounds[i]; bounds ascend.
void split_keys(const void* keys, std::size_t n, const Key* bounds, std::size_t num_bounds,
                std::int64_t* offsets);

// The first position whose key is not above the one before it; n if there is none.
std::size_t first_unordered(const void* keys, std::size_t n);

// Numbers in C order, of 4, 8 or 16 bytes, from coordinates: row d has those of dimension d. Stops
// before the first coordinate that is outside of its dimension. Returns the number of entries.
std::size_t number(int key_nbytes, const std::vector<std::int64_t>& shape,
                   const std::int64_t* coordinates, std::size_t n, void* keys);

// The reverse.
void locate(int key_nbytes, const std::vector<std::int64_t>& shape, const void* keys, std::size_t n,
            std::int64_t* coordinates);

}  // namespace commrt::sparse
