// SPDX-License-Identifier: Apache-2.0
// send, recv, sendrecv, multi_sendrecv: one callable each, without detours for plain arrays.
//
// A MessageMethod is a method descriptor with a vectorcall, as an Operation is. It knows
// plain arrays of numpy and of torch, ints in range and bools; every other call goes to the Python function
// that it wraps, which runs it or raises the precise error.
#include "arrays/tensor_view.hpp"
#include "calls/front.hpp"
#include "calls/group.hpp"
#include "calls/method_descriptor.hpp"
#include "engine/in_flight.hpp"
#include "engine/p2p.hpp"
#include "gil.hpp"
#include "kernels/finite.hpp"

#include <algorithm>
#include <new>

namespace commrt {

namespace {

enum class Kind : int { Send, Recv, SendRecv, Multi };

struct MessageMethod {
  MethodDescriptor head;
  Kind kind;
};

struct Words {  // interned once: keyword names are compared by address
  PyObject *out, *dest, *source, *tag, *sendtag, *recvtag, *nonblocking, *timeout_s;
  PyObject *sends, *recvs, *in_place;
};
Words words;

// An exact int in 0..most.
bool read_int(PyObject* value, long most, int& number) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  const long found = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow != 0 || found < 0 || found > most) return false;
  number = static_cast<int>(found);
  return true;
}

struct Arguments {
  PyObject* x = nullptr;
  PyObject* out = nullptr;
  int dest = -1, source = -1, sendtag = 0, recvtag = 0;
  bool nonblocking = false;
};

// Arguments behind the array by position: the peer and the tag; of a sendrecv dest, out and source.
bool parse_behind_array(Kind kind, PyObject* const* values, Py_ssize_t num, int size,
                        Arguments& found) {
  const bool sends = kind != Kind::Recv;
  if (!read_int(values[0], size - 1, sends ? found.dest : found.source)) return false;
  if (kind != Kind::SendRecv) {
    return num < 2 || read_int(values[1], INT32_MAX, sends ? found.sendtag : found.recvtag);
  }
  if (num > 1) found.out = values[1];
  return num < 3 || read_int(values[2], size - 1, found.source);
}

// False: not what is known at a glance, or said twice.
bool parse(Kind kind, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, int size,
           Arguments& found) {
  if (nargs < 2 || nargs > (kind == Kind::SendRecv ? 5 : 4)) return false;
  const bool sends = kind != Kind::Recv, receives = kind != Kind::Send;
  (sends ? found.x : found.out) = args[1];
  if (nargs > 2 && !parse_behind_array(kind, args + 2, nargs - 2, size, found)) return false;
  const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; ++i) {
    PyObject* key = PyTuple_GET_ITEM(kwnames, i);
    PyObject* value = args[nargs + i];
    bool known = false;
    if (key == words.dest && sends) {
      known = found.dest < 0 && read_int(value, size - 1, found.dest);
    } else if (key == words.source && receives) {
      known = found.source < 0 && read_int(value, size - 1, found.source);
    } else if (key == words.out && kind == Kind::SendRecv) {
      known = found.out == nullptr;
      found.out = value;
    } else if (key == words.tag && kind != Kind::SendRecv && nargs < 4) {
      known = read_int(value, INT32_MAX, sends ? found.sendtag : found.recvtag);
    } else if (key == words.sendtag && kind == Kind::SendRecv) {
      known = read_int(value, INT32_MAX, found.sendtag);
    } else if (key == words.recvtag && kind == Kind::SendRecv) {
      known = read_int(value, INT32_MAX, found.recvtag);
    } else if (key == words.nonblocking) {
      known = PyBool_Check(value);
      found.nonblocking = value == Py_True;
    } else if (key == words.timeout_s) {
      known = value == Py_None;
    }
    if (!known) return false;
  }
  return (!sends || found.dest >= 0) && (!receives || (found.source >= 0 && found.out != nullptr));
}

bool side_of(PyObject* array, int peer, int tag, bool written, Side& side) {
  View view;
  if (!view_on_host(array, view) || (written && !view.writable)) return false;
  const uint64_t nbytes = static_cast<uint64_t>(view.count) * item_size(view.dtype);
  side = {{view.data, nbytes, peer, tag, static_cast<TypeCode>(view.dtype), false}, array};
  return true;
}

bool overlap(const Message& a, const Message& b) {
  const auto* a0 = static_cast<const unsigned char*>(a.data);
  const auto* b0 = static_cast<const unsigned char*>(b.data);
  return a0 < b0 + b.nbytes && b0 < a0 + a.nbytes;
}

// One list of (array, peer) or (array, peer, tag); its arrays as a tuple. Null: not what is
// known at a glance.
nb::object read_messages(PyObject* list, int size, bool written, std::vector<Message>& found) {
  if (!PyList_CheckExact(list) && !PyTuple_CheckExact(list)) return {};
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
  nb::object arrays = nb::steal(PyTuple_New(count));
  if (!arrays.is_valid()) throw nb::python_error();
  found.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(list, i);
    if (!PyTuple_CheckExact(item)) return {};
    const Py_ssize_t fields = PyTuple_GET_SIZE(item);
    if (fields != 2 && fields != 3) return {};
    int peer = 0, tag = 0;
    if (!read_int(PyTuple_GET_ITEM(item, 1), size - 1, peer)) return {};
    if (fields == 3 && !read_int(PyTuple_GET_ITEM(item, 2), INT32_MAX, tag)) return {};
    PyObject* array = PyTuple_GET_ITEM(item, 0);
    Side side;
    if (!side_of(array, peer, tag, written, side)) return {};
    found.push_back(side.message);
    PyTuple_SET_ITEM(arrays.ptr(), i, Py_NewRef(array));
  }
  return arrays;
}

struct MultiArguments {
  nb::object sent, received;  // tuples of arrays
  MessageLists lists;
  bool nonblocking = false;
};

bool parse_multi(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, int size,
                 MultiArguments& found) {
  if (nargs != 1) return false;
  bool in_place = false;
  const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; ++i) {
    PyObject* key = PyTuple_GET_ITEM(kwnames, i);
    PyObject* value = args[nargs + i];
    bool known = false;
    if (key == words.sends) {
      found.sent = read_messages(value, size, false, found.lists.sends);
      known = found.sent.is_valid();
    } else if (key == words.recvs) {
      found.received = read_messages(value, size, true, found.lists.recvs);
      known = found.received.is_valid();
    } else if (key == words.in_place) {
      known = PyBool_Check(value);
      in_place = value == Py_True;
    } else if (key == words.nonblocking) {
      known = PyBool_Check(value);
      found.nonblocking = value == Py_True;
    } else if (key == words.timeout_s) {
      known = value == Py_None;
    }
    if (!known) return false;
  }
  return found.sent.is_valid() && found.received.is_valid() &&
         found.lists.settle_overlaps(in_place);
}

// The values of a message that is to be sent.
bool all_finite(const Message& one) {
  if (one.type >= kNumDTypes) return true;
  const auto dtype = static_cast<DType>(one.type);
  const auto count = static_cast<int64_t>(one.nbytes / item_size(dtype));
  return first_not_finite(dtype, one.data, count) < 0;
}

PyObject* call_method(PyObject* callable, PyObject* const* args, size_t nargsf,
                      PyObject* kwnames) {
  auto* self = reinterpret_cast<MessageMethod*>(callable);
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  auto slow = [&] { return PyObject_Vectorcall(self->head.function, args, nargsf, kwnames); };
  PyObject* const held = nargs > 0 ? group_of(args[0]) : nullptr;
  if (held == nullptr) return slow();
  const nb::handle group_object = held;
  const Group& group = *nb::inst_ptr<Group>(group_object);
  if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
      Engine::forked.load(std::memory_order_relaxed)) return slow();
  if (self->kind == Kind::Multi) {
    try {
      MultiArguments a;
      if (!parse_multi(args, nargs, kwnames, group.comm->size, a)) return slow();
      const auto is_finite = [](const Message& one) { return all_finite(one); };
      if (group.nan_check && !std::all_of(a.lists.sends.begin(), a.lists.sends.end(), is_finite)) {
        return slow();
      }
      return run_multi(group_object, a.lists, a.sent, a.received, a.received, self->head.name,
                       a.nonblocking, group.timeout_s).release().ptr();
    } catch (nb::python_error& e) {
      e.restore();
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
  }
  Arguments a;
  if (!parse(self->kind, args, nargs, kwnames, group.comm->size, a)) return slow();
  Side x{}, out{};
  if (a.x != nullptr && !side_of(a.x, a.dest, a.sendtag, false, x)) return slow();
  if (group.nan_check && a.x != nullptr && !all_finite(x.message)) return slow();
  if (a.out != nullptr && !side_of(a.out, a.source, a.recvtag, true, out)) return slow();
  if (self->kind == Kind::SendRecv && overlap(x.message, out.message)) return slow();
  try {
    nb::object result;
    switch (self->kind) {
      case Kind::Send:
        result = run_send(group_object, x, self->head.name, a.nonblocking, group.timeout_s);
        break;
      case Kind::Recv:
        result = run_recv(group_object, out, a.out, self->head.name, a.nonblocking, group.timeout_s);
        break;
      case Kind::SendRecv:
        result = run_sendrecv(group_object, x, out, a.out, self->head.name, a.nonblocking,
                              group.timeout_s);
        break;
      case Kind::Multi: break;  // has its own arguments, above
    }
    return result.release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

PyTypeObject* method_type = nullptr;

// Starts a message under the lock. It keeps the GIL if the lock is free and the start takes no
// time; otherwise it releases the GIL. An operation still in flight then keeps `first` and
// `second` alive; a caller that waits holds them itself.
template <class Start>
std::shared_ptr<Op> start(Engine& engine, std::unique_lock<std::mutex>& lock, bool brief,
                          nb::handle first, nb::handle second, const Start& launch) {
  std::shared_ptr<Op> op;
  first.inc_ref();
  second.inc_ref();
  bool kept = false;
  auto under_lock = [&] {
    op = launch();
    kept = !op->finished();
    if (!kept) return;
    op->keep[0] = first.ptr();
    op->keep[1] = second.ptr();
  };
  if (brief) {
    under_lock();
    lock.unlock();
  } else {
    if (lock.owns_lock()) lock.unlock();
    ReleasedGil release;
    std::lock_guard<std::mutex> own(engine.mutex);
    under_lock();
  }
  if (!kept) {
    first.dec_ref();
    second.dec_ref();
  }
  return op;
}

// What finds out, in check mode, whether the program writes to a message that is sent.
std::shared_ptr<InFlight> guard_of(const Comm& comm, const Message& leaving) {
  if (!comm.guards) return nullptr;
  return std::make_shared<InFlight>(static_cast<const unsigned char*>(leaving.data), leaving.nbytes,
                                    nullptr, 0);
}

std::shared_ptr<Op> guarded(std::shared_ptr<Op> op, const std::shared_ptr<InFlight>& guard) {
  if (!op->finished()) op->in_flight = guard;
  return op;
}

// Called after a message that needed no operation. Its rest (answers, packets on their way) is
// left to the progress thread, if there is one.
void tidy(Comm& comm, std::unique_lock<std::mutex>& lock) {
  const bool rest = comm.engine.goes_on_alone() && !comm.p2p->idle();
  lock.unlock();
  if (rest) comm.engine.wake();
  if (comm.engine.has_ended()) drop_ended(comm.engine);
}

}  // namespace

nb::object run_send(nb::handle group_object, const Side& x, nb::handle operation,
                    bool nonblocking, double timeout_s) {
  Comm& comm = *nb::inst_ptr<Group>(group_object)->comm;
  std::unique_lock<std::mutex> lock(comm.engine.mutex, std::try_to_lock);
  if (!nonblocking && lock.owns_lock() && comm.p2p->send_now(x.message)) {
    tidy(comm, lock);
    return nb::none();
  }
  const bool brief = lock.owns_lock() && comm.p2p->calm(x.message);
  const auto guard = nonblocking ? guard_of(comm, x.message) : nullptr;
  auto op = start(comm.engine, lock, brief, nonblocking ? x.keep : nb::handle(), {}, [&] {
    return guarded(comm.p2p->send(x.message), guard);
  });
  return finish_call(group_object, std::move(op), x.keep, {}, nb::none(), operation, nonblocking,
                     timeout_s);
}

nb::object run_recv(nb::handle group_object, const Side& out, nb::handle result,
                    nb::handle operation, bool nonblocking, double timeout_s) {
  Comm& comm = *nb::inst_ptr<Group>(group_object)->comm;
  std::unique_lock<std::mutex> lock(comm.engine.mutex, std::try_to_lock);
  bool spins = false;
  if (!nonblocking && lock.owns_lock()) {
    spins = comm.quiet();  // what is in flight needs more than a look at one peer
    if (comm.p2p->recv_now(out.message, spins ? comm.spins_with_gil() : 0)) {
      tidy(comm, lock);
      return nb::borrow(result);
    }
  }
  const bool brief = lock.owns_lock() && comm.p2p->calm(out.message);
  auto op = start(comm.engine, lock, brief, nonblocking ? out.keep : nb::handle(), {}, [&] {
    return comm.p2p->recv(out.message);
  });
  return finish_call(group_object, std::move(op), out.keep, {}, result, operation, nonblocking,
                     timeout_s, spins);
}

nb::object run_sendrecv(nb::handle group_object, const Side& x, const Side& out,
                        nb::handle result, nb::handle operation, bool nonblocking,
                        double timeout_s) {
  Comm& comm = *nb::inst_ptr<Group>(group_object)->comm;
  std::unique_lock<std::mutex> lock(comm.engine.mutex, std::try_to_lock);
  bool spins = false, sent = false;
  if (!nonblocking && lock.owns_lock()) {
    spins = comm.quiet();
    const auto now = comm.p2p->sendrecv_now(x.message, out.message,
                                            spins ? comm.spins_with_gil() : 0);
    if (now == P2P::Now::Both) {
      tidy(comm, lock);
      return nb::borrow(result);
    }
    sent = now == P2P::Now::Sent;
  }
  const bool brief =
      lock.owns_lock() && comm.p2p->calm(x.message) && comm.p2p->calm(out.message);
  const auto guard = nonblocking ? guard_of(comm, x.message) : nullptr;
  auto op = start(comm.engine, lock, brief, nonblocking ? x.keep : nb::handle(),
                  nonblocking ? out.keep : nb::handle(), [&] {
    return guarded(comm.p2p->sendrecv(x.message, out.message, sent), guard);
  });
  return finish_call(group_object, std::move(op), x.keep, out.keep, result, operation,
                     nonblocking, timeout_s, spins && sent);
}

nb::object run_multi(nb::handle group_object, const MessageLists& lists, nb::handle keep_sends,
                     nb::handle keep_recvs, nb::handle result, nb::handle operation,
                     bool nonblocking, double timeout_s) {
  Comm& comm = *nb::inst_ptr<Group>(group_object)->comm;
  constexpr uint64_t kMostWithGil = 32 * 1024;
  const bool is_short = lists.sends.size() <= Begun::kMost &&
                        lists.recvs.size() <= Begun::kMost && lists.nbytes() <= kMostWithGil;
  std::unique_lock<std::mutex> lock(comm.engine.mutex, std::try_to_lock);
  Begun begun;
  bool spins = false;
  if (!nonblocking && is_short && lock.owns_lock()) {
    spins = comm.quiet();
    if (comm.p2p->multi_now(lists, spins ? comm.spins_with_gil() : 0, begun)) {
      tidy(comm, lock);
      return nb::borrow(result);
    }
  }
  const bool brief = is_short && lock.owns_lock() && comm.p2p->calm(lists);
  auto op = start(comm.engine, lock, brief, nonblocking ? keep_sends : nb::handle(),
                  nonblocking ? keep_recvs : nb::handle(),
                  [&] { return comm.p2p->multi(lists, begun); });
  const bool spun = spins && begun.sent == lists.sends.size();
  return finish_call(group_object, std::move(op), keep_sends, keep_recvs, result, operation,
                     nonblocking, timeout_s, spun);
}

void bind_p2p_operation(nb::module_& m) {
  words.out = PyUnicode_InternFromString("out");
  words.dest = PyUnicode_InternFromString("dest");
  words.source = PyUnicode_InternFromString("source");
  words.tag = PyUnicode_InternFromString("tag");
  words.sendtag = PyUnicode_InternFromString("sendtag");
  words.recvtag = PyUnicode_InternFromString("recvtag");
  words.sends = PyUnicode_InternFromString("sends");
  words.recvs = PyUnicode_InternFromString("recvs");
  words.in_place = PyUnicode_InternFromString("in_place");
  words.nonblocking = PyUnicode_InternFromString("nonblocking");
  words.timeout_s = PyUnicode_InternFromString("timeout_s");

  method_type = make_descriptor_type("commrt._native.MessageMethod", sizeof(MessageMethod));
  if (method_type == nullptr) throw nb::python_error();
  m.attr("MessageMethod") = nb::borrow(reinterpret_cast<PyObject*>(method_type));

  m.def("make_message_method",
        [](nb::str name, int kind, nb::object function) -> nb::object {
          PyObject* doc = nb::object(function.attr("__doc__")).release().ptr();
          auto* self = reinterpret_cast<MessageMethod*>(
              make_descriptor(method_type, call_method, name.release().ptr(), doc,
                              function.release().ptr()));
          if (self == nullptr) throw nb::python_error();
          self->kind = static_cast<Kind>(kind);
          return nb::steal(reinterpret_cast<PyObject*>(self));
        },
        nb::arg("name"), nb::arg("kind"), nb::arg("function"),
        "Make the method descriptor of send (0), recv (1), sendrecv (2) or multi_sendrecv (3) "
        "around the Python function that takes all other calls.");
}

}  // namespace commrt
