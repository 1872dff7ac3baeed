// SPDX-License-Identifier: Apache-2.0
// Kernels on sparse vectors: sorted, distinct indices of 32 or 64 bits, and a value for each.
//
// Nothing here knows Python, ranks or messages. Indices are those of the whole vector;
// `first` is the index of the first element of a dense range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace commrt::sparse {

enum class IndexType : std::uint8_t { I32, I64 };

struct Entries {
  const void* indices;
  const void* values;
  std::size_t count;
};

// Sorted union of a and b; values of equal indices are added. Returns the number of entries.
// The outputs have room for a.count + b.count entries and overlap no input.
std::size_t merge(IndexType index, DType dtype, Entries a, Entries b, void* indices,
                  void* values);

// Does the same for any number of lists, in their order, with indices from `first` to below
// `last`. It suits lists that are not far apart, as it passes over all elements of blocks that
// have entries.
std::size_t sum(IndexType index, DType dtype, const Entries* lists, std::size_t num_lists,
                std::int64_t first, std::int64_t last, void* indices, void* values);

// Adds entries to the dense elements from `first` on. All indices lie there.
void add_into(IndexType index, DType dtype, Entries x, std::int64_t first, void* dense);

// Entries of the elements that are not zero; room for n. Returns their number.
std::size_t sparsify(IndexType index, DType dtype, const void* dense, std::size_t n,
                     std::int64_t first, void* indices, void* values);

// offsets[i] = number of indices below bounds[i]; bounds ascend.
void split(IndexType index, const void* indices, std::size_t n, const std::int64_t* bounds,
           std::size_t num_bounds, std::int64_t* offsets);

// The first position whose index is not above the one before it, is negative, or is not below
// `length`; n if there is none.
std::size_t first_wrong(IndexType index, const void* indices, std::size_t n,
                        std::int64_t length);

// counts[b] += elements whose magnitude begins with the bits b: 2048 buckets, ascending.
constexpr std::size_t kBuckets = 2048;
bool has_magnitude(DType dtype);
void count_magnitudes(DType dtype, const void* values, std::size_t n, std::int64_t* counts);
// Positions of the elements in buckets from `bucket` on, ascending; room for all of them.
std::size_t take_buckets(DType dtype, const void* values, std::size_t n, std::size_t bucket,
                         std::int64_t* positions);
// Positions of the k elements of largest magnitude, ascending; of equal ones the first.
// Room for k <= n.
void largest(DType dtype, const void* values, std::size_t n, std::size_t k,
             std::int64_t* positions);

}  // namespace commrt::sparse
