// SPDX-License-Identifier: Apache-2.0
// Walks the boxes of a launch on the host.
#include "box_launch.hpp"

#include <cstring>

#include "kernels.hpp"

namespace commrt {
namespace {

// As in commrt/kernels/text/boxes.cuh.
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
static_assert(sizeof(BoxEntry) == 168 && sizeof(TermEntry) == 72);

std::int64_t place_in(std::int64_t offset, const std::int64_t* strides, std::uint32_t ndim,
                      const std::uint64_t* place) {
  for (std::uint32_t dim = 0; dim < ndim; ++dim)
    offset += static_cast<std::int64_t>(place[dim]) * strides[dim];
  return offset;
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

void run_boxes(const BoxLaunch& launch, BoxTouch touch, void* context) {
  const auto may = [&](const void* ptr, std::size_t nbytes, bool writes) {
    return !touch || touch(context, ptr, nbytes, writes);
  };
  const bool packs = launch.kind == BoxKind::Pack;
  if (!launch.units || !may(launch.table, launch.table_nbytes, false) ||
      !may(launch.buffer, launch.buffer_nbytes, packs))
    return;
  for (std::uint32_t i = 0; i < launch.num_boxes; ++i) {
    BoxEntry box;
    std::memcpy(&box, launch.table + i * sizeof(box), sizeof(box));
    std::uint64_t units = 1, place[kMostLaunchDims] = {};
    for (std::uint32_t dim = 0; dim < box.ndim; ++dim) units *= box.shape[dim];
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      unsigned char* own = launch.arrays[box.array] +
                           place_in(box.offset, box.strides, box.ndim, place);
      const bool left_alone = !may(own, box.unit, !packs);
      for (std::uint32_t k = 0; k < box.terms && !left_alone; ++k) {
        TermEntry term;
        std::memcpy(&term, launch.table + launch.terms_at + (box.term + k) * sizeof(term),
                    sizeof(term));
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
}

}  // namespace commrt
