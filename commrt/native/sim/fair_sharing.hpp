// SPDX-License-Identifier: Apache-2.0
// Max-min fair rates of flows that share links. A flow that comes or goes changes the rates of
// those that share a link with it, directly or by way of others, and of no others.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "planted_bugs.hpp"

namespace commrt {

// Wrong rules that tests plant, to prove that they find them.
enum class PlantedInSharing : int {
  None = 0,
  NothingLeftOver,  // what a flow cannot use of a link is lost to the others
  LeaversForgotten, // flows that stay keep their rates when others go
  LinkTooFast,      // a link carries more than its rate
  Count
};
std::vector<std::string> names_of(PlantedInSharing);

struct LinkRates {
  std::vector<double> shared;    // bytes per microsecond of all flows of a link together
  std::vector<double> per_flow;  // the most that one flow gets of it
};

class FairSharing {
 public:
  // `penalty`: a link with n flows carries 1 / (1 + penalty (1 - 1/n)) of its rate.
  FairSharing(LinkRates links, double penalty);

  // Adds a flow over these links, at least one; returns its slot, which another one gets later.
  std::int32_t add(const std::int32_t* begin, const std::int32_t* end);
  void remove(std::int32_t slot);

  // Shares anew what flows came to or left; returns the slots whose rate is another one now.
  const std::vector<std::int32_t>& settle();

  double rate(std::int32_t slot) const { return flows_[slot].rate; }
  // The link that holds a flow back, or -1: its own limit does. And the flows that share it.
  std::int32_t bottleneck(std::int32_t slot) const { return flows_[slot].bottleneck; }
  std::int32_t sharers(std::int32_t slot) const { return flows_[slot].sharers; }
  std::int32_t load(std::int32_t link) const {
    return static_cast<std::int32_t>(links_[link].flows.size());
  }
  // The most that a link ever carried at once: bytes per microsecond, and flows.
  double peak_rate(std::int32_t link) const { return links_[link].peak_rate; }
  std::int32_t peak_flows(std::int32_t link) const { return links_[link].peak_flows; }
  // Flows that were given a rate, each as often as it was.
  std::int64_t num_shared() const { return num_shared_; }

  PlantedBug<PlantedInSharing> planted;
  bool has(PlantedInSharing bug) const { return planted.is(bug); }

 private:
  struct OfLink {
    std::int32_t flow;
    std::int32_t hop;
  };
  // A link is tight if its flows could be faster together than it is. No other link holds a flow
  // back, whatever the rest does, so only tight links make flows depend on each other.
  struct Link {
    double left = 0;
    double limits = 0;  // of its flows, all together
    double carried = 0; // likewise their rates
    double peak_rate = 0;
    std::int64_t seen = 0;
    std::int32_t open = 0;  // flows without a rate yet
    std::int32_t peak_flows = 0;
    bool touched = false;
    bool tight = false;
    bool was_tight = false;  // when rates were found last
    std::vector<OfLink> flows;
  };
  struct Flow {
    std::vector<std::int32_t> links;
    std::vector<std::int32_t> places;  // in the lists of its links
    double limit = 0;
    double rate = 0;
    double before = 0;
    std::int32_t bottleneck = -1;
    std::int32_t sharers = 0;
    std::int64_t seen = 0;
    bool open = false;
  };
  using Offer = std::pair<double, std::int32_t>;  // rate; a link, or a flow

  void touch(std::int32_t link);
  // Adds a flow to the component, or all that depends on those that are in it.
  void take(std::int32_t slot);
  void find_component();
  bool is_tight(std::int32_t link) const;
  void carry();
  void share();
  void push(double rate, std::int32_t which);
  void fix(std::int32_t slot, double rate, std::int32_t bottleneck, std::int32_t sharers);
  double capacity(std::int32_t link) const;

  LinkRates rates_;
  double penalty_;
  std::vector<Link> links_;
  std::vector<Flow> flows_;
  std::vector<std::int32_t> free_, touched_, changed_, fresh_;
  std::vector<std::int32_t> component_links_, component_flows_;
  std::vector<Offer> offers_;   // of links: a heap
  std::vector<Offer> limited_;  // of flows, rising
  std::int64_t round_ = 0;
  std::int64_t num_shared_ = 0;
};

}  // namespace commrt
