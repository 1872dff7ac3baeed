// SPDX-License-Identifier: Apache-2.0
// Records calls (recorded_method.hpp).
#include "calls/recorded_method.hpp"

#include <utility>

#include "arrays/device_view.hpp"
#include "arrays/tensor_view.hpp"
#include "calls/group.hpp"

namespace commrt {

namespace {

// Programs with endless different lengths would otherwise keep them for ever.
constexpr size_t kMostKinds = 4096;
constexpr int kDeepest = 2;  // lists of lists of tensors
constexpr uint64_t kNothing = ~uint64_t{0}, kNumber = 1, kObject = 2, kList = 3,
                   kOnDevice = 1 << 8;

struct Names {  // interned: keyword names are compared by address
  PyObject* out = PyUnicode_InternFromString("out");
  PyObject* nonblocking = PyUnicode_InternFromString("nonblocking");
  PyObject* timeout_s = PyUnicode_InternFromString("timeout_s");
  PyObject* stream = PyUnicode_InternFromString("stream");
  PyObject* protocol = PyUnicode_InternFromString("__cuda_stream__");
  PyObject* request = PyUnicode_InternFromString("_request");
  PyObject* batch = PyUnicode_InternFromString("batch");
  PyObject* sends = PyUnicode_InternFromString("sends");
  PyObject* recvs = PyUnicode_InternFromString("recvs");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* root = PyUnicode_InternFromString("rootRank");
};
const Names& names() {
  static const Names* const made = new Names;  // for ever
  return *made;
}

bool is_list(PyObject* object) { return PyList_CheckExact(object) || PyTuple_CheckExact(object); }

// The facts that a log has of an array, or of several.
struct Arrays {
  uint64_t type = kNothing, nbytes = 0;
  Stream stream = 0;  // that orders them, where they are on a device
  bool on_device() const { return type != kNothing && (type & kOnDevice) != 0; }
};

// False where that cannot be said, of which the call will speak.
bool read_stream_of(PyObject* tensor, Stream& stream) {
  try {
    stream = current_stream_of(tensor, nb::none());
    return true;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

// Reads an array of any library, on the host or on a device.
bool read_array(PyObject* object, Arrays& array) {
  Extent extent;
  if (View view; view_of_numpy(object, view)) {
    extent = {view.count, view.dtype, true};
  } else if (extent_of_tensor(object, extent)) {
    if (!extent.on_host && !read_stream_of(object, array.stream)) return false;
  } else {
    DeviceView on_device;
    if (!view_on_device(object, on_device)) return false;
    extent = {on_device.count, on_device.dtype, false};
    array.stream = on_device.stream;
  }
  array.type = static_cast<uint64_t>(extent.dtype) | (extent.on_host ? 0 : kOnDevice);
  array.nbytes = static_cast<uint64_t>(extent.count) * item_size(extent.dtype);
  return true;
}

// The same of arrays in lists: type and stream of the first, and all bytes.
bool read_arrays(PyObject* object, Arrays& arrays, int depth = 0) {
  if (!is_list(object)) {
    Arrays own;
    if (!read_array(object, own)) return false;
    if (arrays.type == kNothing) arrays = {own.type, arrays.nbytes, own.stream};
    arrays.nbytes += own.nbytes;
    return true;
  }
  if (depth == kDeepest) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    if (!read_arrays(PySequence_Fast_GET_ITEM(object, i), arrays, depth + 1)) return false;
  }
  return true;
}

bool add_arrays(PyObject* object, CallWords& key) {
  Arrays arrays;
  if (object != Py_None && !read_arrays(object, arrays)) return false;
  return key.add(arrays.type) && key.add(arrays.nbytes) &&
         (!arrays.on_device() || key.add(static_cast<uint64_t>(arrays.stream)));
}

bool add_int(PyObject* object, CallWords& key) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 && key.add(kNumber) && key.add(static_cast<uint64_t>(number));
}

bool add_root(PyObject* object, CallWords& key) {
  if (PyLong_CheckExact(object)) return add_int(object, key);
  const nb::object root = nb::steal(PyObject_GetAttr(object, names().root));
  if (root.is_valid()) return add_int(root.ptr(), key);
  PyErr_Clear();
  return false;
}

// A word that nobody can change: only what is the same object is the same then.
bool is_lasting(PyObject* object, int depth = 0) {
  if (PyUnicode_CheckExact(object) || PyBool_Check(object) || object == Py_None ||
      PyFloat_CheckExact(object) || PyLong_CheckExact(object)) {
    return true;
  }
  if (!PyTuple_CheckExact(object) || depth == kDeepest) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    if (!is_lasting(PyTuple_GET_ITEM(object, i), depth + 1)) return false;
  }
  return true;
}

bool add_word(PyObject* object, CallWords& key) {
  if (PyLong_CheckExact(object)) return add_int(object, key);
  if (PyList_CheckExact(object)) {  // as counts are: what is in it now
    const Py_ssize_t num = PyList_GET_SIZE(object);
    bool fits = key.add(kList) && key.add(static_cast<uint64_t>(num));
    for (Py_ssize_t i = 0; i < num && fits; ++i) fits = add_int(PyList_GET_ITEM(object, i), key);
    return fits;
  }
  return is_lasting(object) && key.add(kObject) && key.add_object(object);
}

// Adds a list of messages. Each has an array, a peer and perhaps a tag.
bool add_messages(PyObject* object, CallWords& key) {
  if (!is_list(object) || !key.add(static_cast<uint64_t>(PySequence_Fast_GET_SIZE(object)))) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    PyObject* const message = PySequence_Fast_ITEMS(object)[i];
    if (!is_list(message)) return false;
    const Py_ssize_t num = PySequence_Fast_GET_SIZE(message);
    if (num == 0 || !key.add(static_cast<uint64_t>(num))) return false;
    if (!add_arrays(PySequence_Fast_GET_ITEM(message, 0), key)) return false;
    for (Py_ssize_t k = 1; k < PySequence_Fast_GET_SIZE(message); ++k) {
      if (!add_int(PySequence_Fast_GET_ITEM(message, k), key)) return false;
    }
  }
  return true;
}

// The stream that a call asks for: a number, or what has CUDA's protocol.
bool add_stream(PyObject* stream, CallWords& key) {
  if (stream == Py_None) return true;
  if (!key.add_object(names().stream)) return false;
  if (PyLong_CheckExact(stream)) return add_int(stream, key);
  const nb::object told = nb::steal(PyObject_CallMethodNoArgs(stream, names().protocol));
  if (!told.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // as Ctrl-C
    PyErr_Clear();
  }
  const bool is_pair = told.is_valid() && PyTuple_CheckExact(told.ptr()) &&
                       PyTuple_GET_SIZE(told.ptr()) == 2;
  return is_pair && add_int(PyTuple_GET_ITEM(told.ptr(), 1), key);
}

// Adds the value of a keyword.
bool add_named(PyObject* name, PyObject* value, CallWords& key) {
  if (!key.add_object(name)) return false;
  if (name == names().out) return add_arrays(value, key);
  if (name == names().sends || name == names().recvs) return add_messages(value, key);
  return add_word(value, key);
}

// Shape and type of an array, of any strides; or of several.
bool add_shapes(PyObject* object, CallWords& key, int depth = 0) {
  if (is_list(object)) {
    const auto num = static_cast<uint64_t>(PySequence_Fast_GET_SIZE(object));
    if (depth == kDeepest || !key.add(num)) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!add_shapes(PySequence_Fast_GET_ITEM(object, i), key, depth + 1)) return false;
    }
    return true;
  }
  const nb::object shape = nb::steal(PyObject_GetAttr(object, names().shape));
  const nb::object dtype = nb::steal(PyObject_GetAttr(object, names().dtype));
  if (!shape.is_valid() || !dtype.is_valid() || !PyTuple_Check(shape.ptr())) {
    PyErr_Clear();
    return false;
  }
  // Types of arrays are kept by their libraries, and by what is remembered of the call.
  if (Py_REFCNT(dtype.ptr()) < 2 || !key.add_object(dtype.ptr())) return false;
  const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
  if (!key.add(static_cast<uint64_t>(ndim))) return false;
  // numpy's arrays of any strides are on the host; of others, those that can be read here.
  if (!is_numpy_array(object)) {
    Arrays array;
    if (!read_array(object, array) || !key.add(array.type)) return false;
    if (array.on_device() && !key.add(static_cast<uint64_t>(array.stream))) return false;
  }
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    if (!add_int(PyTuple_GET_ITEM(shape.ptr(), i), key)) return false;
  }
  return true;
}

bool add_positional(char how, PyObject* object, CallWords& key) {
  switch (how) {
    case 'a': return add_arrays(object, key);
    case 'i': return add_int(object, key);
    case 'r': return add_root(object, key);
    case 's': return add_shapes(object, key);
    case 'w': return add_word(object, key);
    default: return true;
  }
}

// True if the call passes a true `nonblocking`, so that nobody waits in it.
bool is_nonblocking(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const Py_ssize_t num = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < num; ++i) {
    if (PyTuple_GET_ITEM(kwnames, i) != names().nonblocking) continue;
    PyObject* const value = args[nargs + i];
    const int is_true = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    if (is_true < 0) PyErr_Clear();  // the call has taken it all the same
    return is_true != 0;
  }
  return false;
}

bool is_plain_request(nb::handle object) {
  static PyObject* const type = nb::type<Request>().ptr();
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type;
}

nb::object referent(nb::handle reference) {
  if (!PyWeakref_Check(reference.ptr())) return nb::borrow(reference);
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  PyWeakref_GetRef(reference.ptr(), &object);
  return object != nullptr ? nb::steal(object) : nb::none();
#else
  return nb::borrow(PyWeakref_GetObject(reference.ptr()));
#endif
}

// Recorded calls that this thread is in: what is called within one is a part of it.
thread_local int calls_within = 0;

class Within {
 public:
  Within() { ++calls_within; }
  ~Within() { --calls_within; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
};

}  // namespace

size_t RecordedCalls::Hash::operator()(const CallWords& key) const {
  uint64_t h = key.num;
  for (size_t i = 0; i < key.num; ++i) {
    h = (h ^ key.words[i]) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return h;
}

bool RecordedCalls::read(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                         CallWords& key) const {
  if (nargs > static_cast<Py_ssize_t>(reads.size()) || !asks_nothing()) return false;
  key.add(static_cast<uint64_t>(nargs));
  for (Py_ssize_t i = 0; i < nargs; ++i) {
    if (!add_positional(reads[static_cast<size_t>(i)], args[i], key)) return false;
  }
  const Py_ssize_t num = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < num; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(kwnames, i);
    PyObject* const value = args[nargs + i];
    if (name == names().nonblocking || name == names().timeout_s) continue;
    if (!(name == names().stream ? add_stream(value, key) : add_named(name, value, key))) {
      return false;
    }
  }
  return true;
}

bool RecordedCalls::asks_nothing() const {
  if (!asked.is_valid()) return true;
  PyObject* value = nullptr;
  if (PyContextVar_Get(asked.ptr(), nullptr, &value) < 0) PyErr_Clear();
  const bool nothing = value == nullptr || value == Py_None;
  Py_XDECREF(value);
  return nothing;
}

std::shared_ptr<const RecordedCalls::Kinds> RecordedCalls::find(const CallWords& key) {
  if (last_ != nullptr && key == last_key_) return last_;
  const auto found = known_.find(key);
  if (found == known_.end()) return nullptr;
  last_key_ = key;
  last_ = found->second;
  return last_;
}

std::shared_ptr<const RecordedCalls::Kinds> RecordedCalls::looked_at(PyObject* const* args,
                                                                     Py_ssize_t nargs,
                                                                     PyObject* kwnames,
                                                                     const CallWords* key) {
  const nb::object positional = nb::steal(PyTuple_New(nargs));
  if (!positional.is_valid()) throw nb::python_error();
  for (Py_ssize_t i = 0; i < nargs; ++i) {
    PyTuple_SET_ITEM(positional.ptr(), i, Py_NewRef(args[i]));
  }
  nb::dict keywords;
  const Py_ssize_t num = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < num; ++i) {
    keywords[nb::handle(PyTuple_GET_ITEM(kwnames, i))] = nb::handle(args[nargs + i]);
  }
  const nb::object said = look(positional, keywords);
  if (said.is_none()) return nullptr;
  auto kinds = std::make_shared<Kinds>();
  for (nb::handle kind : said) {
    kinds->each.push_back(nb::borrow(kind));
    kinds->counters.push_back(&nb::cast<RecordCounter&>(kind.attr("counter")));
    kinds->on_device = kinds->on_device || nb::cast<bool>(kind.attr("on_device"));
  }
  if (key == nullptr) return kinds;
  for (size_t i = 0; i < key->num_objects; ++i) {
    kinds->kept.push_back(nb::borrow(key->objects[i]));
  }
  if (known_.size() >= kMostKinds) {
    known_.clear();
    last_.reset();
  }
  known_[*key] = kinds;
  return kinds;
}

nb::object RecordedCalls::pass_on(PyObject* const* args, size_t nargsf, PyObject* kwnames) const {
  if (!owner.is_valid()) {
    return nb::steal(PyObject_Vectorcall(function.ptr(), args, nargsf, kwnames));
  }
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  const nb::object self = referent(owner);
  if ((nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET) != 0) {  // the place before may be written to
    PyObject** const with = const_cast<PyObject**>(args) - 1;
    PyObject* const before = std::exchange(with[0], self.ptr());
    nb::object result = nb::steal(
        PyObject_Vectorcall(function.ptr(), with, static_cast<size_t>(nargs) + 1, kwnames));
    with[0] = before;
    return result;
  }
  const Py_ssize_t num = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  std::vector<PyObject*> with{self.ptr()};
  with.insert(with.end(), args, args + nargs + num);
  return nb::steal(PyObject_Vectorcall(function.ptr(), with.data(),
                                       static_cast<size_t>(nargs) + 1, kwnames));
}

nb::object RecordedCalls::call(PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  const nb::object site = calls_within == 0 ? sites->of_running() : nb::object();
  if (!site.is_valid() || sites->is_core(site)) {
    nb::object result = pass_on(args, nargsf, kwnames);
    if (!result.is_valid()) throw nb::python_error();
    return result;
  }
  CallWords key;
  const bool is_read = read(args, nargs, kwnames, key);
  // Held: what a full ring drops may run code, of another thread's, too, that makes this forget.
  std::shared_ptr<const Kinds> kinds = is_read ? find(key) : nullptr;
  if (kinds == nullptr) kinds = looked_at(args, nargs, kwnames, is_read ? &key : nullptr);
  uint64_t first = 0;
  uint32_t num = 0;
  bool on_device = false;
  if (kinds != nullptr) {
    on_device = kinds->on_device;
    const int64_t now = monotonic_ns();
    for (size_t i = 0; i < kinds->each.size(); ++i) {
      const uint64_t number =
          ring->append(kinds->each[i].ptr(), site.ptr(), *kinds->counters[i], now);
      if (num++ == 0) first = number;
    }
  }
  nb::object result;
  {
    const Within call;
    result = pass_on(args, nargsf, kwnames);
  }
  if (result.is_valid()) {
    if (num == 0) return result;
    return ended(std::move(result), is_nonblocking(args, nargs, kwnames), on_device, first, num);
  }
  try {
    throw nb::python_error();
  } catch (nb::python_error& error) {
    if (num != 0) raised(first, num, nb::borrow(error.value()));
    throw;
  }
}

// Notes the end of a call, or lets what the caller gets note it.
nb::object RecordedCalls::ended(nb::object result, bool nonblocking, bool on_device,
                                uint64_t first, uint32_t num) const {
  bool is_over = !nonblocking;
  if (calls.is_valid()) {
    is_over = result.is_none() && calls.attr(nb::handle(names().batch)).is_none();
  }
  if (is_over) {
    ring->end(first, num);
    return result;
  }
  // The host learns no end of work on a device where it only lets a stream wait.
  if (!on_device && !result.is_none()) {
    nb::object request = result;
    if (calls.is_valid()) {
      request = nb::steal(PyObject_GetAttr(result.ptr(), names().request));
      if (!request.is_valid()) throw nb::python_error();
    }
    if (request.is_none()) {  // a Work of what is over
      ring->end(first, num);
      return result;
    }
    if (is_plain_request(request)) {
      nb::inst_ptr<Request>(request)->record_in(ring, first, num);
      return result;
    }
  }
  return watch(result, first, num);
}

}  // namespace commrt
