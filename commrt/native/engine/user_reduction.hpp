// SPDX-License-Identifier: Apache-2.0
// Reductions of users: a C function, or a Python function, which needs the GIL.
//
// The engine never holds its lock while Python runs, as a thread that waits for the lock may hold
// the GIL. So an instruction that needs Python only gathers its inputs (a UserValue). A thread
// with the GIL then computes the value, without the lock, and ends the instruction. The progress
// thread never runs Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct _object;  // PyObject

namespace commrt {

class Engine;
class Op;

// inout[i] = in[i] ⊕ inout[i] for count elements; `in` comes from lower ranks.
using UserFn = void (*)(const void* in, void* inout, std::size_t count);

struct UserReduction {
  UserFn fn = nullptr;    // null: none, or Python
  bool python = false;
  // Keeps the function alive, and is called itself if the function is Python. The last reference
  // may be dropped without the GIL: see own_object().
  std::shared_ptr<_object> owner;
  explicit operator bool() const { return fn != nullptr || python; }
};

// dst and, unless null, dst2 = srcs[0] ⊕ srcs[1] ⊕ ..., from left to right. dst may be one of
// the srcs.
void combine_by(UserFn fn, std::size_t itemsize, void* dst, void* dst2, const void* const* srcs,
                int nsrc, std::size_t n);

// An instruction's inputs on their way through Python. They are copies, which a function may
// keep: the places they came from are used again.
struct UserValue {
  enum class State : std::uint8_t { Gathering, Wanted, Running, Done };
  std::uint64_t position;  // of the instruction in the operation's stream
  State state = State::Gathering;
  std::size_t nbytes = 0;
  std::vector<std::shared_ptr<unsigned char[]>> inputs;  // the first one is the value when Done

  void gather(int num_inputs, std::size_t nbytes_);
};

// True if something waits for the GIL: users' functions, or frames for other nodes
// (relay_carrier.hpp).
bool wants_gil(const Engine& engine);
// Does all of that. Needs the GIL, and not the engine's lock. False, with a Python error set,
// where something else than an Exception came (Ctrl-C).
bool run_wanted(Engine& engine);

// Shares an object among plans; the last one puts it aside for drop_objects().
std::shared_ptr<_object> own_object(_object* object);
// Drops what was put aside. Needs the GIL.
void drop_objects();

}  // namespace commrt
