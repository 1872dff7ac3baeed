// SPDX-License-Identifier: Apache-2.0
// Reads arrays on devices (device_view.hpp).
#include "arrays/device_view.hpp"

#include <nanobind/stl/string.h>

#include <iterator>
#include <string>
#include <unordered_map>

#include "arrays/python_device.hpp"
#include "arrays/view.hpp"
#include "gil.hpp"
#include "python_callbacks.hpp"

namespace commrt {

namespace {

constexpr Stream kLegacy = 1;  // what array interfaces call the stream that is 0 to the driver

PyObject* word(const char* text) { return PyUnicode_InternFromString(text); }

struct Words {
  PyObject* const address = word("_address");
  PyObject* const contiguous = word("c_contiguous");
  PyObject* const cpp = word("_C");
  PyObject* const cuda = word("cuda");
  PyObject* const cuda_stream = word("cuda_stream");
  PyObject* const cupy = word("cupy");
  PyObject* const current_stream = word("current_stream");
  PyObject* const data = word("data");
  PyObject* const data_ptr = word("data_ptr");
  PyObject* const device = word("device");
  PyObject* const dtype = word("dtype");
  PyObject* const flags = word("flags");
  PyObject* const get_current_stream = word("get_current_stream");
  PyObject* const get_device = word("get_device");
  PyObject* const handle = word("handle");
  PyObject* const interface = word("__cuda_array_interface__");
  PyObject* const is_conj = word("is_conj");
  PyObject* const is_contiguous = word("is_contiguous");
  PyObject* const is_cuda = word("is_cuda");
  PyObject* const is_neg = word("is_neg");
  PyObject* const is_sparse = word("is_sparse");
  PyObject* const mask = word("mask");
  PyObject* const module = word("__module__");
  PyObject* const nn = word("nn");
  PyObject* const nbytes = word("nbytes");
  PyObject* const numel = word("numel");
  PyObject* const ordinal = word("ordinal");
  PyObject* const parameter = word("Parameter");
  PyObject* const ptr = word("ptr");
  PyObject* const raw_stream = word("_cuda_getCurrentRawStream");
  PyObject* const readonly = word("readonly");
  PyObject* const shape = word("shape");
  PyObject* const size = word("size");
  PyObject* const storage_offset = word("storage_offset");
  PyObject* const stream = word("stream");
  PyObject* const streams = word("streams");
  PyObject* const strides = word("strides");
  PyObject* const tensor = word("Tensor");
  PyObject* const torch = word("torch");
  PyObject* const typestr = word("typestr");
  PyObject* const untyped_storage = word("untyped_storage");
};

const Words& words() {
  static const Words all;
  return all;
}

// --- reading: what is not as expected is an error, which sends the call to Python ---

struct Unexpected {};

nb::object taken(PyObject* found) {
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

nb::object attribute(PyObject* object, PyObject* name) {
  return taken(PyObject_GetAttr(object, name));
}

nb::object asked(PyObject* object, PyObject* method) {
  return taken(PyObject_CallMethodNoArgs(object, method));
}

bool truth(const nb::object& value) {
  const int found = PyObject_IsTrue(value.ptr());
  if (found < 0) throw nb::python_error();
  return found != 0;
}

std::int64_t number(PyObject* value) {
  if (!PyLong_Check(value)) throw Unexpected();
  const long long found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred()) throw nb::python_error();
  return found;
}

std::uint64_t address_in(PyObject* value) {
  if (!PyLong_Check(value)) throw Unexpected();
  const unsigned long long found = PyLong_AsUnsignedLongLong(value);
  if (found == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw nb::python_error();
  return found;
}

std::int64_t product_of(PyObject* shape) {
  if (!PyTuple_CheckExact(shape)) throw Unexpected();
  std::int64_t all = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
    const std::int64_t length = number(PyTuple_GET_ITEM(shape, i));
    if (length < 0 || __builtin_mul_overflow(all, length, &all)) throw Unexpected();
  }
  return all;
}

DType known_type(int code) {
  if (code < 0) throw Unexpected();
  return static_cast<DType>(code);
}

// --- libraries ---

enum class Library { Own, Torch, Cupy, Others, None };

PyObject* loaded(PyObject* name) {  // borrowed; null where it was not imported
  PyObject* const found = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return found;
}

// Facts about libraries, kept for ever. Types say which library they are of, until another torch
// is there.
struct Libraries {
  struct Known {
    PyTypeObject* type;
    Library library;
  };
  Known types[8] = {};
  unsigned next = 0;  // the one that goes for a new one
  PyObject *torch = nullptr, *tensor = nullptr, *raw_stream = nullptr;
  PyObject* parameter = nullptr;  // null where this torch has none
  std::unordered_map<PyObject*, DType> torch_types;
  PyObject* device_array = nullptr;

  void forget() {
    for (Known& one : types) {
      PyTypeObject* const type = one.type;
      one = {};
      Py_XDECREF(type);
    }
    std::unordered_map<PyObject*, DType> gone;
    gone.swap(torch_types);
    for (const auto& [type, code] : gone) Py_DECREF(type);
    Py_CLEAR(tensor);
    Py_CLEAR(parameter);
    Py_CLEAR(raw_stream);
    Py_CLEAR(torch);
  }

  void look_for_torch() {
    PyObject* const now = loaded(words().torch);
    if (now == torch) return;
    forget();
    if (now == nullptr || now == Py_None) return;
    const nb::object found = nb::getattr(nb::handle(now), words().tensor, nb::none());
    if (!PyType_Check(found.ptr())) return;
    // Compilers of torch's programs call this one: the public function makes a Stream each time.
    const nb::object cpp = nb::getattr(nb::handle(now), words().cpp, nb::none());
    const nb::object raw = nb::getattr(cpp, words().raw_stream, nb::none());
    const nb::object nn = nb::getattr(nb::handle(now), words().nn, nb::none());
    const nb::object kind = nb::getattr(nn, words().parameter, nb::none());
    torch = Py_NewRef(now);
    tensor = Py_NewRef(found.ptr());
    parameter = kind.is_none() ? nullptr : Py_NewRef(kind.ptr());
    raw_stream = raw.is_none() ? nullptr : Py_NewRef(raw.ptr());
  }

  Library of(PyTypeObject* type) {
    look_for_torch();
    for (const Known& one : types) {
      if (one.type == type) return one.library;
    }
    const Library found = find(type);
    Known& place = types[next++ % std::size(types)];
    PyTypeObject* const before = place.type;
    Py_INCREF(type);
    place = {type, found};
    Py_XDECREF(before);
    return found;
  }

 private:
  Library find(PyTypeObject* type) {
    PyObject* const own = callback(Callback::DeviceArray).ptr();
    if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(own))) return Library::Own;
    PyObject* const self = reinterpret_cast<PyObject*>(type);
    if (self == tensor || (parameter != nullptr && self == parameter)) return Library::Torch;
    // Subclasses may have no memory, and say anything.
    if (tensor != nullptr && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(tensor))) {
      return Library::None;
    }
    const nb::object module = attribute(reinterpret_cast<PyObject*>(type), words().module);
    if (!PyUnicode_Check(module.ptr())) return Library::Others;
    std::string name = nb::cast<std::string>(module);
    name = name.substr(0, name.find('.'));
    if (name == "cupy") return Library::Cupy;
    // JAX's arrays never change, and numpy's are on the host.
    if (name == "jax" || name == "jaxlib" || name == "numpy") return Library::None;
    return Library::Others;
  }
};

Libraries& libraries() {
  static Libraries* const all = new Libraries;  // types outlast the end of main()
  return *all;
}

// --- streams and devices, as commrt/devices knows them ---

// This thread's current streams, the latest last; null where there were never any.
nb::object current_streams() {
  PyObject* const current = callback(Callback::CurrentStreams).ptr();
  PyObject* const found = PyObject_GetAttr(current, words().streams);
  if (found != nullptr) return nb::steal(found);
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
  PyErr_Clear();
  return nb::object();
}

Stream current_stream(PyObject* device) {
  const nb::object streams = current_streams();
  if (!streams.is_valid()) return 0;
  for (Py_ssize_t i = PyList_GET_SIZE(streams.ptr()); i > 0; --i) {
    PyObject* const one = PyList_GET_ITEM(streams.ptr(), i - 1);
    if (attribute(one, words().device).ptr() == device) {
      return address_in(attribute(one, words().handle).ptr());
    }
  }
  return 0;
}

// Returns the device object of the GPU with this number; null if that device is not open.
nb::object cuda_device(std::int64_t ordinal) {
  PyObject* const all = callback(Callback::CudaDevices).ptr();
  const nb::object key = taken(PyLong_FromLongLong(ordinal));
  PyObject* const found = PyDict_GetItemWithError(all, key.ptr());
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return nb::borrow(found);
}

// Returns the facts that a device has of an address. Without the GIL: on a simulated one others
// go on meanwhile.
PointerFacts facts_of(PyObject* device, std::uint64_t address) {
  PyDevice* self = nullptr;
  if (!nb::try_cast(nb::handle(device), self)) throw Unexpected();
  PointerFacts facts;
  DeviceStatus status;
  {
    ReleasedGil release;
    status = self->device->api->ptr_attributes(self->device,
                                               reinterpret_cast<const void*>(address), &facts);
  }
  if (status != DeviceStatus::Ok) throw Unexpected();
  return facts;
}

// Does as find_device() in commrt/devices/registry.py.
nb::object device_of(std::uint64_t address) {
  PyObject* const served = callback(Callback::ServedDevices).ptr();
  auto is_there = [address](PyObject* device) {
    const PointerFacts facts = facts_of(device, address);
    if (facts.kind == MemoryKind::Managed) throw Unexpected();
    return facts.kind == MemoryKind::Device;
  };
  // Lists are copied: another thread may change them while this one is without the GIL.
  const nb::object streams = current_streams();
  if (streams.is_valid() && PyList_GET_SIZE(streams.ptr()) != 0) {
    const nb::object now = taken(PyList_AsTuple(streams.ptr()));
    for (Py_ssize_t i = PyTuple_GET_SIZE(now.ptr()); i > 0; --i) {
      nb::object on = attribute(PyTuple_GET_ITEM(now.ptr(), i - 1), words().device);
      if (is_there(on.ptr())) return on;
    }
  }
  if (PyList_GET_SIZE(served) != 0) {
    const nb::object now = taken(PyList_AsTuple(served));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(now.ptr()); ++i) {
      PyObject* const on = PyTuple_GET_ITEM(now.ptr(), i);
      if (is_there(on)) return nb::borrow(on);
    }
  }
  const nb::object first = cuda_device(0);
  if (!first.is_valid()) throw Unexpected();
  const PointerFacts facts = facts_of(first.ptr(), address);
  if (facts.kind != MemoryKind::Device) throw Unexpected();
  return facts.device == 0 ? first : cuda_device(facts.device);
}

Stream torch_stream(PyObject* tensor, std::int64_t ordinal) {
  // Held here: another thread may find another torch meanwhile.
  if (const nb::object raw = nb::borrow(libraries().raw_stream); raw.is_valid()) {
    const nb::object index = taken(PyLong_FromLongLong(ordinal));
    return address_in(taken(PyObject_CallOneArg(raw.ptr(), index.ptr())).ptr());
  }
  const nb::object torch = nb::borrow(libraries().torch);
  const nb::object cuda = attribute(torch.ptr(), words().cuda);
  const nb::object device = attribute(tensor, words().device);
  const nb::object function = attribute(cuda.ptr(), words().current_stream);
  const nb::object stream = taken(PyObject_CallOneArg(function.ptr(), device.ptr()));
  return address_in(attribute(stream.ptr(), words().cuda_stream).ptr());
}

// Returns the current stream of the array's device: each of a thread's devices has a current
// stream, and without an argument cupy says that of its current device.
Stream cupy_stream(nb::handle device) {
  PyObject* const cupy = loaded(words().cupy);
  if (cupy == nullptr) throw Unexpected();
  const nb::object cuda = attribute(cupy, words().cuda);
  const nb::object ordinal = nb::getattr(device, words().ordinal, nb::none());
  nb::object stream;
  if (ordinal.is_none()) {
    stream = asked(cuda.ptr(), words().get_current_stream);
  } else {
    const nb::object function = attribute(cuda.ptr(), words().get_current_stream);
    stream = taken(PyObject_CallOneArg(function.ptr(), ordinal.ptr()));
  }
  return address_in(attribute(stream.ptr(), words().ptr).ptr());
}

// --- arrays ---

void see_own(PyObject* array, DeviceView& view) {
  view.address = address_in(attribute(array, words().address).ptr());
  if (view.address == 0) throw Unexpected();  // it was freed
  view.count = product_of(attribute(array, words().shape).ptr());
  view.dtype = known_type(code_of_numpy_type(attribute(array, words().dtype).ptr()));
  view.writable = !truth(attribute(array, words().readonly));
  view.device = attribute(array, words().device);
  view.stream = view.exported = current_stream(view.device.ptr());
  view.exports = true;
}

DType torch_type(const nb::object& dtype) {
  auto& known = libraries().torch_types;
  if (const auto found = known.find(dtype.ptr()); found != known.end()) return found->second;
  const nb::object code = callback(Callback::CodeOfTorchType)(dtype);
  const DType type = known_type(nb::cast<int>(code));
  known.emplace(Py_NewRef(dtype.ptr()), type);
  return type;
}

// Properties that no known type can have, such as quantized values, are not asked for.
void see_tensor(PyObject* tensor, DeviceView& view) {
  if (!truth(attribute(tensor, words().is_cuda))) throw Unexpected();
  const std::int64_t ordinal = number(asked(tensor, words().get_device).ptr());
  view.device = cuda_device(ordinal);
  view.dtype = torch_type(attribute(tensor, words().dtype));
  const bool is_complex = view.dtype == DType::C64 || view.dtype == DType::C128;
  if (truth(attribute(tensor, words().is_sparse)) ||
      !truth(asked(tensor, words().is_contiguous)) || truth(asked(tensor, words().is_neg)) ||
      (is_complex && truth(asked(tensor, words().is_conj)))) {
    throw Unexpected();
  }
  view.address = address_in(asked(tensor, words().data_ptr).ptr());
  view.count = number(asked(tensor, words().numel).ptr());
  const nb::object storage = asked(tensor, words().untyped_storage);
  const std::int64_t itemsize = static_cast<std::int64_t>(item_size(view.dtype));
  const std::int64_t needed =
      (number(asked(tensor, words().storage_offset).ptr()) + view.count) * itemsize;
  if (view.count != 0 && needed > number(asked(storage.ptr(), words().nbytes).ptr())) {
    throw Unexpected();  // it was freed, or made shorter
  }
  view.writable = true;
  view.stream = torch_stream(tensor, ordinal);
}

// Its interface, a new dict each time, says that the current stream orders it; that of cupy's
// current device, which need not be its own.
void see_cupy(PyObject* array, DeviceView& view) {
  view.count = number(attribute(array, words().size).ptr());
  if (view.count == 0) throw Unexpected();
  if (!truth(attribute(attribute(array, words().flags).ptr(), words().contiguous))) {
    throw Unexpected();
  }
  view.dtype = known_type(code_of_numpy_type(attribute(array, words().dtype).ptr()));
  view.address = address_in(attribute(attribute(array, words().data).ptr(), words().ptr).ptr());
  view.writable = true;
  view.device = device_of(view.address);
  view.stream = view.exported = cupy_stream(view.device);
  view.exports = true;
}

DType interface_type(PyObject* typestr) {
  static auto* const known = new std::unordered_map<std::string, DType>;
  if (typestr == nullptr || !PyUnicode_Check(typestr)) throw Unexpected();
  Py_ssize_t length = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(typestr, &length);
  if (text == nullptr) throw nb::python_error();
  const std::string name(text, static_cast<std::size_t>(length));
  if (const auto found = known->find(name); found != known->end()) return found->second;
  const nb::object code = callback(Callback::CodeOfInterfaceType)(nb::handle(typestr));
  return known->emplace(name, known_type(nb::cast<int>(code))).first->second;
}

void check_contiguous(PyObject* shape, PyObject* strides, std::int64_t itemsize) {
  if (strides == nullptr || strides == Py_None) return;
  if (!PyTuple_CheckExact(strides) || PyTuple_GET_SIZE(strides) != PyTuple_GET_SIZE(shape)) {
    throw Unexpected();
  }
  std::int64_t expected = itemsize;
  for (Py_ssize_t i = PyTuple_GET_SIZE(shape); i > 0; --i) {
    const std::int64_t length = number(PyTuple_GET_ITEM(shape, i - 1));
    if (length != 1 && number(PyTuple_GET_ITEM(strides, i - 1)) != expected) throw Unexpected();
    expected *= length;
  }
}

// The stream that an interface names; false where it names none.
bool read_stream(PyObject* value, Stream* stream) {
  if (value == nullptr || value == Py_None) return false;
  const std::uint64_t found = address_in(value);
  if (found == 0) throw Unexpected();  // which its interface does not allow
  *stream = found == kLegacy ? 0 : found;
  return true;
}

void see_interface(PyObject* array, DeviceView& view) {
  const nb::object given = attribute(array, words().interface);
  if (!PyDict_Check(given.ptr())) throw Unexpected();
  auto entry = [&](PyObject* name) {
    PyObject* const found = PyDict_GetItemWithError(given.ptr(), name);
    if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
    return found;
  };
  PyObject *const mask = entry(words().mask), *const shape = entry(words().shape);
  PyObject* const data = entry(words().data);
  if ((mask != nullptr && mask != Py_None) || shape == nullptr || data == nullptr ||
      !PyTuple_CheckExact(data) || PyTuple_GET_SIZE(data) != 2) {
    throw Unexpected();
  }
  view.dtype = interface_type(entry(words().typestr));
  view.count = product_of(shape);
  if (view.count == 0) throw Unexpected();
  check_contiguous(shape, entry(words().strides),
                   static_cast<std::int64_t>(item_size(view.dtype)));
  view.address = address_in(PyTuple_GET_ITEM(data, 0));
  if (view.address == 0) throw Unexpected();
  view.writable = !truth(nb::borrow(PyTuple_GET_ITEM(data, 1)));
  view.exports = read_stream(entry(words().stream), &view.exported);
  view.device = device_of(view.address);
  view.stream = view.exports ? view.exported : current_stream(view.device.ptr());
}

// Runs `read`; false where something was unexpected.
template <class Read>
bool attempt(Read read) {
  try {
    read();
    return true;
  } catch (const Unexpected&) {
    return false;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

}  // namespace

bool view_on_device(PyObject* array, DeviceView& view) {
  const bool is_seen = attempt([&] {
    switch (libraries().of(Py_TYPE(array))) {
      case Library::Own: return see_own(array, view);
      case Library::Torch: return see_tensor(array, view);
      case Library::Cupy: return see_cupy(array, view);
      case Library::Others: return see_interface(array, view);
      case Library::None: throw Unexpected();
    }
  });
  return is_seen && view.device.is_valid();
}

Stream current_stream_of(nb::handle array, nb::handle device) {
  Stream stream = 0;
  const bool is_known = attempt([&] {
    const bool is_none = array.is_none();  // of a barrier
    switch (is_none ? Library::Own : libraries().of(Py_TYPE(array.ptr()))) {
      case Library::Own: stream = current_stream(device.ptr()); return;
      case Library::Torch:
        stream = torch_stream(array.ptr(), number(asked(array.ptr(), words().get_device).ptr()));
        return;
      case Library::Cupy: stream = cupy_stream(device); return;
      case Library::Others:
      case Library::None: throw Unexpected();
    }
  });
  if (is_known) return stream;
  return nb::cast<Stream>(callback(Callback::CurrentStreamOf)(array, device));
}

}  // namespace commrt
