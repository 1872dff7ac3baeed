// SPDX-License-Identifier: Apache-2.0
// Binds the sparse kernels as _native.sparse. Memory is said by address: commrt/sparse checks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "gil.hpp"
#include "kernels/kernels.hpp"
#include "kernels/sparse.hpp"
#include "kernels/sparse_wide.hpp"

namespace nb = nanobind;

namespace commrt {
namespace {

using Address = std::uint64_t;
using sparse::Entries;
using sparse::IndexType;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

IndexType index_of(int nbytes) {
  if (nbytes != 4 && nbytes != 8) {
    throw nb::value_error(("an index of " + std::to_string(nbytes) + " bytes is not supported: " +
                           "use indices of 4 or 8 bytes (int32 or int64)")
                              .c_str());
  }
  return nbytes == 4 ? IndexType::I32 : IndexType::I64;
}

void check_key(int nbytes) {
  if (nbytes != 16) index_of(nbytes);
}

DType dtype_of(int code) {
  if (code < 0 || code >= kNumDTypes) {
    throw nb::value_error(("dtype code " + std::to_string(code) + " is unknown: expected 0 to " +
                           std::to_string(kNumDTypes - 1) + ", as dtype_by_name(name).code gives")
                              .c_str());
  }
  return static_cast<DType>(code);
}

Entries entries(Address indices, Address values, std::size_t count) {
  return {at(indices), at(values), count};
}

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::module_ s = m.def_submodule("sparse", "Kernels on sparse vectors; without the GIL.");
  using Free = nb::call_guard<ReleasedGil>;
  s.def(
      "merge",
      [](int index, int dtype, Address ia, Address va, std::size_t na, Address ib, Address vb,
         std::size_t nb_, Address io, Address vo) {
        return sparse::merge(index_of(index), dtype_of(dtype), entries(ia, va, na),
                             entries(ib, vb, nb_), at(io), at(vo));
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("indices_a"), nb::arg("values_a"),
      nb::arg("num_a"), nb::arg("indices_b"), nb::arg("values_b"), nb::arg("num_b"),
      nb::arg("indices"), nb::arg("values"), Free(),
      "Write the sorted union of two sets of entries; return its length.");
  s.def(
      "sum",
      [](int index, int dtype,
         const std::vector<std::tuple<Address, Address, std::size_t>>& lists, std::int64_t first,
         std::int64_t last, Address io, Address vo) {
        std::vector<Entries> all;
        all.reserve(lists.size());
        for (const auto& [indices, values, count] : lists) {
          all.push_back(entries(indices, values, count));
        }
        return sparse::sum(index_of(index), dtype_of(dtype), all.data(), all.size(), first, last,
                           at(io), at(vo));
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("lists"), nb::arg("first"),
      nb::arg("last"), nb::arg("indices"), nb::arg("values"), Free(),
      "Write the sorted union of lists of (indices, values, count); return its length.");
  s.def(
      "add_into",
      [](int index, int dtype, Address indices, Address values, std::size_t count,
         std::int64_t first, Address dense) {
        sparse::add_into(index_of(index), dtype_of(dtype), entries(indices, values, count), first,
                         at(dense));
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("indices"), nb::arg("values"),
      nb::arg("count"), nb::arg("first"), nb::arg("dense"), Free(),
      "Add entries to the dense elements from index first on.");
  s.def(
      "add_dense",
      [](int dtype, Address x, Address dense, std::size_t count) {
        const void* inputs[] = {at(dense), at(x)};
        combine_for(dtype_of(dtype), RedOp::Sum)(at(dense), nullptr, inputs, 2, count, nullptr,
                                                 Scale{}, Store::Plain);
      },
      nb::arg("dtype"), nb::arg("x"), nb::arg("dense"), nb::arg("count"), Free(),
      "Add dense elements to others.");
  s.def(
      "sparsify",
      [](int index, int dtype, Address dense, std::size_t count, std::int64_t first,
         Address indices, Address values) {
        return sparse::sparsify(index_of(index), dtype_of(dtype), at(dense), count, first,
                                at(indices), at(values));
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("dense"), nb::arg("count"),
      nb::arg("first"), nb::arg("indices"), nb::arg("values"), Free(),
      "Write the entries that are not zero; return their number.");
  s.def(
      "split",
      [](int index, Address indices, std::size_t count, const std::vector<std::int64_t>& bounds) {
        std::vector<std::int64_t> offsets(bounds.size());
        sparse::split(index_of(index), at(indices), count, bounds.data(), bounds.size(),
                      offsets.data());
        return offsets;
      },
      nb::arg("index_nbytes"), nb::arg("indices"), nb::arg("count"), nb::arg("bounds"), Free(),
      "Return how many indices lie below each of the ascending bounds.");
  s.def(
      "first_wrong",
      [](int index, Address indices, std::size_t count, std::int64_t length) {
        return sparse::first_wrong(index_of(index), at(indices), count, length);
      },
      nb::arg("index_nbytes"), nb::arg("indices"), nb::arg("count"), nb::arg("length"), Free(),
      "Return the first position that is out of order or of range; count if none is.");
  s.def(
      "merge_keys",
      [](int dtype, Address ia, Address va, std::size_t na, Address ib, Address vb, std::size_t nb_,
         Address io, Address vo) {
        return sparse::merge_keys(dtype_of(dtype), entries(ia, va, na), entries(ib, vb, nb_),
                                  at(io), at(vo));
      },
      nb::arg("dtype"), nb::arg("keys_a"), nb::arg("values_a"), nb::arg("num_a"),
      nb::arg("keys_b"), nb::arg("values_b"), nb::arg("num_b"), nb::arg("keys"),
      nb::arg("values"), Free(), "Do what merge does, with keys of 16 bytes.");
  s.def(
      "split_keys",
      [](Address keys, std::size_t count,
         const std::vector<std::pair<std::uint64_t, std::int64_t>>& bounds) {
        std::vector<sparse::Key> wide;
        wide.reserve(bounds.size());
        for (const auto& [low, high] : bounds) {
          wide.push_back((static_cast<sparse::Key>(high) << 64) | low);
        }
        std::vector<std::int64_t> offsets(bounds.size());
        sparse::split_keys(at(keys), count, wide.data(), wide.size(), offsets.data());
        return offsets;
      },
      nb::arg("keys"), nb::arg("count"), nb::arg("bounds"), Free(),
      "Do what split does, with keys of 16 bytes and bounds of two words, the lower one first.");
  s.def(
      "first_unordered",
      [](Address keys, std::size_t count) { return sparse::first_unordered(at(keys), count); },
      nb::arg("keys"), nb::arg("count"), Free(),
      "Return the first position of keys of 16 bytes that is out of order; count if none is.");
  s.def(
      "number",
      [](int key_nbytes, const std::vector<std::int64_t>& shape, Address coordinates,
         std::size_t count, Address keys) {
        check_key(key_nbytes);
        return sparse::number(key_nbytes, shape, at<const std::int64_t>(coordinates), count,
                              at(keys));
      },
      nb::arg("key_nbytes"), nb::arg("shape"), nb::arg("coordinates"), nb::arg("count"),
      nb::arg("keys"), Free(),
      "Write numbers in C order of int64 coordinates, a row for each dimension, before the first "
      "that lies outside; return how many there are.");
  s.def(
      "locate",
      [](int key_nbytes, const std::vector<std::int64_t>& shape, Address keys, std::size_t count,
         Address coordinates) {
        check_key(key_nbytes);
        sparse::locate(key_nbytes, shape, at(keys), count, at<std::int64_t>(coordinates));
      },
      nb::arg("key_nbytes"), nb::arg("shape"), nb::arg("keys"), nb::arg("count"),
      nb::arg("coordinates"), Free(), "Write the coordinates of numbers: the reverse.");
  s.def(
      "has_magnitude", [](int dtype) { return sparse::has_magnitude(dtype_of(dtype)); },
      nb::arg("dtype"), "Whether elements have a largest one: all but complex ones.");
  s.def(
      "count_magnitudes",
      [](int dtype, Address values, std::size_t count, Address counts) {
        sparse::count_magnitudes(dtype_of(dtype), at(values), count, at<std::int64_t>(counts));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("count"), nb::arg("counts"), Free(),
      "Add to 2048 counts of elements by the leading bits of their magnitudes.");
  s.def(
      "take_buckets",
      [](int dtype, Address values, std::size_t count, std::size_t bucket, Address positions) {
        return sparse::take_buckets(dtype_of(dtype), at(values), count, bucket,
                                    at<std::int64_t>(positions));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("count"), nb::arg("bucket"),
      nb::arg("positions"), Free(),
      "Write the positions of elements in this bucket or above; return their number.");
  s.def(
      "largest",
      [](int dtype, Address values, std::size_t count, std::size_t k, Address positions) {
        sparse::largest(dtype_of(dtype), at(values), count, k, at<std::int64_t>(positions));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("count"), nb::arg("k"), nb::arg("positions"),
      Free(), "Write the ascending positions of the k elements of largest magnitude.");
}

}  // namespace commrt
