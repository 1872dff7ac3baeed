// SPDX-License-Identifier: Apache-2.0
// Walks the boxes of a launch on the host.
#include "devices/box_launch.hpp"

#include <cstring>

#include "kernels/kernels.hpp"

namespace commrt {
namespace {

// The entries of a table, as commrt/kernels/text/boxes.cuh has them.
struct BoxEntry {
  std::uint64_t first;
  std::int64_t offset;
  std::uint32_t array, unit, ndim, term, terms, unused;
  std::uint64_t shape[kMostLaunchDims];
  std::int64_t strides[kMostLaunchDims];
};
struct TermEntry {
  std::int64_t offset;
  std::int64_t strides[kMostLaunchDims];
};
constexpr std::uint32_t kMostUnit = 16;
static_assert(sizeof(BoxEntry) == 168 && sizeof(TermEntry) == 72);

std::int64_t place_in(std::int64_t offset, const std::int64_t* strides, std::uint32_t ndim,
                      const std::uint64_t* place) {
  for (std::uint32_t dim = 0; dim < ndim; ++dim)
    offset += static_cast<std::int64_t>(place[dim]) * strides[dim];
  return offset;
}

BoxEntry box_at(const BoxLaunch& launch, std::uint32_t number) {
  BoxEntry box;
  std::memcpy(&box, launch.table + number * sizeof(box), sizeof(box));
  return box;
}

TermEntry term_at(const BoxLaunch& launch, std::uint32_t number) {
  TermEntry term;
  std::memcpy(&term, launch.table + launch.terms_at + number * sizeof(term), sizeof(term));
  return term;
}

// The number of units of a box; 0 if its numbers are not those of a box.
std::uint64_t units_of(const BoxEntry& box, std::uint64_t most) {
  if (box.ndim > kMostLaunchDims) return 0;
  std::uint64_t units = 1;
  for (std::uint32_t dim = 0; dim < box.ndim; ++dim) {
    if (box.shape[dim] == 0 || box.shape[dim] > most / units) return 0;
    units *= box.shape[dim];
  }
  return units <= most ? units : 0;
}

// True if all that a term leads to lies in the buffer.
bool is_in_buffer(const BoxLaunch& launch, const BoxEntry& box, const TermEntry& term) {
  // Compute in wider numbers: memory that is no table may hold any numbers.
  __int128 low = term.offset, high = term.offset;
  for (std::uint32_t dim = 0; dim < box.ndim; ++dim) {
    const __int128 way = static_cast<__int128>(box.shape[dim] - 1) * term.strides[dim];
    (way < 0 ? low : high) += way;
  }
  return low >= 0 && high + box.unit <= static_cast<__int128>(launch.buffer_nbytes);
}

const char* why_no_table(const BoxLaunch& launch) {
  constexpr const char* no_table = "the table of the launch holds no boxes of it";
  const std::uint64_t boxes_nbytes = std::uint64_t{launch.num_boxes} * sizeof(BoxEntry);
  if (launch.terms_at > launch.table_nbytes || boxes_nbytes > launch.terms_at)
    return "the table of the launch is shorter than its boxes";
  const std::uint64_t num_terms = (launch.table_nbytes - launch.terms_at) / sizeof(TermEntry);
  std::uint64_t first = 0;
  for (std::uint32_t i = 0; i < launch.num_boxes; ++i) {
    const BoxEntry box = box_at(launch, i);
    const std::uint64_t units = units_of(box, launch.units - first);
    if (box.first != first || units == 0 || box.array >= kMostLaunchArrays || box.unit == 0 ||
        box.unit > kMostUnit || launch.arrays[box.array] == nullptr || box.term > num_terms ||
        box.terms > num_terms - box.term)
      return no_table;
    for (std::uint32_t k = 0; k < box.terms; ++k)
      if (!is_in_buffer(launch, box, term_at(launch, box.term + k))) return no_table;
    first += units;
  }
  return first == launch.units ? nullptr : no_table;
}

}  // namespace

const char* box_kind_name(BoxKind kind) {
  static const char* const names[kNumBoxKinds] = {"pack", "unpack", "combine"};
  return names[static_cast<int>(kind)];
}

const char* why_no_launch(const BoxLaunch& launch) {
  if (launch.kind == BoxKind::Combine && !combine_for(launch.dtype, launch.op))
    return "the reduction is not defined for the type";
  return nullptr;
}

const char* run_boxes(const BoxLaunch& launch, BoxTouch touch, void* context) {
  const auto may = [&](const void* ptr, std::size_t nbytes, bool writes) {
    return !touch || touch(context, ptr, nbytes, writes);
  };
  const bool packs = launch.kind == BoxKind::Pack;
  if (!launch.units || !may(launch.table, launch.table_nbytes, false)) return nullptr;
  if (const char* why = why_no_table(launch)) return why;
  if (!may(launch.buffer, launch.buffer_nbytes, packs)) return nullptr;
  for (std::uint32_t i = 0; i < launch.num_boxes; ++i) {
    const BoxEntry box = box_at(launch, i);
    const std::uint64_t units = units_of(box, launch.units);
    std::uint64_t place[kMostLaunchDims] = {};
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      unsigned char* own = launch.arrays[box.array] +
                           place_in(box.offset, box.strides, box.ndim, place);
      const bool left_alone = !may(own, box.unit, !packs);
      for (std::uint32_t k = 0; k < box.terms && !left_alone; ++k) {
        const TermEntry term = term_at(launch, box.term + k);
        unsigned char* other =
            launch.buffer + place_in(term.offset, term.strides, box.ndim, place);
        const void* const inputs[] = {own, other};
        switch (launch.kind) {
          case BoxKind::Pack: std::memcpy(other, own, box.unit); break;
          case BoxKind::Unpack: std::memcpy(own, other, box.unit); break;
          case BoxKind::Combine:
            combine_for(launch.dtype, launch.op)(own, nullptr, inputs, 2, 1, nullptr, Scale{},
                                                 Store::Plain);
            break;
        }
      }
      for (std::uint32_t dim = box.ndim; dim-- > 0;) {
        if (++place[dim] < box.shape[dim]) break;
        place[dim] = 0;
      }
    }
  }
  return nullptr;
}

}  // namespace commrt
