// SPDX-License-Identifier: Apache-2.0
// Numbers of calls, and their exchange.
#include "calls/call_check.hpp"

#include <algorithm>
#include <cstring>

#include "calls/group_methods.hpp"
#include "calls/persistent_call.hpp"
#include "python_callbacks.hpp"

namespace commrt {

namespace {

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
// 2014): each bit of the value changes half of the result's bits.
constexpr uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

uint64_t number_of_name(PyObject* name) {
  if (name == nullptr) return 0;
  Py_ssize_t nbytes = 0;
  if (const char* text = PyUnicode_AsUTF8AndSize(name, &nbytes)) {
    return number_of_text(text, static_cast<size_t>(nbytes));
  }
  PyErr_Clear();  // half of a pair of UTF-16
  const nb::object text = nb::steal(PyUnicode_AsEncodedString(name, "utf-8", "surrogatepass"));
  if (!text.is_valid()) throw nb::python_error();
  return number_of_text(PyBytes_AS_STRING(text.ptr()),
                        static_cast<size_t>(PyBytes_GET_SIZE(text.ptr())));
}

}  // namespace

uint64_t number_of_text(const char* text, size_t nbytes) {
  uint64_t found = nbytes;
  for (size_t at = 0; at < nbytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text + at, std::min(nbytes - at, sizeof word));
    found = mixed(found ^ word);
  }
  return found;
}

uint64_t CallCheck::fingerprint(const PlanKey& key, const int64_t* counts, size_t num_counts,
                                uint64_t seq, uint64_t name, uint64_t rest) const {
  uint64_t found = mixed(mixed(seed_) ^ rest);
  found = mixed(found ^ name);
  found = mixed(found ^ seq);
  found = mixed(found ^ static_cast<uint64_t>(key.count));
  found = mixed(found ^ (uint64_t{key.what} << 32 | static_cast<uint32_t>(key.root)));
  for (size_t i = 0; i < num_counts; ++i) found = mixed(found ^ static_cast<uint64_t>(counts[i]));
  return found == 0 ? 1 : found;
}

uint64_t CallCheck::pairs(int rank, const int64_t* sent, const int64_t* received) const {
  const auto size = static_cast<uint64_t>(size_), here = static_cast<uint64_t>(rank);
  uint64_t found = 0;
  for (uint64_t there = 0; there < size; ++there) {
    found += mixed(mixed(seed_ + here * size + there) ^ static_cast<uint64_t>(sent[there]));
    found -= mixed(mixed(seed_ + there * size + here) ^ static_cast<uint64_t>(received[there]));
  }
  return found;
}

bool CallCheck::are_same(uint64_t fingerprint, uint64_t pairs, double timeout_s) {
  if (is_under_way_) raise_error("UsageError", "another thread compares its call");
  struct UnderWay {
    bool& flag;
    explicit UnderWay(bool& at) : flag(at) { flag = true; }
    ~UnderWay() { flag = false; }
  } const under_way(is_under_way_);
  nb::object exchange = std::move(idle_);
  if (!exchange.is_valid()) exchange = make_exchange_();
  auto& call = nb::cast<PersistentCall&>(exchange);
  auto* const mine = static_cast<uint64_t*>(const_cast<void*>(call.in()));
  mine[0] = fingerprint;
  mine[1] = pairs;
  call.run(false, timeout_s);
  const auto* const told = static_cast<const uint64_t*>(call.out());
  bool same = fingerprint != 0;
  uint64_t sum = 0;
  for (int rank = 0; rank < size_; ++rank) {
    same = same && told[2 * rank] == fingerprint;
    sum += told[2 * rank + 1];
  }
  idle_ = std::move(exchange);
  return same && sum == 0;
}

bool CallCheck::lets_run(const CheckedCall& call, double timeout_s) {
  if (differs_) return false;  // of an earlier call, which Python has not come to
  const Comm& comm = *nb::inst_ptr<Group>(nb::handle(call.group))->comm;
  const auto size = static_cast<size_t>(size_);
  PlanKey key = call.key;
  if (call.num_counts != 0) key.count = 0;  // of one rank
  const size_t num_equal = call.num_counts == 1 ? size : 0;
  const uint64_t number = fingerprint(key, call.counts, num_equal, comm.next_seq,
                                      number_of_name(call.name), 0);
  const uint64_t lengths =
      call.num_counts == 2 ? pairs(comm.rank, call.counts, call.counts + size) : 0;
  try {
    differs_ = !are_same(number, lengths, timeout_s);
  } catch (nb::python_error& error) {
    const nb::object raised = nb::handle(call.group).attr(group_methods::kCheckFailed)(
        nb::handle(call.operation), error.value(), timeout_s);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    throw nb::python_error();
  }
  return !differs_;
}

}  // namespace commrt
