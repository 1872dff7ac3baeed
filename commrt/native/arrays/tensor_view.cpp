// SPDX-License-Identifier: Apache-2.0
// Reads torch's tensors in host memory (tensor_view.hpp).
#include "arrays/tensor_view.hpp"

#include <initializer_list>
#include <utility>

#include "arrays/dlpack_exchange.hpp"

namespace commrt {

namespace {

// Facts about torch, kept for ever, or until another torch is there.
struct Torch {
  PyObject* module = nullptr;
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  dlpack::ViewOf view_of = nullptr;  // null where this torch has none
  PyObject *is_neg = nullptr, *is_conj = nullptr;
  PyObject *storage = nullptr, *storage_nbytes = nullptr, *storage_offset = nullptr;
  PyObject* strided = nullptr;  // the layout of dense tensors
};

Torch& torch() {
  static Torch* const found = new Torch;  // types outlast the end of main()
  return *found;
}

dlpack::ViewOf find_view_of(const nb::object& tensor) {
  const nb::object capsule = nb::getattr(tensor, dlpack::kAttribute, nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) return nullptr;
  const auto* header =
      static_cast<const dlpack::Header*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  while (header != nullptr && header->major != dlpack::kMajor) header = header->older;
  if (header == nullptr) return nullptr;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header)->view_of;
}

// Looks whether there is a torch that is not known yet. While it is being imported it is none.
bool is_new_torch() {
  static PyObject* const name = PyUnicode_InternFromString("torch");
  PyObject* const module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (module == nullptr || module == torch().module) return false;
  const nb::object tensor = nb::getattr(nb::handle(module), "Tensor", nb::none());
  const nb::object nn = nb::getattr(nb::handle(module), "nn", nb::none());
  const nb::object parameter = nb::getattr(nn, "Parameter", nb::none());
  if (!PyType_Check(tensor.ptr()) || !PyType_Check(parameter.ptr())) return false;
  const dlpack::ViewOf view_of = find_view_of(tensor);
  nb::object is_neg = tensor.attr("is_neg"), is_conj = tensor.attr("is_conj");
  nb::object storage = tensor.attr("untyped_storage"), offset = tensor.attr("storage_offset");
  nb::object nbytes = nb::handle(module).attr("UntypedStorage").attr("nbytes");
  nb::object strided = nb::handle(module).attr("strided");
  Torch& known = torch();
  // The references of the one before stay: calls may be using them.
  known = {Py_NewRef(module), reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor.ptr())),
           reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter.ptr())), view_of,
           is_neg.release().ptr(), is_conj.release().ptr(), storage.release().ptr(),
           nbytes.release().ptr(), offset.release().ptr(), strided.release().ptr()};
  return true;
}

bool is_plain_class(PyTypeObject* type) {
  const Torch& known = torch();
  return type != nullptr && (type == known.tensor || type == known.parameter);
}

bool read_type(const dlpack::Tensor& tensor, DType& type) {
  using Code = dlpack::TypeCode;
  if (tensor.lanes != 1) return false;
  auto of_width = [&](std::initializer_list<std::pair<int, DType>> known) {
    for (const auto& [bits, one] : known) {
      if (bits != tensor.bits) continue;
      type = one;
      return true;
    }
    return false;
  };
  switch (tensor.code) {
    case Code::Float:
      return of_width({{32, DType::F32}, {64, DType::F64}, {16, DType::F16}});
    case Code::BFloat: return of_width({{16, DType::BF16}});
    case Code::Int:
      return of_width({{64, DType::I64}, {32, DType::I32}, {8, DType::I8}, {16, DType::I16}});
    case Code::UInt:
      return of_width({{8, DType::U8}, {64, DType::U64}, {32, DType::U32}, {16, DType::U16}});
    case Code::Complex: return of_width({{64, DType::C64}, {128, DType::C128}});
    case Code::Bool: return of_width({{8, DType::Bool}});
    case Code::F8E4M3FN: return of_width({{8, DType::F8E4M3}});
    case Code::F8E5M2: return of_width({{8, DType::F8E5M2}});
    default: return false;
  }
}

// The elements of a tensor whose values lie one after the other; -1 for any other.
std::int64_t contiguous_count(const dlpack::Tensor& tensor) {
  std::int64_t count = 1;
  bool is_dense = true;
  for (int i = tensor.ndim; i-- > 0;) {
    const std::int64_t length = tensor.shape[i];
    if (length == 0) return 0;
    if (length != 1 && tensor.strides != nullptr && tensor.strides[i] != count) is_dense = false;
    count *= length;
  }
  return is_dense ? count : -1;
}

// True if a tensor is dense. For others, DLPack's table throws C++ exceptions, and torch adds
// backtraces to them. That takes half a millisecond, and gradients of embeddings are sparse.
bool is_strided(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("layout");
  const nb::object layout = nb::steal(PyObject_GetAttr(tensor, name));
  if (layout.is_valid()) return layout.ptr() == torch().strided;
  PyErr_Clear();
  return false;
}

// True if a tensor's values are those in memory: views may stand for negatives and conjugates.
bool is_literal(PyObject* tensor, DType type) {
  const Torch& known = torch();
  const bool is_complex = type == DType::C64 || type == DType::C128;
  for (PyObject* const asks : {known.is_neg, is_complex ? known.is_conj : nullptr}) {
    if (asks == nullptr) continue;
    const nb::object said = nb::steal(PyObject_CallOneArg(asks, tensor));
    if (said.ptr() == Py_False) continue;
    PyErr_Clear();
    return false;
  }
  return true;
}

// Asks a method of torch's for a number; -1 where it has none to give.
std::int64_t asked(PyObject* method, PyObject* object) {
  const nb::object said = nb::steal(PyObject_CallOneArg(method, object));
  const std::int64_t number = said.is_valid() ? PyLong_AsLongLong(said.ptr()) : -1;
  if (PyErr_Occurred()) PyErr_Clear();
  return number;
}

// True if `nbytes` from the tensor's first element on lie within its storage, which a program may
// shrink and free under it: torch keeps the address of a view then, and its length. The offset is
// asked for only where the storage is longer than the tensor.
bool lies_in_storage(PyObject* tensor, std::int64_t nbytes, std::int64_t itemsize) {
  const Torch& known = torch();
  const nb::object storage = nb::steal(PyObject_CallOneArg(known.storage, tensor));
  if (!storage.is_valid()) {
    PyErr_Clear();
    return false;
  }
  const std::int64_t room = asked(known.storage_nbytes, storage.ptr());
  if (room == nbytes) return true;
  const std::int64_t offset = asked(known.storage_offset, tensor);
  return offset >= 0 && room >= nbytes && offset <= (room - nbytes) / itemsize;
}

bool is_plain(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  return is_plain_class(type) || (is_new_torch() && is_plain_class(type));
}

// Shows a tensor; false for those without memory, on a device that DLPack does not know, …
//
// The question whether a tensor is dense takes a sixth of the time that looking at one takes. It is
// asked only from the first tensor on that cannot be shown: most programs have none.
bool show(PyObject* object, dlpack::Tensor& seen) {
  static bool looks_first = false;
  if (looks_first && !is_strided(object)) return false;
  if (torch().view_of(object, &seen) == 0) return true;
  PyErr_Clear();
  looks_first = true;
  return false;
}

}  // namespace

bool extent_of_tensor(PyObject* object, Extent& extent) {
  if (!is_plain(object) || torch().view_of == nullptr) return false;
  dlpack::Tensor seen{};
  if (!show(object, seen)) return false;
  if (!read_type(seen, extent.dtype)) return false;
  extent.count = 1;
  for (int i = 0; i < seen.ndim; ++i) extent.count *= seen.shape[i];
  extent.on_host = seen.device_type == dlpack::kCpu;
  return true;
}

bool view_of_tensor(PyObject* object, View& view) {
  if (!is_plain(object) || torch().view_of == nullptr) return false;
  dlpack::Tensor seen{};
  if (!show(object, seen)) return false;
  if (seen.device_type != dlpack::kCpu || !read_type(seen, view.dtype)) return false;
  view.count = contiguous_count(seen);
  // A tensor of zeros that nobody has written down has no memory.
  if (view.count < 0 || (view.count != 0 && seen.data == nullptr)) return false;
  const auto itemsize = static_cast<std::int64_t>(item_size(view.dtype));
  if (view.count != 0 && !lies_in_storage(object, view.count * itemsize, itemsize)) return false;
  if (!is_literal(object, view.dtype)) return false;
  view.data = static_cast<unsigned char*>(seen.data) + seen.byte_offset;
  view.writable = true;
  return true;
}

bool has_memory(PyObject* object) {
  if (!is_plain(object) || torch().view_of == nullptr) return false;
  dlpack::Tensor seen{};
  if (!show(object, seen)) return false;
  std::int64_t last = 0;
  for (int i = 0; i < seen.ndim; ++i) {
    if (seen.shape[i] == 0) return true;
    if (seen.strides == nullptr) return false;
    last += (seen.shape[i] - 1) * seen.strides[i];
  }
  const std::int64_t itemsize = (seen.bits * seen.lanes + 7) / 8;
  return seen.data != nullptr && lies_in_storage(object, (last + 1) * itemsize, itemsize);
}

bool memory_of_tensor(PyObject* object, const void*& address, std::int64_t& nbytes) {
  dlpack::Tensor seen{};
  if (!is_plain(object) || torch().view_of == nullptr || !show(object, seen)) return false;
  address = static_cast<const unsigned char*>(seen.data) + seen.byte_offset;
  std::int64_t count = 1;
  for (int i = 0; i < seen.ndim; ++i) count *= seen.shape[i];
  nbytes = has_memory(object) ? count * ((seen.bits * seen.lanes + 7) / 8) : -1;
  return true;
}

void bind_tensor_view(nb::module_& m) {
  m.def("has_memory", [](nb::handle object) { return has_memory(object.ptr()); }, nb::arg("tensor"),
        "True if a tensor is dense, of torch's own classes, and its elements lie in its storage; "
        "False also where that cannot be seen at a glance.");
  m.def("view_of_tensor", [](nb::handle object) -> nb::object {
    View view;
    if (!view_of_tensor(object.ptr(), view)) return nb::none();
    return nb::make_tuple(reinterpret_cast<uint64_t>(view.data), view.count,
                          static_cast<int>(view.dtype));
  }, "(address, count, dtype code) of a plain tensor of torch's in host memory, else None.");
}

}  // namespace commrt
