// SPDX-License-Identifier: Apache-2.0
// Calls that move boxes of numpy's arrays, as they run once Python has seen one of their kind.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays/view.hpp"
#include "calls/plan_cache.hpp"

namespace commrt {

namespace nb = nanobind;

class Group;

// Python checks the first call of a kind, and says here what later ones have to be like. A call
// that is like that runs from here, whatever its lengths. Python looks at every other one.
class BoxFront {
 public:
  struct Array {
    DType dtype;
    int ndim;         // negative: any, and its elements lie one after another
    bool is_written;
  };
  // A dimension of an array that has to have so many elements.
  struct Least {
    uint32_t array, dim;
    int64_t num_elements;
  };
  // A fact that is equal on some of the ranks (group/agreed_calls.py), with extents of the arrays.
  struct Fact {
    uint64_t seed, factor;
    // Array and dimension; none at all: with the call's numbers.
    std::optional<std::vector<std::pair<uint32_t, uint32_t>>> extents;
  };

  BoxFront(FamilyPtr family, std::string operation, std::vector<Array> arrays,
           std::vector<Least> least, std::vector<Fact> facts);

  // Runs a call on `group`; returns its result, or NotImplemented where Python has to look, or None
  // where the ranks' calls do not fit: nothing was sent then but their sum. `numbers`: of the
  // call, or null where they are the arrays' extents. `sizes`: the extents that the arrays have to
  // have, or the elements of those without dimensions; null: any.
  nb::object run(nb::handle group, nb::handle arrays, const std::vector<int64_t>* numbers,
                 const std::vector<int64_t>* sizes, nb::handle result, bool nonblocking,
                 double timeout_s) const;

 private:
  using Views = std::vector<StridedView>;
  // All that a call needs, before anything of it is sent.
  struct Prepared {
    PlanPtr sum_plan, plan;  // of the sum: null where the ranks need not agree
    uint64_t *sum = nullptr, *table = nullptr;
    nb::object sum_memory, owners;
  };

  // False where Python has to look; it throws where there is no memory.
  bool prepare(Group& group, nb::handle arrays, const std::vector<int64_t>* numbers,
               const std::vector<int64_t>* sizes, Prepared& call) const;
  bool read(nb::handle arrays, Views& views) const;
  bool suits(const Views& views, const std::vector<int64_t>* sizes) const;
  uint64_t sum_of_facts(const Views& views, const std::vector<int64_t>& numbers) const;

  FamilyPtr family_;
  nb::object operation_;
  std::vector<Array> arrays_;
  std::vector<Least> least_;
  std::vector<Fact> facts_;
};

// A number that stands for a fact with these numbers; `seed` is that of the fact without them.
uint64_t fact_number(uint64_t seed, const int64_t* numbers, size_t num);

}  // namespace commrt
