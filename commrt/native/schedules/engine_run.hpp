// SPDX-License-Identifier: Apache-2.0
// The engine's rules: in which order lowered programs may run (commrt/schedule/engine_model.py).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "schedules/contents.hpp"
#include "schedules/lowering.hpp"

namespace commrt {

// The messages of all ranks, numbered by sender, receiver and place among the pair's.
class MessageNumbers {
 public:
  explicit MessageNumbers(const std::vector<LoweredProgram>& programs);

  std::int64_t size() const { return size_; }
  // Returns the number of message k of a pair, or -1 if the sender has none such.
  std::int64_t of(std::int32_t sender, std::int32_t receiver, std::int32_t k) const;
  std::int32_t count(std::int32_t sender, std::int32_t receiver) const;

 private:
  struct Pair {
    std::int32_t receiver;
    std::int32_t count;
    std::int64_t first;
  };
  const Pair* pair(std::int32_t sender, std::int32_t receiver) const;

  std::vector<std::vector<Pair>> pairs_;
  std::int64_t size_ = 0;
};

struct EnginePlace {
  std::int32_t rank;
  std::int32_t fragment;
  std::int32_t index;
};

// Whether a rank's messages to a peer use lines and slots; null: all do.
using HasLines = std::function<bool(std::int32_t, std::int32_t)>;

// One maximal run of all ranks. Throws ScheduleFault "stuck": rank, fragment, instruction, how
// many facts are missing, and up to three of them (kind, a, b, message id).
std::vector<EnginePlace> run_engine(const std::vector<LoweredProgram>& programs,
                                    std::int32_t fragments, std::int32_t lines,
                                    const HasLines& has_lines);

// Throws "counts": rank, peer, sent, received; "uses": rank, 1 if inputs; or "race".
void check_lowered(const std::vector<LoweredProgram>& programs);

// Throws what the first instruction of `order` does wrong. It runs the first fragment: once
// `check_lowered` has passed, each fragment does the same in every order that the engine allows.
// In place it runs only where a rank reads input that it has overwritten; else it is the same.
void check_lowered_meaning(const std::vector<LoweredProgram>& programs,
                           const std::vector<EnginePlace>& order, const OperationGoal& goal,
                           CombineRule rule);

}  // namespace commrt
