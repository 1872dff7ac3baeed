// SPDX-License-Identifier: Apache-2.0
// Merging, splitting, filling and searching of sparse vectors.
#include "kernels/sparse.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/sparse_merge.hpp"
#include "kernels/sparse_values.hpp"

namespace commrt::sparse {
namespace {

template <class F>
auto with_indices(IndexType index, F f) {
  return index == IndexType::I32 ? f(std::int32_t{}) : f(std::int64_t{});
}

// Adds up several lists of one index range, block by block, without comparing them. A bit for
// each element that is in one of the lists says, counted, where its entry belongs in the sum; so
// each entry is read twice, however many lists there are, and no step waits for the one before it
// (one core of an EPYC 9005, four lists with 1 % each: docs/internals/sparse-sums.md).
template <class I, class V>
struct Marking {
  using Item = typename V::Item;
  static constexpr std::int64_t kBlock = 8192;
  const Entries* lists;
  std::size_t num_lists;
  std::int64_t first, last;
  I* io;
  Item* vo;

  const I* indices(std::size_t list) const { return static_cast<const I*>(lists[list].indices); }
  const Item* values(std::size_t list) const {
    return static_cast<const Item*>(lists[list].values);
  }

  // Always inlined: it is compiled for more than one instruction set.
  __attribute__((always_inline)) std::size_t run() const {
    std::uint64_t present[kBlock / 64] = {};
    std::size_t before[kBlock / 64];  // where the entries of each word begin
    std::vector<std::size_t> begin(num_lists), end(num_lists);
    std::size_t found = 0;
    while (true) {
      std::int64_t next = last;  // blocks without entries are passed over
      for (std::size_t l = 0; l < num_lists; ++l) {
        begin[l] = end[l];
        if (end[l] != lists[l].count) next = std::min<std::int64_t>(next, indices(l)[end[l]]);
      }
      if (next == last) return found;
      const std::int64_t base = first + (next - first) / kBlock * kBlock;
      const std::int64_t limit = std::min(last, base + kBlock);
      for (std::size_t l = 0; l < num_lists; ++l) {
        const I* const in = indices(l);
        const std::size_t count = lists[l].count;
        std::size_t e = begin[l];
        for (; e < count && in[e] < limit; ++e) {
          const auto i = static_cast<std::uint64_t>(in[e] - base);
          present[i / 64] |= std::uint64_t{1} << i % 64;
        }
        end[l] = e;
      }
      const std::size_t start = found;
      for (std::int64_t w = 0; w < kBlock / 64; ++w) {
        before[w] = found;
        found += static_cast<std::size_t>(__builtin_popcountll(present[w]));
      }
      std::fill(vo + start, vo + found, V::neutral());
      for (std::size_t l = 0; l < num_lists; ++l) {
        const I* const in = indices(l);
        const Item* const add = values(l);
        for (std::size_t e = begin[l]; e < end[l]; ++e) {
          const auto i = static_cast<std::uint64_t>(in[e] - base);
          const std::uint64_t below = present[i / 64] & ((std::uint64_t{1} << i % 64) - 1);
          const std::size_t at =
              before[i / 64] + static_cast<std::size_t>(__builtin_popcountll(below));
          io[at] = in[e];
          vo[at] = V::add(vo[at], add[e]);
        }
      }
      std::fill(std::begin(present), std::end(present), 0);
    }
  }

  std::size_t run_plainly() const { return run(); }
#if defined(__x86_64__)
  __attribute__((target("popcnt,bmi,bmi2"))) std::size_t run_counting() const { return run(); }
#endif
};

template <class I, class V>
std::size_t sum_marked(const Marking<I, V>& marking) {
#if defined(__x86_64__)
  static const bool counts = __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi2");
  if (counts) return marking.run_counting();
#endif
  return marking.run_plainly();
}

template <class V>
constexpr int bucket_shift() {
  return V::kKeyBits > 11 ? V::kKeyBits - 11 : 0;
}

// Narrows down, 11 bits at a time from the top, the magnitude of the k-th largest element:
// `least`, of which so many belong to the k.
template <class V>
void find_kth(const typename V::Item* x, std::size_t n, std::size_t k, typename V::Key& least,
              std::size_t& of_least) {
  using Key = typename V::Key;
  std::int64_t counts[kBuckets];
  int shift = V::kKeyBits;
  Key prefix = 0;  // the bits from `shift` on
  std::size_t wanted = k;
  while (shift > 0) {
    const int next = std::max(0, shift - 11);
    const auto mask = static_cast<Key>((std::uint64_t{1} << (shift - next)) - 1);
    std::fill(counts, counts + kBuckets, 0);
    if (shift == V::kKeyBits) {
      for (std::size_t i = 0; i < n; ++i) ++counts[V::magnitude(x[i]) >> next];
    } else {
      for (std::size_t i = 0; i < n; ++i) {
        const Key key = V::magnitude(x[i]);
        if (static_cast<Key>(key >> shift) == prefix) ++counts[(key >> next) & mask];
      }
    }
    std::size_t bucket = mask;
    while (static_cast<std::size_t>(counts[bucket]) < wanted) wanted -= counts[bucket--];
    prefix = static_cast<Key>(static_cast<Key>(prefix << (shift - next)) | bucket);
    shift = next;
  }
  least = prefix;
  of_least = wanted;
}

// Complex numbers have no magnitude here; callers ask has_magnitude.
template <class V, class F>
std::size_t if_ordered(V, F f) {
  if constexpr (std::is_same_v<V, Complex<Float32>> || std::is_same_v<V, Complex<Float64>>) {
    return 0;
  } else {
    return f(V{});
  }
}

}  // namespace

std::size_t merge(IndexType index, DType dtype, Entries a, Entries b, void* indices,
                  void* values) {
  return with_indices(index, [&](auto i) {
    return with_values(dtype, [&](auto v) {
      using I = decltype(i);
      using V = decltype(v);
      return merge_two<I, V>(a, b, static_cast<I*>(indices),
                             static_cast<typename V::Item*>(values));
    });
  });
}

std::size_t sum(IndexType index, DType dtype, const Entries* lists, std::size_t num_lists,
                std::int64_t first, std::int64_t last, void* indices, void* values) {
  return with_indices(index, [&](auto i) {
    return with_values(dtype, [&](auto v) {
      using I = decltype(i);
      using V = decltype(v);
      return sum_marked(Marking<I, V>{lists, num_lists, first, last, static_cast<I*>(indices),
                                      static_cast<typename V::Item*>(values)});
    });
  });
}

void add_into(IndexType index, DType dtype, Entries x, std::int64_t first, void* dense) {
  with_indices(index, [&](auto i) {
    with_values(dtype, [&](auto v) {
      using V = decltype(v);
      using Item = typename V::Item;
      const auto* indices = static_cast<const decltype(i)*>(x.indices);
      const auto* values = static_cast<const Item*>(x.values);
      auto* to = static_cast<Item*>(dense);
      for (std::size_t e = 0; e < x.count; ++e) {
        Item& element = to[indices[e] - first];
        element = V::add(element, values[e]);
      }
    });
  });
}

std::size_t sparsify(IndexType index, DType dtype, const void* dense, std::size_t n,
                     std::int64_t first, void* indices, void* values) {
  return with_indices(index, [&](auto i) {
    return with_values(dtype, [&](auto v) {
      using I = decltype(i);
      using V = decltype(v);
      const auto* from = static_cast<const typename V::Item*>(dense);
      auto* io = static_cast<I*>(indices);
      auto* vo = static_cast<typename V::Item*>(values);
      std::size_t found = 0;
      for (std::size_t e = 0; e < n; ++e) {
        io[found] = static_cast<I>(first + static_cast<std::int64_t>(e));
        vo[found] = from[e];
        found += !V::is_zero(from[e]);
      }
      return found;
    });
  });
}

void split(IndexType index, const void* indices, std::size_t n, const std::int64_t* bounds,
           std::size_t num_bounds, std::int64_t* offsets) {
  with_indices(index, [&](auto i) {
    using I = decltype(i);
    const auto* begin = static_cast<const I*>(indices);
    const I* at = begin;
    for (std::size_t b = 0; b < num_bounds; ++b) {
      at = std::lower_bound(at, begin + n, bounds[b],
                            [](I have, std::int64_t bound) { return have < bound; });
      offsets[b] = at - begin;
    }
  });
}

std::size_t first_wrong(IndexType index, const void* indices, std::size_t n,
                        std::int64_t length) {
  return with_indices(index, [&](auto i) -> std::size_t {
    using I = decltype(i);
    const auto* x = static_cast<const I*>(indices);
    if (n == 0) return 0;
    if (x[0] < 0 || x[0] >= length) return 0;
    constexpr std::size_t kBlock = 8192;
    for (std::size_t at = 1; at < n; at += kBlock) {
      const std::size_t end = std::min(n, at + kBlock);
      bool wrong = false;
      for (std::size_t e = at; e < end; ++e) wrong |= x[e] <= x[e - 1];
      if (!wrong && x[end - 1] < length) continue;
      for (std::size_t e = at; e < end; ++e) {
        if (x[e] <= x[e - 1] || x[e] >= length) return e;
      }
    }
    return n;
  });
}

bool has_magnitude(DType dtype) { return dtype != DType::C64 && dtype != DType::C128; }

void count_magnitudes(DType dtype, const void* values, std::size_t n, std::int64_t* counts) {
  with_values(dtype, [&](auto v) {
    return if_ordered(v, [&](auto ordered) {
      using V = decltype(ordered);
      const auto* x = static_cast<const typename V::Item*>(values);
      for (std::size_t i = 0; i < n; ++i) ++counts[V::magnitude(x[i]) >> bucket_shift<V>()];
      return n;
    });
  });
}

std::size_t take_buckets(DType dtype, const void* values, std::size_t n, std::size_t bucket,
                         std::int64_t* positions) {
  return with_values(dtype, [&](auto v) {
    return if_ordered(v, [&](auto ordered) {
      using V = decltype(ordered);
      const auto* x = static_cast<const typename V::Item*>(values);
      std::size_t found = 0;
      for (std::size_t i = 0; i < n; ++i) {
        positions[found] = static_cast<std::int64_t>(i);
        found += static_cast<std::size_t>(V::magnitude(x[i]) >> bucket_shift<V>()) >= bucket;
      }
      return found;
    });
  });
}

void largest(DType dtype, const void* values, std::size_t n, std::size_t k,
             std::int64_t* positions) {
  if (k == 0) return;
  with_values(dtype, [&](auto v) {
    return if_ordered(v, [&](auto ordered) {
      using V = decltype(ordered);
      const auto* x = static_cast<const typename V::Item*>(values);
      typename V::Key least;
      std::size_t of_least;
      find_kth<V>(x, n, k, least, of_least);
      std::size_t found = 0;
      for (std::size_t i = 0; found < k; ++i) {
        const auto key = V::magnitude(x[i]);
        if (key < least || (key == least && of_least == 0)) continue;
        of_least -= key == least;
        positions[found++] = static_cast<std::int64_t>(i);
      }
      return k;
    });
  });
}

}  // namespace commrt::sparse
