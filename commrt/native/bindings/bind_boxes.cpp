// SPDX-License-Identifier: Apache-2.0
// Makes plans that move boxes of arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "arrays/view.hpp"
#include "bindings/bindings.hpp"
#include "calls/box_front.hpp"
#include "calls/group.hpp"
#include "engine/box_template.hpp"

namespace commrt {

namespace {

// An array, where the box begins and ends in each dimension (offset and number), and which of the
// array's dimensions that is, in what steps. An array below 0: there is no box.
using Places = std::vector<std::pair<int64_t, int32_t>>;
using EndOf = std::tuple<int, Places, Places, std::vector<int32_t>, std::vector<int64_t>>;
using MoveOf = std::tuple<int, int64_t, int, EndOf, EndOf>;

BoxTemplate::End read_end(const EndOf& given, const BoxTemplate& made) {
  const auto& [array, start, stop, axes, steps] = given;
  BoxTemplate::End end;
  end.array = array;
  if (array < 0) return end;
  const size_t ndim = start.size();
  const bool fits = static_cast<size_t>(array) < made.dims.size() && ndim <= kMostDims &&
                    stop.size() == ndim && axes.size() == ndim && steps.size() == ndim &&
                    std::all_of(axes.begin(), axes.end(), [&](int32_t axis) {
                      return axis >= 0 && axis < made.dims[static_cast<size_t>(array)];
                    });
  if (!fits) {
    throw std::invalid_argument("a box of array " + std::to_string(array) + " with " +
                                std::to_string(ndim) + " dimensions does not fit: expected at most " +
                                std::to_string(kMostDims) + ", with a begin, an end, a step and a "
                                "dimension of one of the " + std::to_string(made.dims.size()) +
                                " arrays for each");
  }
  for (const auto& [offset, number] : start) end.start.push_back({offset, number});
  for (const auto& [offset, number] : stop) end.stop.push_back({offset, number});
  end.axes = axes;
  end.steps = steps;
  return end;
}

// A grid of ranks; and for each dimension of an array: those of the grid that distribute it, the
// elements of a block that is dealt out (0: none is), and whether the call says the pieces'
// elements.
using AxisOf = std::tuple<std::vector<int>, int64_t, bool>;
using LayoutOf = std::pair<std::vector<int64_t>, std::vector<AxisOf>>;

LayoutKind read_layout(const LayoutOf& given, const BoxTemplate& made) {
  LayoutKind kind;
  kind.grid = given.first;
  const auto most = static_cast<int>(kind.grid.size());
  bool fits = made.dims.size() == 2 && given.second.size() <= kMostDims / 2;
  for (const int ndim : made.dims) fits = fits && static_cast<size_t>(ndim) == given.second.size();
  for (const int64_t extent : kind.grid) fits = fits && extent > 0;
  for (const auto& [grid_dims, block, has_sizes] : given.second) {
    for (const int dim : grid_dims) fits = fits && 0 <= dim && dim < most;
    fits = fits && block >= 0 && !(has_sizes && grid_dims.empty());
    kind.axes.push_back({grid_dims, block, has_sizes});
  }
  if (!fits || kind.num_ranks() != made.size) {
    throw std::invalid_argument("a layout of " + std::to_string(given.second.size()) +
                                " dimensions does not fit: expected those of two arrays, at most " +
                                std::to_string(kMostDims / 2) + ", on a grid of " +
                                std::to_string(made.size) + " ranks");
  }
  return kind;
}

// Seed, factor, and array and dimension of each extent that belongs to a fact.
using FactOf =
    std::tuple<uint64_t, uint64_t, std::optional<std::vector<std::pair<uint32_t, uint32_t>>>>;

std::shared_ptr<BoxTemplate> make_box_template(
    int rank, int size, int coll, const std::string& label, int redop, bool reduces, bool stated,
    int64_t limit_nbytes, int64_t lane_nbytes, int spins, int64_t most_inline, uint64_t slots_nbytes,
    uint64_t fewest_slots, uint64_t learns_from, const std::vector<std::pair<int, int>>& stores,
    const std::vector<std::pair<int, int>>& arrays, const std::vector<MoveOf>& moves,
    const std::optional<std::pair<LayoutOf, LayoutOf>>& layouts, uint16_t facts) {
  auto made = std::make_shared<BoxTemplate>();
  made->kind = {coll, label, static_cast<RedOp>(redop), reduces, stated, limit_nbytes,
                static_cast<size_t>(lane_nbytes), spins, static_cast<size_t>(most_inline),
                arrays.empty() ? DType::U8 : static_cast<DType>(arrays[0].first), facts};
  made->slots_nbytes = slots_nbytes;
  made->fewest_slots = fewest_slots;
  made->stores.learns_from = learns_from;
  for (size_t i = 0; i < 2; ++i) {
    Store* const kinds = i == 0 ? made->stores.is_short : made->stores.is_long;
    kinds[0] = static_cast<Store>(stores.at(i).first);
    kinds[1] = static_cast<Store>(stores.at(i).second);
  }
  for (const auto& [dtype, ndim] : arrays) {
    made->types.push_back(static_cast<DType>(dtype));
    made->dims.push_back(ndim);
  }
  made->rank = rank;
  made->size = size;
  for (const auto& [phase, number, peer, source, target] : moves) {
    made->moves.push_back({phase, number, peer, read_end(source, *made), read_end(target, *made)});
  }
  if (layouts.has_value()) {
    auto pair = std::make_unique<LayoutPair>();
    pair->source = read_layout(layouts->first, *made);
    pair->target = read_layout(layouts->second, *made);
    made->layouts = std::move(pair);
  }
  return made;
}

}  // namespace

void bind_boxes(nb::module_& m) {
  nb::class_<BoxTemplate>(
      m, "BoxTemplate", "What calls that move boxes have in common, but for where boxes lie.")
      .def_prop_ro("nbytes", &BoxTemplate::nbytes, "Bytes of memory that it takes.")
      .def("plan", [](const BoxTemplate& made, Group& group, const std::vector<int64_t>& numbers,
                      const std::vector<int64_t>& strides) -> PlanPtr {
        return made.make(numbers.data(), numbers.size(), strides.data(), strides.size(),
                         *group.comm);
      }, nb::arg("group"), nb::arg("numbers"), nb::arg("strides"), "The plan of one call.")
      .def("program", [](const BoxTemplate& made, const std::vector<int64_t>& numbers,
                         const std::vector<int64_t>& strides) {
        const BoxProgram program =
            made.program(numbers.data(), numbers.size(), strides.data(), strides.size());
        std::vector<std::tuple<int, int64_t, std::vector<int64_t>, std::vector<int64_t>>> boxes;
        for (const Box& box : program.boxes) {
          boxes.emplace_back(box.array, box.offset,
                             std::vector<int64_t>(box.shape, box.shape + box.ndim),
                             std::vector<int64_t>(box.strides, box.strides + box.ndim));
        }
        std::vector<std::vector<int>> steps;
        for (const BoxStep& one : program.steps) {
          steps.push_back({static_cast<int>(one.kind), one.lo, one.hi, one.peer, one.k, one.source});
        }
        std::vector<std::tuple<int, int, int>> peers;
        for (const PeerUse& one : program.peers) {
          peers.emplace_back(one.rank, one.sends_per_fragment, one.recvs_per_fragment);
        }
        auto deps = program.deps;
        deps.resize(steps.size());
        return nb::make_tuple(boxes, steps, deps, peers, program.longest_nbytes, program.ahead,
                              program.fewest_slots);
      }, nb::arg("numbers"), nb::arg("strides"),
         "Return a call's boxes, steps, their dependencies, peers, the longest message's bytes, how "
         "far ahead steps are tried, and the fewest slots. For tests.");
  m.def("strided_view_of_numpy", [](nb::handle object) -> nb::object {
    StridedView view;
    if (!strided_view_of_numpy(object.ptr(), view)) return nb::none();
    const auto tuple_of = [&](const int64_t* numbers) {
      PyObject* const made = PyTuple_New(view.ndim);
      if (made == nullptr) throw nb::python_error();
      const auto owned = nb::steal<nb::tuple>(made);
      for (int i = 0; i < view.ndim; ++i) {
        PyObject* const number = PyLong_FromLongLong(numbers[i]);
        if (number == nullptr) throw nb::python_error();
        PyTuple_SET_ITEM(made, i, number);
      }
      return owned;
    };
    return nb::make_tuple(reinterpret_cast<uint64_t>(view.data), static_cast<int>(view.dtype),
                          tuple_of(view.shape), tuple_of(view.strides), view.writable,
                          view.is_distinct);
  }, nb::arg("array"),
     "(address, dtype code, shape, strides, writable, no two elements share memory) of a plain numpy "
     "array, contiguous or not; else None.");
  m.def("fact_number", [](uint64_t seed, const std::vector<int64_t>& numbers) {
    return fact_number(seed, numbers.data(), numbers.size());
  }, nb::arg("seed"), nb::arg("numbers"), "A number that stands for a fact with these numbers.");
  nb::class_<BoxFront>(m, "BoxFront", "Runs calls of one kind that move boxes of numpy's arrays.")
      .def("__init__", [](BoxFront* self, FamilyPtr family, const std::string& operation,
                          const std::vector<std::tuple<int, int, bool>>& arrays,
                          const std::vector<std::tuple<uint32_t, uint32_t, int64_t>>& least,
                          const std::vector<FactOf>& facts) {
        std::vector<BoxFront::Array> its_arrays;
        for (const auto& [dtype, ndim, is_written] : arrays) {
          its_arrays.push_back({static_cast<DType>(dtype), ndim, is_written});
        }
        std::vector<BoxFront::Least> its_least;
        for (const auto& [array, dim, num] : least) its_least.push_back({array, dim, num});
        std::vector<BoxFront::Fact> its_facts;
        for (const auto& [seed, factor, extents] : facts) its_facts.push_back({seed, factor, extents});
        new (self) BoxFront(std::move(family), operation, std::move(its_arrays),
                            std::move(its_least), std::move(its_facts));
      }, nb::arg("family"), nb::arg("operation"), nb::kw_only(), nb::arg("arrays"),
           nb::arg("least"), nb::arg("facts"),
           "`arrays`: element type, dimensions (negative: any, contiguous), and if it is written. "
           "`least`: array, dimension, elements. `facts`: seed, factor, and the extents that belong "
           "to it; None: the call's numbers.")
      .def("run", [](const BoxFront& front, nb::handle group, nb::handle arrays, nb::handle result,
                     bool nonblocking, double timeout_s,
                     const std::optional<std::vector<int64_t>>& numbers,
                     const std::optional<std::vector<int64_t>>& sizes) {
        return front.run(group, arrays, numbers ? &*numbers : nullptr, sizes ? &*sizes : nullptr,
                         result, nonblocking, timeout_s);
      }, nb::arg("group"), nb::arg("arrays"), nb::arg("result"), nb::arg("nonblocking"),
           nb::arg("timeout_s"), nb::arg("numbers") = nb::none(), nb::arg("sizes") = nb::none(),
           "Run a call on a tuple of arrays. NotImplemented: Python has to look. None: the ranks' "
           "calls do not fit, and nothing was sent.");
  m.def("make_box_template", &make_box_template, nb::kw_only(), nb::arg("rank"), nb::arg("size"),
        nb::arg("coll"),
        nb::arg("label"), nb::arg("redop"), nb::arg("reduces"), nb::arg("stated"),
        nb::arg("limit_nbytes"), nb::arg("lane_nbytes"), nb::arg("spins"), nb::arg("most_inline"),
        nb::arg("slots_nbytes"), nb::arg("fewest_slots"), nb::arg("learns_from"), nb::arg("stores"), nb::arg("arrays"), nb::arg("moves"),
        nb::arg("layouts") = nb::none(), nb::arg("facts") = 0,
        "Plans of calls whose boxes begin and end at the call's numbers, or move an array from one "
        "layout to another.");
}

}  // namespace commrt
