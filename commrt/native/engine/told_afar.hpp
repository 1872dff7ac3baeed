// SPDX-License-Identifier: Apache-2.0
// The words of this process on its ranks of communicators, for ranks of other nodes that ask.
//
// Gloo's connections carry the questions (relay.hpp), or datagrams do where MPI carries the
// messages (commrt/job/inquiries.py). Any thread may answer, whatever the program does.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "engine/layout.hpp"
#include "engine/liveness.hpp"
#include "engine/rank_states.hpp"

namespace commrt {

class ToldByTag {
 public:
  // `rank` is this process's among the `size` ranks of the world.
  ToldByTag(int rank, int size) : rank_(rank), size_(size) {}
  ToldByTag(const ToldByTag&) = delete;
  ToldByTag& operator=(const ToldByTag&) = delete;

  // Asks the kernel by these descriptors of other processes of the node, from now on.
  void watch(std::shared_ptr<Liveness> liveness);
  // The words on the communicator of this tag, to be kept there.
  std::shared_ptr<ToldAfar> of(int tag);
  // The state of this rank, or of another one of its node: whether that is stopped or has ended.
  // Nothing where there is no such communicator.
  std::optional<RankState> answer(int tag, int about) const;
  // Calls `visit` with each communicator's tag and words.
  void each(const std::function<void(int, const ToldAfar&)>& visit) const;

 private:
  const int rank_, size_;
  mutable std::mutex mutex_;
  std::shared_ptr<Liveness> liveness_;
  std::unordered_map<int, std::weak_ptr<ToldAfar>> told_;
};

}  // namespace commrt
