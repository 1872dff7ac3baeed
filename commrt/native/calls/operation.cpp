// SPDX-License-Identifier: Apache-2.0
// The public methods: one callable per row of commrt/vocabulary/operations.py, cached plans, no detours.
//
// An Operation is a method descriptor with a vectorcall: `comm.allreduce(x)` reaches it without a
// bound method. It hands calls that it does not recognise at a glance (an array of another
// library, an unknown plan, a wrong argument) to `Communicator._call`. That method either runs the
// call or raises the precise error. An Operation made with `only_cached` returns NotImplemented
// there.
#include "arrays/tensor_view.hpp"
#include "calls/call_check.hpp"
#include "calls/front.hpp"
#include "calls/fusion.hpp"
#include "calls/group_methods.hpp"
#include "calls/device_call_cache.hpp"
#include "calls/method_descriptor.hpp"
#include "kernels/finite.hpp"

#include <algorithm>
#include <new>
#include <unordered_map>

namespace commrt {

namespace {

// The other ranks learn of the error that is set: the call has not begun.
void refuse_call(PyObject* group, PyObject* name) {
  nb::python_error error;
  nb::object told = nb::borrow(error.value());
  try {
    nb::handle(group).attr(group_methods::kRefuseCall)(nb::handle(name), told);
  } catch (nb::python_error& another) {
    another.discard_as_unraisable("refuse_call");
  }
  error.restore();
}

struct Operation {
  MethodDescriptor head;
  int coll;
  bool takes_x, has_root, reduces, in_place;
  bool scatters;   // only the root need have an x
  bool fuses;      // small calls go into a bucket
  int num_counts;  // arguments with a number per rank
  bool only_cached;  // hands nothing over
};

struct Words {  // interned once: keyword names are compared by address
  PyObject *out, *op, *factor, *root, *nonblocking, *stream, *timeout_s, *name, *call;
  PyObject *counts, *send_counts, *recv_counts, *algorithm;
  PyObject* reductions[kNumRedOps];
};
Words words;

const char* const kReductions[kNumRedOps] = {"sum",  "prod", "min",  "max", "avg", "land",
                                     "lor",  "lxor", "band", "bor", "bxor", "premul_sum"};

// Other names of reductions, and objects of other libraries that stand for one, by identity. Python
// adds each when it is first seen (vocabulary/reduction_names.py). They are kept for ever.
constexpr size_t kMostOtherNames = 256;
std::unordered_map<PyObject*, int>& other_names() {
  static auto* const made = new std::unordered_map<PyObject*, int>;
  return *made;
}

// A rank of so many; -1 for what is none.
inline long read_root(PyObject* value, int64_t size) {
  if (!PyLong_CheckExact(value)) return -1;
  const long root = PyLong_AsLong(value);
  if (root == -1 && PyErr_Occurred()) PyErr_Clear();
  return root >= 0 && root < size ? root : -1;
}

int reduction_code(PyObject* name) {
  for (int i = 0; i < kNumRedOps; ++i) {
    if (name == words.reductions[i]) return i;
  }
  const auto known = other_names().find(name);
  if (known != other_names().end()) return known->second;
  if (!PyUnicode_CheckExact(name)) return -1;
  for (int i = 0; i < kNumRedOps; ++i) {
    if (PyUnicode_Compare(name, words.reductions[i]) == 0) return i;
  }
  return -1;
}

// Arguments behind the array by position: a reduction and a root, either first; -1: there is none.
struct Behind {
  int reduction = -1;
  long root = -1;
  bool is_known = true;  // at a glance
};

Behind read_behind_array(const Operation& op, PyObject* const* values, Py_ssize_t num,
                         int64_t size) {
  Behind found;
  for (Py_ssize_t i = 0; i < num && found.is_known; ++i) {
    const bool is_root = PyLong_CheckExact(values[i]);
    if (is_root ? !op.has_root || found.root >= 0 : !op.reduces || found.reduction >= 0) {
      found.is_known = false;
    } else if (is_root) {
      found.root = read_root(values[i], size);
      found.is_known = found.root >= 0;
    } else {
      found.reduction = reduction_code(values[i]);
      found.is_known = found.reduction >= 0;
    }
  }
  return found;
}

// Without a group it is the business of the object that stands in its place.
PyObject* hand_over(Operation* self, PyObject* held, PyObject* const* args, Py_ssize_t nargs,
                    PyObject* kwnames) {
  if (self->only_cached) Py_RETURN_NOTIMPLEMENTED;
  if (nargs < 1) {
    PyErr_Format(PyExc_TypeError, "%U() needs a communicator: call it as comm.%U(...)",
                 self->head.name, self->head.name);
    return nullptr;
  }
  PyObject* method = PyObject_GetAttr(held != nullptr ? held : args[0], words.call);
  if (method == nullptr) return nullptr;
  PyObject* positional = PyTuple_New(nargs - 1);
  PyObject* keywords = PyDict_New();
  PyObject* result = nullptr;
  if (positional != nullptr && keywords != nullptr) {
    for (Py_ssize_t i = 1; i < nargs; ++i) {
      Py_INCREF(args[i]);
      PyTuple_SET_ITEM(positional, i - 1, args[i]);
    }
    bool fine = true;
    const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t i = 0; i < nkw && fine; ++i) {
      fine = PyDict_SetItem(keywords, PyTuple_GET_ITEM(kwnames, i), args[nargs + i]) == 0;
    }
    if (fine) {
      result = PyObject_CallFunctionObjArgs(method, self->head.name, positional, keywords, nullptr);
    }
  }
  Py_XDECREF(positional);
  Py_XDECREF(keywords);
  Py_DECREF(method);
  return result;
}

// Reads a number of seconds above 0; false for anything else.
bool read_limit(PyObject* object, double* seconds) {
  if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return false;
  *seconds = PyFloat_AsDouble(object);
  if (PyErr_Occurred()) PyErr_Clear();  // a number that is too large is -1
  return *seconds > 0 && *seconds < 1e9;  // Python takes the rest, and longer ones for no limit
}

// Reads the numbers of a tuple, a list or an array of numpy; false for anything else.
bool read_counts(PyObject* object, Py_ssize_t size, int64_t* counts) {
  if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    if (PySequence_Fast_GET_SIZE(object) != size) return false;
    PyObject** const items = PySequence_Fast_ITEMS(object);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!PyLong_CheckExact(items[i])) return false;
      counts[i] = PyLong_AsLongLong(items[i]);
      if (counts[i] < 0) {  // also where it does not fit
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }
  View view;
  if (!view_of_numpy(object, view) || view.dtype != DType::I64 || view.count != size) return false;
  std::copy_n(static_cast<const int64_t*>(view.data), size, counts);
  return true;
}

// The plan of a call with counts, made if they are new. The very tuples of the call before need not
// be read again. `given_elems`: of its x, or below 0 where it has none.
const PlanPtr* find_counted(Group& group, const PlanKey& key, PyObject* const* given, int num,
                            int64_t given_elems) {
  if (const PlanPtr* found = group.plans.find_again(key, given, num)) return found;
  VectorKey& asked = group.asked;
  const auto size = static_cast<Py_ssize_t>(group.comm->size);
  asked.plain = key;
  asked.counts.resize(static_cast<size_t>(num * size));
  for (int i = 0; i < num; ++i) {
    if (given[i] == nullptr || !read_counts(given[i], size, &asked.counts[i * size])) return nullptr;
  }
  if (const PlanPtr* found = group.plans.find(asked, given, num)) return found;
  return group.plans.make(asked, given, num, given_elems, *group.comm);
}

bool overlaps(const View& a, const View& b) {
  const auto* a0 = static_cast<const unsigned char*>(a.data);
  const auto* b0 = static_cast<const unsigned char*>(b.data);
  const auto* a1 = a0 + static_cast<size_t>(a.count) * item_size(a.dtype);
  const auto* b1 = b0 + static_cast<size_t>(b.count) * item_size(b.dtype);
  return a0 < b1 && b0 < a1;
}

PyObject* call_operation(PyObject* callable, PyObject* const* args, size_t nargsf,
                         PyObject* kwnames) {
  auto* self = reinterpret_cast<Operation*>(callable);
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  const Py_ssize_t expected = self->takes_x ? 2 : 1;
  PyObject* const held = nargs > 0 ? group_of(args[0]) : nullptr;
  auto slow = [&] { return hand_over(self, held, args, nargs, kwnames); };
  if (nargs < expected || held == nullptr) return slow();
  Group& group = *nb::inst_ptr<Group>(nb::handle(held));
  if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
      group.comm->refusals.has_untold() ||
      Engine::forked.load(std::memory_order_relaxed)) return slow();

  PyObject* out_object = nullptr;
  PyObject* counts_object[2] = {nullptr, nullptr};
  int reduction = 0;
  PyObject* factor = nullptr;
  long root = 0;
  bool nonblocking = false;
  double timeout_s = group.timeout_s;
  bool said_reduction = false, said_root = false;
  if (nargs > expected) {
    const Behind behind =
        read_behind_array(*self, args + expected, nargs - expected, group.comm->size);
    if (!behind.is_known) return slow();
    said_reduction = behind.reduction >= 0;
    said_root = behind.root >= 0;
    if (said_reduction) reduction = behind.reduction;
    if (said_root) root = behind.root;
  }
  PyObject* stream = nullptr;  // which only calls on devices may have
  PyObject* name = nullptr;  // which check mode alone compares
  PyObject* algorithm = nullptr;
  const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; ++i) {
    PyObject* key = PyTuple_GET_ITEM(kwnames, i);
    PyObject* value = args[nargs + i];
    if (key == words.out && self->takes_x) {
      if (value != Py_None) out_object = value;
    } else if (key == words.op && self->reduces) {
      reduction = reduction_code(value);
      if (reduction < 0 || said_reduction) return slow();
    } else if (key == words.factor && self->reduces) {
      if (!PyFloat_CheckExact(value)) return slow();
      factor = value;
    } else if (key == words.root && self->has_root) {
      root = read_root(value, group.comm->size);
      if (root < 0 || said_root) return slow();
    } else if (self->num_counts == 1 && key == words.counts) {
      counts_object[0] = value;
    } else if (self->num_counts == 2 && key == words.send_counts) {
      counts_object[0] = value;
    } else if (self->num_counts == 2 && key == words.recv_counts) {
      counts_object[1] = value;
    } else if (key == words.nonblocking) {
      if (!PyBool_Check(value)) return slow();
      nonblocking = value == Py_True;
    } else if (key == words.stream && self->takes_x) {
      if (value != Py_None) stream = value;
    } else if (key == words.timeout_s) {
      if (value != Py_None && !read_limit(value, &timeout_s)) return slow();
    } else if (key == words.algorithm) {
      if (value == Py_None) continue;
      if (!PyUnicode_CheckExact(value) || group.check != nullptr) return slow();
      algorithm = value;
    } else if (key == words.name) {
      if (value == Py_None) continue;
      if (!PyUnicode_CheckExact(value)) return slow();
      name = value;
    } else {
      return slow();
    }
  }

  // An array that is neither numpy's nor torch's, or not a plain one.
  auto elsewhere = [&]() -> PyObject* {
    if (group.device_call_cache->empty() || self->num_counts != 0 || factor != nullptr ||
        algorithm != nullptr || group.check != nullptr || group.nan_check) {
      return slow();
    }
    // It may go into a bucket (fusion/device_buckets.py).
    if (group.fusion != nullptr && nonblocking && self->fuses) return slow();
    const AskedCall asked{self->coll, reduction, static_cast<int>(root), args[1], out_object,
                          self->head.name, stream, timeout_s, nonblocking};
    const auto next_number = [&group] {
      const std::lock_guard<std::mutex> lock(group.engine->mutex);
      return group.comm->next_seq;
    };
    const uint64_t number = next_number();
    PyObject* const found = run_cached(held, asked);
    if (found != nullptr) return found;
    if (!PyErr_Occurred()) return slow();
    if (next_number() == number) refuse_call(held, self->head.name);
    return nullptr;
  };
  if (stream != nullptr) return elsewhere();
  View x, out;
  int64_t count = -1;  // of x; none where only others have one
  int64_t asked = -1;  // the plan's length, as remembered
  const bool others_have_x = self->num_counts != 0 || (self->scatters && root != group.comm->rank);
  if (self->takes_x && others_have_x && args[1] == Py_None) {
    if (out_object == nullptr || !view_on_host(out_object, out)) return slow();
    x.dtype = out.dtype;
    if (self->num_counts == 0) asked = out.count * group.comm->size;
  } else if (self->takes_x) {
    if (!view_on_host(args[1], x)) return elsewhere();
    count = asked = x.count;
    if (out_object == nullptr) {
      out = x;
    } else if (!view_on_host(out_object, out) || out.dtype != x.dtype) {
      return slow();
    }
  }
  if (group.fusion != nullptr && nonblocking && self->fuses) {
    if (algorithm != nullptr) return slow();
    const FusedCall call{x.dtype, static_cast<RedOp>(reduction), x.count, x.data, out.data,
                         out_object != nullptr ? args[1] : nullptr, nullptr,
                         out_object != nullptr ? out_object : args[1], timeout_s};
    if (group.fusion->takes(call.nbytes()) && factor == nullptr) {
      if (group.nan_check && first_not_finite(x.dtype, x.data, x.count) >= 0) return slow();
      if (group.check != nullptr || !group.fusion->knows(x.dtype, reduction) || out.count != x.count || !out.writable ||
          (out.data != x.data && overlaps(x, out))) {
        return slow();
      }
      try {
        return group.fusion->add(nb::handle(held), call);
      } catch (nb::python_error& e) {
        e.restore();
        return nullptr;
      } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
      }
    }
  }
  PlanKey key{self->takes_x ? asked : x.count,
              PlanKey::pack(self->coll, x.dtype, reduction, x.device),
              static_cast<int32_t>(root)};
  if (algorithm != nullptr) {
    const PlanKey* const family = group.named.find(key, algorithm);
    if (family == nullptr) return slow();
    key.what = family->what;
    key.root = family->root;
  }
  const PlanPtr* found = nullptr;
  try {
    if (self->num_counts == 0) {
      found = group.plans.find(key);
      if (found == nullptr) found = group.plans.make(key, *group.comm);
    } else {
      found = find_counted(group, key, counts_object, self->num_counts, count);
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (found == nullptr) return slow();
  const PlanPtr plan = *found;
  const bool has_output = plan->out_elems != 0 || plan->returns_out;
  if (self->takes_x && out_object == nullptr && !self->in_place && has_output) return slow();
  if ((factor != nullptr) != (plan->redop == RedOp::PremulSum)) return slow();
  if (factor != nullptr &&
      (x.dtype < DType::F16 || plan->factor.real != PyFloat_AS_DOUBLE(factor))) return slow();
  if (self->takes_x) {
    if (plan->in_elems != 0 && plan->in_elems != x.count) return slow();
    if (has_output && plan->out_elems == 0 && out_object != nullptr && out.count != 0) {
      return slow();
    }
    if (plan->out_elems != 0) {
      if (out.count != plan->out_elems || !out.writable) return slow();
      const bool same = out.data == x.data;
      if ((!same && overlaps(x, out)) || (same && !self->in_place && x.count != 0 &&
                                        !(self->num_counts == 2 && group.plans.swaps()))) {
        return slow();
      }
    }
  }
  const bool sends = plan->in_elems != 0;
  if (group.nan_check && sends && first_not_finite(x.dtype, x.data, x.count) >= 0) return slow();
  if (group.check != nullptr) {
    const int64_t* const counts = self->num_counts != 0 ? group.plans.last_counts().data() : nullptr;
    try {
      if (!group.check->lets_run({held, self->head.name, name, key, counts, self->num_counts}, timeout_s)) {
        return slow();
      }
    } catch (nb::python_error& e) {
      e.restore();
      return nullptr;
    }
  }
  PyObject* result = out_object != nullptr ? out_object : self->takes_x ? args[1] : Py_None;
  if (!has_output) result = Py_None;
  try {
    nb::object value = run_plan(nb::handle(held), plan, x.data, out.data,
                                count >= 0 ? nb::handle(args[1]) : nb::handle(),
                                nb::handle(out_object), nb::handle(result),
                                nb::handle(self->head.name), nonblocking, timeout_s);
    return value.release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return nullptr;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

PyTypeObject* operation_type = nullptr;

}  // namespace

void bind_operation(nb::module_& m) {
  words.out = PyUnicode_InternFromString("out");
  words.op = PyUnicode_InternFromString("op");
  words.factor = PyUnicode_InternFromString("factor");
  words.root = PyUnicode_InternFromString("root");
  words.stream = PyUnicode_InternFromString("stream");
  words.timeout_s = PyUnicode_InternFromString("timeout_s");
  words.name = PyUnicode_InternFromString("name");
  words.nonblocking = PyUnicode_InternFromString("nonblocking");
  words.counts = PyUnicode_InternFromString("counts");
  words.send_counts = PyUnicode_InternFromString("send_counts");
  words.recv_counts = PyUnicode_InternFromString("recv_counts");
  words.algorithm = PyUnicode_InternFromString("algorithm");
  words.call = PyUnicode_InternFromString(group_methods::kCall);
  for (int i = 0; i < kNumRedOps; ++i) words.reductions[i] = PyUnicode_InternFromString(kReductions[i]);

  operation_type = make_descriptor_type("commrt._native.Operation", sizeof(Operation));
  if (operation_type == nullptr) throw nb::python_error();
  m.attr("Operation") = nb::borrow(reinterpret_cast<PyObject*>(operation_type));

  m.def("make_operation",
        [](nb::str name, nb::str doc, int coll, bool takes_x, bool has_root, bool reduces,
           bool in_place, bool scatters, bool fuses, int num_counts, bool only_cached) -> nb::object {
          auto* self = reinterpret_cast<Operation*>(
              make_descriptor(operation_type, call_operation, name.release().ptr(),
                              doc.release().ptr(), nullptr));
          if (self == nullptr) throw nb::python_error();
          self->coll = coll;
          self->takes_x = takes_x;
          self->has_root = has_root;
          self->reduces = reduces;
          self->in_place = in_place;
          self->scatters = scatters;
          self->fuses = fuses;
          self->num_counts = num_counts;
          self->only_cached = only_cached;
          return nb::steal(reinterpret_cast<PyObject*>(self));
        },
        nb::arg("name"), nb::arg("doc"), nb::arg("coll"), nb::arg("takes_x"),
        nb::arg("has_root"), nb::arg("reduces"), nb::arg("in_place"),
        nb::arg("scatters"), nb::arg("fuses"), nb::arg("num_counts"), nb::arg("only_cached") = false,
        "Make the method descriptor of one operation; with `only_cached` it returns NotImplemented "
        "where it would leave a call to Python.");
  m.def("remember_reduction",
        [](nb::handle name, int code) {
          if (other_names().size() >= kMostOtherNames) return;
          if (other_names().emplace(name.ptr(), code).second) name.inc_ref();
        },
        nb::arg("name"), nb::arg("code"),
        "Let the operations take this very object for the reduction of that code.");
}

}  // namespace commrt
