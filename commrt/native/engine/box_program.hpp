// SPDX-License-Identifier: Apache-2.0
// Programs that move boxes: one rank's messages, and what each of them holds.
//
// schedule/boxes.py has the definition, and says why such programs do not deadlock. Here is the
// same for calls whose shapes are new: a test compares the two.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/plan.hpp"

namespace commrt {

// One side of a move: a part of an array. Strides are the array's, in bytes.
struct BoxEnd {
  int array = -1;
  int ndim = 0;
  int64_t start[kMostDims], stop[kMostDims], strides[kMostDims];

  BoxEnd() {}  // writes nothing into dimensions that there are not
};

struct BoxMove {
  int phase = 0;
  int64_t number = 0;
  int peer = -1;  // negative: source and target are both here
  bool leaves = false, arrives = false;
  BoxEnd source, target;

  const BoxEnd& own() const { return leaves ? source : target; }
};

enum class BoxStepKind : uint8_t { Send = 0, Receive = 1, ReceiveReduce = 2, Copy = 3, Reduce = 4 };

struct BoxStep {
  BoxStepKind kind;
  int lo, hi;  // boxes
  int peer, k;
  int source;  // copies: the first box that is read

  bool is_local() const { return kind == BoxStepKind::Copy || kind == BoxStepKind::Reduce; }
};

struct BoxProgram {
  std::vector<Box> boxes;  // settled
  std::vector<BoxStep> steps;
  std::vector<std::vector<int>> deps;  // of each step: earlier ones; or none of any
  std::vector<PeerUse> peers;
  size_t longest_nbytes = 0;
  int ahead = 2;
  int fewest_slots = 1;
};

// The facts that all programs of one kind of call share.
struct BoxCallKind {
  int coll = 0;
  std::string label;
  RedOp redop = RedOp::Sum;
  bool reduces = false;
  bool stated = false;  // each side states the lengths of what moves by itself
  int64_t limit_nbytes = 0;
  size_t lane_nbytes = 0;
  int spins = -1;
  size_t most_inline = 0;
  DType dtype = DType::U8;  // what messages say of the call: its first array's type,
  uint16_t facts = 0;       // and a number of all else that the ranks have to agree on
};

// `memory`: for the program's boxes.
BoxProgram compile_moves(const std::vector<BoxMove>& moves, const std::vector<DType>& types,
                         const BoxCallKind& kind, int rank, int size,
                         std::vector<Box> memory = {});

// The plan of a program, whose buffer is a table of the arrays' addresses. Throws
// std::invalid_argument where the program is none of this communicator's. `used`: a plan of such
// calls that nobody has any more, whose memory the new one takes; null: there is none.
std::shared_ptr<Plan> plan_of_boxes(BoxProgram&& program, const BoxCallKind& kind, int most_slots,
                                    Store store, Store adaptive, Comm& comm,
                                    std::shared_ptr<Plan> used = nullptr);

}  // namespace commrt
