// SPDX-License-Identifier: Apache-2.0
// Finds ranks of different nodes that wait for each other in vain, in calls that differ: else they
// would do so until their deadline. Ranks of one node see each other's latest calls.
//
// A rank that waits tells one rank of another node what its call is, each time another one. So all
// pairs have heard of each other after as many looks as there are ranks, and a wait costs few messages.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace commrt {

class Comm;
class Op;

class FarWaits {
 public:
  explicit FarWaits(Comm& comm) : comm_(comm) {}

  // This rank has waited for a while, in `op`.
  void tell(const Op& op);
  // A rank of another node waits in its call number `seq`. The communicator ends if it differs.
  void hear(int source, uint64_t seq, uint64_t mark);
  // Compares calls of other ranks that this one had not made when it heard of them.
  void look();

 private:
  struct Call {
    uint64_t seq, mark;
  };

  std::optional<uint64_t> own_mark(uint64_t seq, uint64_t theirs) const;
  bool compare(int source, const Call& theirs);

  Comm& comm_;
  int next_ = 0;  // to be told
  std::map<int, Call> ahead_;  // by rank: its latest call, which this rank has not made
};

}  // namespace commrt
