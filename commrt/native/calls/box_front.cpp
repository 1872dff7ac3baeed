// SPDX-License-Identifier: Apache-2.0
// Checks of numpy's arrays, the ranks' agreement, and the run of calls that move boxes.
#include "calls/box_front.hpp"

#include <exception>
#include <new>
#include <stdexcept>

#include "calls/fusion.hpp"
#include "calls/group.hpp"
#include "engine/call_trail.hpp"
#include "engine/collective_codes.hpp"

namespace commrt {

namespace {

nb::object python_looks() { return nb::borrow(Py_NotImplemented); }

int64_t num_elements(const StridedView& view) {
  int64_t product = 1;
  for (int dim = 0; dim < view.ndim; ++dim) product *= view.shape[dim];
  return product;
}

// The first byte of an array, and the one behind its last.
std::pair<const char*, const char*> reach_of(const StridedView& view) {
  const char* low = static_cast<const char*>(view.data);
  const char* high = low + item_size(view.dtype);
  if (num_elements(view) == 0) return {low, low};
  for (int dim = 0; dim < view.ndim; ++dim) {
    const int64_t far = (view.shape[dim] - 1) * view.strides[dim];
    (far < 0 ? low : high) += far;
  }
  return {low, high};
}

bool are_apart(const std::vector<StridedView>& views) {
  for (size_t i = 1; i < views.size(); ++i) {
    const auto one = reach_of(views[i]);
    for (size_t k = 0; k < i; ++k) {
      const auto other = reach_of(views[k]);
      if (one.first < other.second && other.first < one.second) return false;
    }
  }
  return true;
}

// Memory of a call that lives as long as the call does.
nb::object words(size_t num, uint64_t*& first) {
  auto made = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(8 * num)));
  if (!made.is_valid()) {
    PyErr_Clear();
    throw std::bad_alloc();
  }
  first = reinterpret_cast<uint64_t*>(PyByteArray_AS_STRING(made.ptr()));
  return made;
}

}  // namespace

uint64_t fact_number(uint64_t seed, const int64_t* numbers, size_t num) {
  for (size_t i = 0; i < num; ++i) {
    seed = CallTrail::mixed(seed ^ CallTrail::mixed(static_cast<uint64_t>(numbers[i])));
  }
  return seed;
}

BoxFront::BoxFront(FamilyPtr family, std::string operation, std::vector<Array> arrays,
                   std::vector<Least> least, std::vector<Fact> facts)
    : family_(std::move(family)),
      operation_(nb::str(operation.c_str())),
      arrays_(std::move(arrays)),
      least_(std::move(least)),
      facts_(std::move(facts)) {
  const auto has = [&](size_t array, size_t dim) {
    return array < arrays_.size() && static_cast<int>(dim) < arrays_[array].ndim;
  };
  bool fits = family_ != nullptr && family_->boxes() != nullptr &&
              family_->boxes()->types.size() == arrays_.size();
  for (const Least& one : least_) fits = fits && has(one.array, one.dim);
  for (const Fact& fact : facts_) {
    if (!fact.extents) continue;
    for (const auto& [array, dim] : *fact.extents) fits = fits && has(array, dim);
  }
  if (!fits) throw std::invalid_argument("a front has the arrays of its family, and no other ones");
}

bool BoxFront::read(nb::handle arrays, Views& views) const {
  views.resize(arrays_.size());
  for (size_t i = 0; i < views.size(); ++i) {
    PyObject* const one = PyTuple_GET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(i));
    if (!strided_view_of_numpy(one, views[i])) return false;
  }
  return true;
}

bool BoxFront::suits(const Views& views, const std::vector<int64_t>* sizes) const {
  size_t at = 0;  // in `sizes`
  for (size_t i = 0; i < views.size(); ++i) {
    const StridedView& view = views[i];
    const Array& array = arrays_[i];
    if (view.dtype != array.dtype) return false;
    if (array.is_written && !(view.writable && view.is_distinct)) return false;
    if (array.ndim < 0) {
      if (!view.is_contiguous) return false;
      if (sizes != nullptr && num_elements(view) != sizes->at(at++)) return false;
      continue;
    }
    if (view.ndim != array.ndim) return false;
    for (int dim = 0; sizes != nullptr && dim < view.ndim; ++dim) {
      if (view.shape[dim] != sizes->at(at++)) return false;
    }
  }
  for (const Least& one : least_) {
    if (views[one.array].shape[one.dim] < one.num_elements) return false;
  }
  return are_apart(views);
}

uint64_t BoxFront::sum_of_facts(const Views& views, const std::vector<int64_t>& numbers) const {
  uint64_t sum = 0;
  std::vector<int64_t> extents;
  for (const Fact& fact : facts_) {
    extents.clear();
    if (fact.extents) {
      for (const auto& [array, dim] : *fact.extents) extents.push_back(views[array].shape[dim]);
    }
    const std::vector<int64_t>& its = fact.extents ? extents : numbers;
    sum += fact.factor * fact_number(fact.seed, its.data(), its.size());
  }
  return sum;
}

nb::object BoxFront::run(nb::handle group_object, nb::handle arrays,
                         const std::vector<int64_t>* numbers, const std::vector<int64_t>* sizes,
                         nb::handle result, bool nonblocking, double timeout_s) const {
  Group& group = *nb::inst_ptr<Group>(group_object);
  if (group.slow || group.nan_check || group.check != nullptr || group.fusion != nullptr ||
      !group.plans.has(*family_) || !PyTuple_CheckExact(arrays.ptr()) ||
      PyTuple_GET_SIZE(arrays.ptr()) != static_cast<Py_ssize_t>(arrays_.size())) {
    return python_looks();
  }
  Prepared call;
  try {
    if (!prepare(group, arrays, numbers, sizes, call)) return python_looks();
  } catch (const std::exception&) {
    return python_looks();  // it raises the same, in its place in the order of calls
  }
  if (call.sum_plan != nullptr) {
    run_plan(group_object, call.sum_plan, call.sum, call.sum, call.sum_memory, call.sum_memory,
             nb::none(), operation_, false, timeout_s);
    if (*call.sum != 0) return nb::none();
  }
  return run_plan(group_object, call.plan, call.table, nullptr, call.owners, nb::handle(), result,
                  operation_, nonblocking, timeout_s);
}

bool BoxFront::prepare(Group& group, nb::handle arrays, const std::vector<int64_t>* numbers,
                       const std::vector<int64_t>* sizes, Prepared& call) const {
  thread_local Views views;
  if (!read(arrays, views) || !suits(views, sizes)) return false;
  std::vector<int64_t> own_numbers, strides;
  for (size_t i = 0; i < views.size(); ++i) {
    const StridedView& view = views[i];
    if (numbers == nullptr) own_numbers.insert(own_numbers.end(), view.shape, view.shape + view.ndim);
    if (arrays_[i].ndim < 0) {
      strides.push_back(static_cast<int64_t>(item_size(view.dtype)));
    } else {
      strides.insert(strides.end(), view.strides, view.strides + view.ndim);
    }
  }
  if (numbers != nullptr) own_numbers = *numbers;
  if (!facts_.empty()) {
    const PlanKey key{1, PlanKey::pack(kAllreduce, DType::U64, static_cast<int>(RedOp::Sum), kHost),
                      0};
    const PlanPtr* const found = group.plans.find(key);
    if (found == nullptr) return false;
    call.sum_plan = *found;
    call.sum_memory = words(1, call.sum);
    *call.sum = sum_of_facts(views, own_numbers);
  }
  const nb::object memory = words(views.size(), call.table);
  for (size_t i = 0; i < views.size(); ++i) {
    call.table[i] = reinterpret_cast<uint64_t>(views[i].data);
  }
  call.owners = nb::make_tuple(memory, nb::borrow(arrays));
  call.plan = group.plans.box_plan(*family_, std::move(own_numbers), strides, *group.comm);
  return true;
}

}  // namespace commrt
