// SPDX-License-Identifier: Apache-2.0
// Merging, splitting and making of keys of 128 bits.
#include "kernels/sparse_wide.hpp"

#include <algorithm>
#include <type_traits>

#include "kernels/sparse_merge.hpp"
#include "kernels/sparse_values.hpp"

namespace commrt::sparse {
namespace {

// By the bytes of a key: 4, 8 or 16.
template <class F>
auto with_keys(int nbytes, F f) {
  switch (nbytes) {
    case 4: return f(static_cast<std::int32_t*>(nullptr));
    case 8: return f(static_cast<std::int64_t*>(nullptr));
    default: return f(static_cast<StoredKey*>(nullptr));
  }
}

__extension__ typedef unsigned __int128 Unsigned;

}  // namespace

std::size_t merge_keys(DType dtype, Entries a, Entries b, void* keys, void* values) {
  return with_values(dtype, [&](auto v) {
    using V = decltype(v);
    return merge_two<StoredKey, V>(a, b, static_cast<StoredKey*>(keys),
                                   static_cast<typename V::Item*>(values));
  });
}

void split_keys(const void* keys, std::size_t n, const Key* bounds, std::size_t num_bounds,
                std::int64_t* offsets) {
  const auto* const begin = static_cast<const StoredKey*>(keys);
  const StoredKey* at = begin;
  for (std::size_t b = 0; b < num_bounds; ++b) {
    at = std::lower_bound(at, begin + n, bounds[b]);
    offsets[b] = at - begin;
  }
}

std::size_t first_unordered(const void* keys, std::size_t n) {
  const auto* const x = static_cast<const StoredKey*>(keys);
  for (std::size_t e = 1; e < n; ++e) {
    if (x[e] <= x[e - 1]) return e;
  }
  return n;
}

std::size_t number(int key_nbytes, const std::vector<std::int64_t>& shape,
                   const std::int64_t* coordinates, std::size_t n, void* keys) {
  return with_keys(key_nbytes, [&](auto* kind) {
    auto* const to = static_cast<decltype(kind)>(keys);
    using K = std::remove_pointer_t<decltype(kind)>;
    for (std::size_t e = 0; e < n; ++e) {
      K key = 0;
      const std::int64_t* at = coordinates + e;
      for (const std::int64_t length : shape) {
        if (*at < 0 || *at >= length) return e;
        key = static_cast<K>(key * static_cast<K>(length) + static_cast<K>(*at));
        at += n;
      }
      to[e] = key;
    }
    return n;
  });
}

void locate(int key_nbytes, const std::vector<std::int64_t>& shape, const void* keys, std::size_t n,
            std::int64_t* coordinates) {
  with_keys(key_nbytes, [&](auto* kind) {
    const auto* const from = static_cast<const std::remove_pointer_t<decltype(kind)>*>(keys);
    for (std::size_t e = 0; e < n; ++e) {
      auto left = static_cast<Unsigned>(from[e]);
      for (std::size_t d = shape.size(); d-- > 0;) {
        const auto length = static_cast<Unsigned>(shape[d]);
        coordinates[d * n + e] = static_cast<std::int64_t>(left % length);
        left /= length;
      }
    }
  });
}

}  // namespace commrt::sparse
