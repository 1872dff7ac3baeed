// SPDX-License-Identifier: Apache-2.0
// Makes plans that move boxes of arrays.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"

namespace commrt {

namespace {

using Rows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Steps = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kBoxColumns = 3;   // array, dtype, offset; then shape and strides
constexpr size_t kStepColumns = 6;  // kind, lo, hi, peer, k, first box of the source
enum StepKind { kSend = 0, kReceive = 1, kReceiveReduce = 2, kCopy = 3, kReduce = 4 };

SpaceSpec read_boxes(const Rows& rows, RedOp redop, bool reduces) {
  const size_t ndim = (rows.shape(1) - kBoxColumns) / 2;
  if (rows.shape(1) < kBoxColumns || ndim > kMostDims) {
    throw std::invalid_argument("a row of boxes has " + std::to_string(rows.shape(1)) +
                                " columns; expected 3 (array, dtype, offset) and 2 for each of at "
                                "most " + std::to_string(kMostDims) + " dimensions");
  }
  SpaceSpec space{SpaceKind::In, {0}, 0, {}};
  for (size_t i = 0; i < rows.shape(0); ++i) {
    const int64_t* row = rows.data() + i * rows.shape(1);
    const auto dtype = static_cast<DType>(row[1]);
    Box box;
    box.array = static_cast<int>(row[0]);
    box.itemsize = item_size(dtype);
    box.combine = reduces ? combine_for(dtype, redop) : nullptr;
    box.offset = row[2];
    box.ndim = static_cast<int>(ndim);
    std::copy_n(row + kBoxColumns, ndim, box.shape);
    std::copy_n(row + kBoxColumns + ndim, ndim, box.strides);
    if (std::any_of(box.shape, box.shape + ndim, [](int64_t extent) { return extent < 1; })) {
      throw std::invalid_argument("box " + std::to_string(i) + " has a dimension of length 0 or "
                                  "less: leave empty boxes out");
    }
    box.settle();
    space.boxes.push_back(box);
    space.offsets.push_back(space.offsets.back() + static_cast<int64_t>(box.nbytes));
  }
  return space;
}

// Without boxes there is nothing to run, but the operation is one like any other.
PlanPtr make_box_plan(const Group& group, int coll, const std::string& label, int redop,
                      bool reduces, Rows boxes, Steps steps, Numbers deps, Numbers dep_ptr,
                      const std::vector<std::tuple<int, int, int>>& peers, int64_t lane_nbytes,
                      int most_slots, int ahead, int spins, int64_t most_inline, int store, int adaptive) {
  auto plan = std::make_shared<Plan>();
  plan->coll = coll;
  plan->dtype = DType::U8;
  plan->redop = static_cast<RedOp>(redop);
  plan->label = label;
  plan->returns_out = true;
  plan->depth = 1;
  plan->spins = spins;
  plan->inline_nbytes =
      std::clamp(static_cast<size_t>(most_inline), kInlineBytes, kMostInlineBytes);
  plan->store = static_cast<Store>(store);
  plan->adaptive = static_cast<Store>(adaptive);
  plan->choice.start_with(plan->store, plan->adaptive);
  plan->most_slots = std::max(1, most_slots);
  plan->ahead = static_cast<uint64_t>(std::max(1, ahead));
  plan->spaces.push_back(read_boxes(boxes, plan->redop, reduces));
  const int num_boxes = static_cast<int>(plan->spaces[0].boxes.size());
  std::vector<int> peer_index(static_cast<size_t>(group.comm->size), -1);
  for (const auto& [rank, sends, recvs] : peers) {
    if (rank < 0 || rank >= group.comm->size || rank == group.comm->rank) {
      throw std::invalid_argument("peer " + std::to_string(rank) + " is not another rank: expected "
                                  "0 to " + std::to_string(group.comm->size - 1) + " without " +
                                  std::to_string(group.comm->rank) + ", which is this rank");
    }
    peer_index[rank] = static_cast<int>(plan->peers.size());
    plan->peers.push_back({rank, sends, recvs});
  }
  if (steps.shape(1) != kStepColumns || dep_ptr.shape(0) != steps.shape(0) + 1) {
    throw std::invalid_argument("steps and their dependencies do not fit each other: " +
                                std::to_string(steps.shape(0)) + " steps have " +
                                std::to_string(steps.shape(1)) + " columns and dep_ptr has " +
                                std::to_string(dep_ptr.shape(0)) + " entries; expected " +
                                std::to_string(kStepColumns) + " columns, and one entry more than "
                                "steps");
  }
  for (size_t i = 0; i < steps.shape(0); ++i) {
    const int32_t* row = steps.data() + i * kStepColumns;
    const int32_t kind = row[0], lo = row[1], hi = row[2], count = hi - lo;
    const bool local = kind == kCopy || kind == kReduce;
    auto slice = [&](int first) {
      // A message without boxes is empty: it tells the other side that nothing comes.
      if (first < 0 || count < (local ? 1 : 0) || first + count > num_boxes) {
        throw std::invalid_argument("step " + std::to_string(i) + " asks for " +
                                    std::to_string(count) + " boxes from number " +
                                    std::to_string(first) + " on, but the table has " +
                                    std::to_string(num_boxes) + "; only a message may have none");
      }
      Ref ref{};
      ref.lo = first;
      ref.hi = first + count;
      return ref;
    };
    Instr& ins = plan->instrs.emplace_back();
    ins.boxed = true;
    Ref message{};
    if (!local) {
      if (row[3] < 0 || row[3] >= group.comm->size || peer_index[row[3]] < 0) {
        throw std::invalid_argument("step " + std::to_string(i) + " has a message with rank " +
                                    std::to_string(row[3]) + ", which is not among the plan's "
                                    "peers: add the rank to `peers`");
      }
      message.is_message = true;
      message.peer = peer_index[row[3]];
      message.k = row[4];
      ins.has_mpi = group.comm->link(row[3]).kind == LinkKind::Mpi;
    }
    if (kind == kSend) {
      ins.inputs.push_back(slice(lo));
      ins.sends.push_back(message);
    } else {
      ins.inputs.push_back(local ? slice(row[5]) : message);
      if (kind == kReceiveReduce || kind == kReduce) ins.inputs.push_back(slice(lo));
      ins.local_outs.push_back(slice(lo));
    }
    for (int32_t at = dep_ptr.data()[i]; at < dep_ptr.data()[i + 1]; ++at) {
      ins.deps.push_back(deps.data()[at]);
    }
  }
  plan->in_elems = plan->spaces[0].offsets.back();  // what is moved, for records and waits
  plan->finish(1, static_cast<size_t>(lane_nbytes), 1, 0);
  return plan;
}

}  // namespace

void bind_boxes(nb::module_& m) {
  m.def("make_box_plan", &make_box_plan, nb::arg("group"), nb::kw_only(), nb::arg("coll"),
        nb::arg("label"), nb::arg("redop"), nb::arg("reduces"), nb::arg("boxes"),
        nb::arg("steps"), nb::arg("deps"), nb::arg("dep_ptr"), nb::arg("peers"),
        nb::arg("lane_nbytes"), nb::arg("most_slots"), nb::arg("ahead"), nb::arg("spins"), nb::arg("most_inline"),
        nb::arg("store"), nb::arg("adaptive"),
        "Plan of one rank that moves boxes of arrays; its buffer is a table of their addresses.");
}

}  // namespace commrt
