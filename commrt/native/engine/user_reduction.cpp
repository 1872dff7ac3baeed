// SPDX-License-Identifier: Apache-2.0
// Calls the functions of users' reductions.
#include "engine/user_reduction.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/relay.hpp"
#include "engine/relay_carrier.hpp"

namespace nb = nanobind;

namespace commrt {

namespace {

using Array = nb::ndarray<nb::numpy, unsigned char, nb::ndim<1>>;
using Bytes = nb::ndarray<const unsigned char, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Aside {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

Aside& aside() {
  static Aside* const kept = new Aside;  // plans may outlive static objects
  return *kept;
}

Array array_of(const std::shared_ptr<unsigned char[]>& memory, size_t nbytes) {
  auto* owner = new std::shared_ptr<unsigned char[]>(memory);
  nb::capsule capsule(owner, [](void* p) noexcept {
    delete static_cast<std::shared_ptr<unsigned char[]>*>(p);
  });
  return Array(memory.get(), {nbytes}, capsule);
}

// Calls Python with the inputs; the value replaces the first of them. Returns what went wrong,
// an empty string where nothing did.
std::string call(const UserReduction& user, UserValue& value) {
  nb::list arrays;
  for (const auto& input : value.inputs) {
    arrays.append(nb::cast(array_of(input, value.nbytes)));
  }
  nb::object result = nb::handle(user.owner.get())(arrays);
  if (nb::isinstance<nb::str>(result)) return nb::cast<std::string>(result);
  const Bytes bytes = nb::cast<Bytes>(result);
  if (bytes.size() != value.nbytes) return "its result has another length";
  // The function may have kept the array of the first input.
  std::shared_ptr<unsigned char[]> own(new unsigned char[value.nbytes + 1]);
  std::memcpy(own.get(), bytes.data(), value.nbytes);
  value.inputs[0] = std::move(own);
  return {};
}

}  // namespace

void combine_by(UserFn fn, size_t itemsize, void* dst, void* dst2, const void* const* srcs,
                int nsrc, size_t n) {
  // Pieces that stay in the first cache.
  constexpr size_t kPieceBytes = 8192;
  const size_t most = std::max<size_t>(1, kPieceBytes / itemsize);
  thread_local std::vector<std::max_align_t> scratch;
  const size_t room = (most * itemsize / sizeof(std::max_align_t) + 1);
  if (scratch.size() < 2 * room) scratch.resize(2 * room);
  auto* total = reinterpret_cast<unsigned char*>(scratch.data());
  auto* next = reinterpret_cast<unsigned char*>(scratch.data() + room);
  for (size_t at = 0; at < n; at += most) {
    const size_t count = std::min(most, n - at);
    const size_t nbytes = count * itemsize, offset = at * itemsize;
    auto source = [&](int k) { return static_cast<const unsigned char*>(srcs[k]) + offset; };
    std::memcpy(total, source(0), nbytes);
    for (int k = 1; k < nsrc; ++k) {
      std::memcpy(next, source(k), nbytes);
      fn(total, next, count);
      std::swap(total, next);
    }
    std::memcpy(static_cast<unsigned char*>(dst) + offset, total, nbytes);
    if (dst2 != nullptr) {
      std::memcpy(static_cast<unsigned char*>(dst2) + offset, total, nbytes);
    }
  }
}

void UserValue::gather(int num_inputs, size_t nbytes_) {
  nbytes = nbytes_;
  inputs.clear();
  for (int i = 0; i < num_inputs; ++i) {
    inputs.emplace_back(new unsigned char[nbytes + 1]);
  }
}

bool wants_gil(const Engine& engine) { return engine.wants_python() || Relay::is_due(); }

bool run_wanted(Engine& engine) {
  if (Relay::is_due()) RelayCarrier::give_everything();
  while (engine.wants_python()) {
    std::shared_ptr<Op> op;
    {
      std::lock_guard<std::mutex> lock(engine.mutex);
      op = engine.take_wanted_locked();
    }
    if (op == nullptr) return true;
    // Nobody else touches the value while it is Running, whatever becomes of the operation.
    std::string wrong;
    bool interrupted = false;
    try {
      wrong = call(op->plan->user, *op->user_value);
    } catch (nb::python_error& error) {
      interrupted = !error.matches(PyExc_Exception);
      wrong = interrupted ? "it was interrupted" : error.what();
      if (interrupted) error.restore();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    {
      std::lock_guard<std::mutex> lock(engine.mutex);
      op->user_value->state = UserValue::State::Done;
      if (!wrong.empty() && !op->is_over()) op->fail_by_user(wrong);
    }
    engine.ring();
    if (interrupted) return false;
  }
  return true;
}

std::shared_ptr<PyObject> own_object(PyObject* object) {
  drop_objects();
  Py_INCREF(object);
  return std::shared_ptr<PyObject>(object, [](PyObject* last) {
    std::lock_guard<std::mutex> lock(aside().mutex);
    aside().objects.push_back(last);
  });
}

void drop_objects() {
  std::vector<PyObject*> dropped;
  {
    std::lock_guard<std::mutex> lock(aside().mutex);
    dropped.swap(aside().objects);
  }
  for (PyObject* object : dropped) Py_DECREF(object);
}

}  // namespace commrt
