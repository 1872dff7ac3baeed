// SPDX-License-Identifier: Apache-2.0
// Progressive filling: the link that offers its flows the least gives it to them, and the others
// share what that leaves. Offers only rise, so a heap with outdated entries finds the least one.
#include "sim/fair_sharing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace commrt {

COMMRT_NAMES_OF_BUGS(PlantedInSharing, "nothing_left_over", "leavers_forgotten", "link_too_fast")

FairSharing::FairSharing(LinkRates links, double penalty)
    : rates_(std::move(links)), penalty_(penalty), links_(rates_.shared.size()) {}

std::int32_t FairSharing::add(const std::int32_t* begin, const std::int32_t* end) {
  if (free_.empty()) {
    free_.push_back(static_cast<std::int32_t>(flows_.size()));
    flows_.emplace_back();
  }
  const std::int32_t slot = free_.back();
  free_.pop_back();
  Flow& flow = flows_[slot];
  flow.links.assign(begin, end);
  flow.places.clear();
  flow.limit = std::numeric_limits<double>::infinity();
  flow.rate = 0;
  flow.bottleneck = -1;
  flow.sharers = 0;
  for (std::size_t hop = 0; hop < flow.links.size(); ++hop) {
    Link& link = links_[flow.links[hop]];
    flow.places.push_back(static_cast<std::int32_t>(link.flows.size()));
    link.flows.push_back({slot, static_cast<std::int32_t>(hop)});
    link.peak_flows = std::max(link.peak_flows, load(flow.links[hop]));
    flow.limit = std::min(flow.limit, rates_.per_flow[flow.links[hop]]);
    touch(flow.links[hop]);
  }
  return slot;
}

void FairSharing::remove(std::int32_t slot) {
  Flow& flow = flows_[slot];
  for (std::size_t hop = 0; hop < flow.links.size(); ++hop) {
    std::vector<OfLink>& list = links_[flow.links[hop]].flows;
    const OfLink moved = list.back();
    list[flow.places[hop]] = moved;
    flows_[moved.flow].places[moved.hop] = flow.places[hop];
    list.pop_back();
    if (!has(PlantedInSharing::LeaversForgotten)) touch(flow.links[hop]);
  }
  flow.links.clear();
  free_.push_back(slot);
}

const std::vector<std::int32_t>& FairSharing::settle() {
  changed_.clear();
  ++round_;
  for (std::int32_t link : touched_) {
    links_[link].touched = false;
    if (links_[link].seen == round_) continue;
    find_component(link);
    share();
  }
  touched_.clear();
  return changed_;
}

void FairSharing::touch(std::int32_t link) {
  if (links_[link].touched) return;
  links_[link].touched = true;
  touched_.push_back(link);
}

void FairSharing::find_component(std::int32_t first) {
  component_links_.assign(1, first);
  component_flows_.clear();
  links_[first].seen = round_;
  for (std::size_t at = 0; at < component_links_.size(); ++at) {
    for (const OfLink& one : links_[component_links_[at]].flows) {
      Flow& flow = flows_[one.flow];
      if (flow.seen == round_) continue;
      flow.seen = round_;
      component_flows_.push_back(one.flow);
      for (std::int32_t link : flow.links) {
        if (links_[link].seen == round_) continue;
        links_[link].seen = round_;
        component_links_.push_back(link);
      }
    }
  }
}

void FairSharing::share() {
  const auto num_links = static_cast<std::int32_t>(links_.size());
  num_shared_ += static_cast<std::int64_t>(component_flows_.size());
  offers_.clear();
  for (std::int32_t at : component_links_) {
    Link& link = links_[at];
    if (link.flows.empty()) continue;
    link.open = load(at);
    link.left = capacity(at);
    if (std::isfinite(link.left)) offers_.push_back({link.left / link.open, at});
  }
  for (std::int32_t slot : component_flows_) {
    Flow& flow = flows_[slot];
    flow.open = true;
    flow.before = flow.rate;
    if (std::isfinite(flow.limit)) offers_.push_back({flow.limit, num_links + slot});
  }
  std::make_heap(offers_.begin(), offers_.end(), std::greater<>());
  std::size_t open = component_flows_.size();
  while (open > 0 && !offers_.empty()) {
    const auto [rate, which] = offers_.front();
    std::pop_heap(offers_.begin(), offers_.end(), std::greater<>());
    offers_.pop_back();
    if (which >= num_links) {
      const std::int32_t slot = which - num_links;
      if (!flows_[slot].open) continue;
      fix(slot, rate, -1, 1);
      --open;
      continue;
    }
    Link& link = links_[which];
    if (link.open == 0) continue;
    const double share = std::max(link.left, 0.0) / link.open;
    const bool outdated = has(PlantedInSharing::NothingLeftOver);
    if (share > rate && !outdated) {
      push(share, which);
      continue;
    }
    for (const OfLink& one : link.flows) {
      if (!flows_[one.flow].open) continue;
      fix(one.flow, outdated ? rate : share, which, load(which));
      --open;
    }
  }
  for (std::int32_t slot : component_flows_)  // links without a limit
    if (flows_[slot].open) fix(slot, std::numeric_limits<double>::infinity(), -1, 1);
  for (std::int32_t at : component_links_) {
    double sum = 0;
    for (const OfLink& one : links_[at].flows) sum += flows_[one.flow].rate;
    links_[at].peak_rate = std::max(links_[at].peak_rate, sum);
  }
  for (std::int32_t slot : component_flows_)
    if (flows_[slot].rate != flows_[slot].before) changed_.push_back(slot);
}

void FairSharing::push(double rate, std::int32_t which) {
  offers_.push_back({rate, which});
  std::push_heap(offers_.begin(), offers_.end(), std::greater<>());
}

void FairSharing::fix(std::int32_t slot, double rate, std::int32_t bottleneck,
                      std::int32_t sharers) {
  Flow& flow = flows_[slot];
  flow.open = false;
  flow.rate = rate;
  flow.bottleneck = bottleneck;
  flow.sharers = sharers;
  for (std::int32_t at : flow.links) {
    --links_[at].open;
    if (std::isfinite(links_[at].left)) links_[at].left -= rate;
  }
}

double FairSharing::capacity(std::int32_t link) const {
  const double flows = load(link);
  if (has(PlantedInSharing::LinkTooFast) && flows > 2) return 1.5 * rates_.shared[link];
  return rates_.shared[link] / (1 + penalty_ * (1 - 1 / flows));
}

}  // namespace commrt
