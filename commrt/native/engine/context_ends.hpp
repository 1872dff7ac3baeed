// SPDX-License-Identifier: Apache-2.0
// Where contexts of fused() end in the order of operations: ranks that have lost count ask for it.
//
// A rank that has refused a call within cannot know how many operations the others' buckets became:
// that goes by the length of the call. At the end of the context it refuses what any other has begun
// there, so that nobody waits for it within, until it knows the number of the operation that follows.
// Each rank writes that down as it leaves a context, for ranks of its node, and tells ranks of other
// nodes that ask.
//
// A rank that has lost count says so as well, with the number that it has come to. Where all have lost
// it, none has begun an operation after the greatest of these: they go on from there.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/layout.hpp"

namespace commrt {

class Comm;

class ContextEnds {
 public:
  enum class Count : uint8_t {
    Unknown,
    Inside,  // the rank has not come to the end of that context, but to that operation
    Known,
    Lost,  // the rank does not know it, either, and has come to that operation
    Gone,  // the rank has ended so many contexts since that it does not know any more
  };
  struct End {
    Count count = Count::Unknown;
    uint64_t seq = 0;    // of the next operation
    uint64_t meets = 0;  // Inside: ranks are to meet before it, for so many times. 0: the rank is in none
  };

  explicit ContextEnds(Comm& comm) : comm_(comm) {}

  // The ranks meet in a context, which takes a number only where one of them refuses that.
  void begin_meeting();
  void end_meeting();
  // A context has ended here.
  void note();
  // One ends here in which this rank has lost count; asks the others. Then find() and regain().
  void lose();
  // Returns what the others say. Inside: as far as any of them has come. Lost: the same, and no rank
  // knows more.
  End find() const;
  // This rank knows where the context ended that it had lost count in: it has come to that.
  void regain();
  // A rank of another node asks, or answers.
  bool is_asked() const { return !asked_.empty(); }
  // Tells those that have asked how far this rank has come.
  void look();
  void hear_question(int rank, uint64_t number);
  void hear_answer(int rank, uint64_t number, End end);

 private:
  void say(End end);
  End own(uint64_t number) const;
  End of_member(int member, uint64_t number) const;
  End inside() const;
  uint64_t meets_at(uint64_t seq) const { return met_at_ == seq ? meets_ : 0; }
  EndSlot& slot(int member, uint64_t number) const;
  ContextSlots& slots(int member) const;

  Comm& comm_;
  uint64_t met_at_ = 0, meets_ = 0;  // the ranks met so often before that operation
  bool is_meeting_ = false;
  uint64_t number_ = 0;  // contexts that have ended here, but for the one that is being looked for
  std::array<End, kContextEnds> own_{};
  std::map<int, End> answers_;  // of ranks of other nodes, about `number_`
  struct Asked {
    int rank;  // who asks
    uint64_t number;  // of the context
    End told;
  };
  std::vector<Asked> asked_;
};

}  // namespace commrt
