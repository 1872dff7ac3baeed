// SPDX-License-Identifier: Apache-2.0
// Carries a relay's frames by TCP: two connections to each rank of another node, one for each lane.
//
// Whoever has a frame to send writes it, and the kernel takes it, with its payload, from where it
// lies. What the kernel has no room for goes once it has. Whoever looks at the poller receives:
// payloads, and messages whose receive is there, go straight to where they belong.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/relay.hpp"
#include "engine/tcp_poller.hpp"

namespace commrt {

class TcpLinks final : public Relay::Sender {
 public:
  // Connected sockets of a rank, by lane, which are this object's from now on. The relay owns this.
  struct Sockets {
    int peer;
    int by_lane[Relay::kLanes];
  };
  TcpLinks(Relay& relay, const std::vector<Sockets>& sockets);
  ~TcpLinks() override;
  TcpLinks(const TcpLinks&) = delete;
  TcpLinks& operator=(const TcpLinks&) = delete;

  void send(int peer, Relay::Lane lane) override;
  void drop(int peer) override;
  // Ends all connections at once.
  void stop() override;
  // The number of connections that have not ended.
  int num_open() const { return num_open_.load(std::memory_order_acquire); }

 private:
  class Link;

  Relay& relay_;
  Link* link_of(int peer, size_t lane) const;

  std::vector<std::unique_ptr<Link>> links_;  // by rank and lane; null: none
  std::atomic<int> num_open_{0};
};

}  // namespace commrt
