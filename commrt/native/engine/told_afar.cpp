// SPDX-License-Identifier: Apache-2.0
// This process answers ranks of other nodes.
#include "engine/told_afar.hpp"

#include <utility>

namespace commrt {

void ToldByTag::watch(std::shared_ptr<Liveness> liveness) {
  const std::lock_guard<std::mutex> lock(mutex_);
  liveness_ = std::move(liveness);
}

std::shared_ptr<ToldAfar> ToldByTag::of(int tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto made = std::make_shared<ToldAfar>();
  told_[tag] = made;
  return made;
}

std::optional<RankState> ToldByTag::answer(int tag, int about) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = told_.find(tag);
  const auto told = it == told_.end() ? nullptr : it->second.lock();
  if (told == nullptr || about < 0 || about >= size_) return std::nullopt;
  if (about == rank_) return state_from(*told, about);
  RankState found;
  found.rank = about;
  if (liveness_ == nullptr) return found;
  if (liveness_->is_stopped(about)) found.does = RankDoes::Stopped;
  if (liveness_->has_left(about)) found.does = RankDoes::Left;
  if (liveness_->has_ended(about)) found.does = RankDoes::Ended;
  return found;
}

void ToldByTag::each(const std::function<void(int, const ToldAfar&)>& visit) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [tag, kept] : told_) {
    if (const auto told = kept.lock()) visit(tag, *told);
  }
}

}  // namespace commrt
