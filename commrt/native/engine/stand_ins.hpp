// SPDX-License-Identifier: Apache-2.0
// Stand-ins: what takes the place of a refused call in the order of an MPI library's collectives.
//
// The library matches the collectives of a communicator by their order. A rank that has given it a
// call cannot take that back. So where any rank has begun a call that others refuse, all of them make
// it: those that refused make it of memory of its own, a stand-in, which nobody takes for a value.
//
// - A rank that has refused a call asks all others what became of it. So does one that hears of a
//   refusal before it has given the call to the library: it leaves the call, and gives nothing.
// - A rank that has begun the call fails it, and answers with what describes it. It waits until the
//   library is done with its arrays. One whose part was over before has had its result, and answers.
// - Once every rank has said that it has refused, left or begun the call, those that have not begun it
//   make their stand-ins; none where nobody has. Their later calls of the library wait for that.
//
// A stand-in begins only when each rank that has begun the call has heard of the refusal. So no rank
// takes its bytes for a result. A right call pays nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/call_trail.hpp"
#include "engine/mpi_api.hpp"

namespace commrt {

class Comm;
class Op;
class Plan;

class StandIns {
 public:
  // The library's communicator of these ranks, and its handles by the codes of types and reductions.
  struct Library {
    Handle comm = 0, byte = 0;
    std::vector<Handle> types, reductions;
  };

  explicit StandIns(Comm& comm) : comm_(comm) {}

  void attach(Library library) { library_ = std::move(library); }
  // True if an operation may be left by a refusal, and all ranks stay in step.
  bool take(const Op& op) const;
  // True while a place of this rank's is open.
  bool has_open() const { return !places_.empty(); }
  // True while something is not settled.
  bool is_busy() const { return !places_.empty() || !told_.empty() || !begun_.empty(); }
  // True if the library may not be given operation `seq` yet: an earlier place is open.
  bool hold_back(uint64_t seq) const;
  // This rank has refused operation `seq`.
  void refuse(uint64_t seq);
  // This rank has failed an operation that others have refused.
  void leave(const Op& op);
  // Another rank has refused operation `seq`, to which this rank has come.
  void hear_refused(int rank, uint64_t seq);
  // Another rank says what it has done with operation `seq`.
  void hear(int rank, uint64_t seq, const unsigned char* said, size_t nbytes);
  // Why another rank has left an operation that this one is about to begin; empty: none has.
  std::string why_left(const Op& op) const;
  // A rank that may be done before others, with counts that these do not know, keeps them for a while:
  // the root of a scatterv of the library's, and a rank of an alltoallv that gets nothing.
  void remember(uint64_t seq, const std::shared_ptr<const Plan>& plan) {
    remembered_[num_remembered_++ % kRemembered] = {seq, plan};
  }
  // Does what can be done of all this.
  void work();
  // This rank takes no part in later operations, and makes no stand-ins. Others hear of that.
  void end();

 private:
  // Gone: it has not begun it, and makes no stand-in. Elsewhere: the library was not to run it.
  enum class Part : uint8_t { Unheard, Refused, Left, Begun, Elsewhere, Unknown, Gone };
  struct Said {  // the head of a packet; counts, or why a rank has left, follow
    Part part = Part::Unheard;
    bool in_place = false;
    uint64_t mark = 0;    // of the plan
    uint64_t length = 0;  // as NativeCall has it
    int32_t mine = 0, yours = 0;  // where counts differ: what goes from here to there, and back
  };
  struct Place {  // in the library's order
    uint64_t seq;
    std::vector<Said> said;               // by rank
    std::vector<std::vector<int>> counts;  // by rank, where all ranks know them
  };
  struct Told {
    int rank;
    uint64_t seq;
    Part part;
    std::string why;
  };

  Place& open(uint64_t seq);
  Place* find(uint64_t seq);
  const Op* find_begun(uint64_t seq) const;
  void tell(int rank, uint64_t seq, Part part, const std::string& why);
  void answer(int rank, uint64_t seq);
  void describe(const Op& op, int rank, Said& said, std::vector<int>& counts) const;
  void describe(const CallTrail::Entry& entry, int rank, Said& said) const;
  bool settle(Place& place);
  void begin(const Place& place, const Said& first);
  bool describe_lengths(const Place& place, const Said& first, Plan& plan) const;
  void end_communicator(uint64_t seq, const std::string& why);

  Comm& comm_;
  Library library_;
  std::vector<Place> places_;  // in their order
  std::vector<Told> told_;     // of operations that this rank has not come to
  std::vector<std::shared_ptr<Op>> begun_;  // stand-ins that the library has
  static constexpr uint64_t kRemembered = 16;
  std::pair<uint64_t, std::shared_ptr<const Plan>> remembered_[kRemembered];
  uint64_t num_remembered_ = 0;
};

}  // namespace commrt
