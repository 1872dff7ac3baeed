// SPDX-License-Identifier: Apache-2.0
// Progressive filling: the link that offers its flows the least gives it to them, and the others
// share what that leaves. Offers only rise, so a heap with outdated entries finds the least one.
#include "sim/fair_sharing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace commrt {

namespace {

constexpr double kRounding = 1e-12;

}  // namespace

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
    const std::int32_t at = flow.links[hop];
    flow.limit = std::min({flow.limit, rates_.per_flow[at], rates_.shared[at]});
    touch(at);
  }
  for (std::int32_t at : flow.links) links_[at].limits += flow.limit;
  fresh_.push_back(slot);
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
    Link& left = links_[flow.links[hop]];
    left.limits = list.empty() ? 0 : left.limits - flow.limit;
    left.carried = list.empty() ? 0 : left.carried - flow.rate;
    if (!has(PlantedInSharing::LeaversForgotten)) touch(flow.links[hop]);
  }
  flow.links.clear();
  flow.rate = 0;
  free_.push_back(slot);
}

const std::vector<std::int32_t>& FairSharing::settle() {
  changed_.clear();
  ++round_;
  for (std::int32_t at : touched_) {
    links_[at].touched = false;
    links_[at].tight = is_tight(at);
  }
  for (std::int32_t at : touched_) {
    Link& link = links_[at];
    // A link that was tight has held flows back until now.
    if (link.tight || link.was_tight)
      for (const OfLink& one : link.flows) take(one.flow);
    link.was_tight = link.tight;
    find_component();
  }
  for (std::int32_t slot : fresh_) {
    if (!flows_[slot].links.empty()) take(slot);
    find_component();
  }
  touched_.clear();
  fresh_.clear();
  carry();
  return changed_;
}

void FairSharing::touch(std::int32_t link) {
  if (links_[link].touched) return;
  links_[link].touched = true;
  touched_.push_back(link);
}

bool FairSharing::is_tight(std::int32_t at) const {
  const Link& link = links_[at];
  return !link.flows.empty() && !(link.limits <= capacity(at) * (1 + kRounding));
}

void FairSharing::take(std::int32_t slot) {
  if (flows_[slot].seen == round_) return;
  flows_[slot].seen = round_;
  component_flows_.push_back(slot);
}

void FairSharing::find_component() {
  if (component_flows_.empty()) return;
  component_links_.clear();
  for (std::size_t at = 0; at < component_flows_.size(); ++at) {
    for (std::int32_t number : flows_[component_flows_[at]].links) {
      Link& link = links_[number];
      if (!link.tight || link.seen == round_) continue;
      link.seen = round_;
      component_links_.push_back(number);
      for (const OfLink& one : link.flows) take(one.flow);
    }
  }
  share();
  component_flows_.clear();
}

// Adds up what links carry now, and remembers the most.
void FairSharing::carry() {
  for (std::int32_t slot : changed_)
    for (std::int32_t at : flows_[slot].links)
      if (std::isfinite(flows_[slot].rate))
        links_[at].carried += flows_[slot].rate - flows_[slot].before;
  for (std::int32_t slot : changed_)
    for (std::int32_t at : flows_[slot].links)
      links_[at].peak_rate = std::max(links_[at].peak_rate, links_[at].carried);
}

void FairSharing::share() {
  num_shared_ += static_cast<std::int64_t>(component_flows_.size());
  offers_.clear();
  limited_.clear();
  for (std::int32_t at : component_links_) {
    Link& link = links_[at];
    link.open = load(at);
    link.left = capacity(at);
    offers_.push_back({link.left / link.open, at});
  }
  for (std::int32_t slot : component_flows_) {
    Flow& flow = flows_[slot];
    flow.open = true;
    flow.before = flow.rate;
    if (std::isfinite(flow.limit)) limited_.push_back({flow.limit, slot});
  }
  std::make_heap(offers_.begin(), offers_.end(), std::greater<>());
  if (!std::is_sorted(limited_.begin(), limited_.end()))
    std::sort(limited_.begin(), limited_.end());
  std::size_t open = component_flows_.size(), next = 0;
  while (open > 0 && !(offers_.empty() && next == limited_.size())) {
    const bool by_limit = next < limited_.size() &&
                          (offers_.empty() || limited_[next].first <= offers_.front().first);
    if (by_limit) {
      const auto [limit, slot] = limited_[next++];
      if (!flows_[slot].open) continue;
      fix(slot, limit, -1, 1);
      --open;
      continue;
    }
    const auto [rate, which] = offers_.front();
    std::pop_heap(offers_.begin(), offers_.end(), std::greater<>());
    offers_.pop_back();
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
    Link& link = links_[at];
    if (!link.tight) continue;
    --link.open;
    link.left -= rate;
  }
}

double FairSharing::capacity(std::int32_t link) const {
  const double flows = load(link);
  if (has(PlantedInSharing::LinkTooFast) && flows > 2) return 1.5 * rates_.shared[link];
  return rates_.shared[link] / (1 + penalty_ * (1 - 1 / flows));
}

}  // namespace commrt
