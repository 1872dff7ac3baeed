// SPDX-License-Identifier: Apache-2.0
// Compares the calls of a group's ranks before they run (check mode).
//
// Each rank tells all others two numbers: a fingerprint of its call, and its part of a sum over all
// pairs of ranks. Only where these numbers say that the calls differ does Python exchange the calls
// in words (commrt/calls/check_mode.py). All ranks see the same numbers, so they come to the same
// verdict.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "calls/plan_cache.hpp"

namespace commrt {

// A call that the engine knows. With `num_counts` 2 the counts are those sent, then those received.
struct CheckedCall {
  PyObject* group;
  PyObject* operation;
  PyObject* name;  // that the program gave the call; null for none
  const PlanKey& key;
  const int64_t* counts;
  int num_counts;
};

// A number of a text; 0 for an empty one.
uint64_t number_of_text(const char* text, size_t nbytes);

class CallCheck {
 public:
  // `make_exchange` returns a PersistentCall: an allgather of two int64 of each of `size` ranks.
  // `seed`: a number of what is equal in all calls.
  CallCheck(nb::object make_exchange, int size, uint64_t seed)
      : make_exchange_(std::move(make_exchange)), size_(size), seed_(seed) {}

  // A number of a call that is never 0. `seq`: the call's place in the order of calls. `name`: a
  // number of its name. `rest`: one of all that the others do not say. Both are 0 for nothing.
  uint64_t fingerprint(const PlanKey& key, const int64_t* counts, size_t num_counts, uint64_t seq,
                       uint64_t name, uint64_t rest) const;
  // This rank's part of a sum that is 0 where each pair of ranks has the same length in mind. Wrong
  // lengths give 0 by chance only, once in 2^64.
  uint64_t pairs(int rank, const int64_t* sent, const int64_t* received) const;

  // True if all ranks' fingerprints are equal and not 0, and the sum is 0; collective. Throws what
  // the exchange raises, and UsageError where another thread is in here: the ranks' threads may
  // come in different orders.
  bool are_same(uint64_t fingerprint, uint64_t pairs, double timeout_s);
  // Compares a call that the engine knows. Where the calls differ, Python takes the call over and
  // must not ask again. Throws what the group makes of an error.
  bool lets_run(const CheckedCall& call, double timeout_s);
  bool take_difference() { return std::exchange(differs_, false); }

 private:
  nb::object make_exchange_;
  // The exchange with its memory; none while one is under way. One that failed may still be in
  // flight, so it is not used again.
  nb::object idle_;
  int size_;
  uint64_t seed_;
  bool differs_ = false;
  bool is_under_way_ = false;  // guarded by the GIL, as all of this
};

}  // namespace commrt
