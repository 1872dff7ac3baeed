// SPDX-License-Identifier: Apache-2.0
#include "engine/far_packets.hpp"

namespace commrt {

FarPackets& FarPackets::of_process() {
  static auto* const all = new FarPackets;  // engines may outlive what main() has destroyed
  return *all;
}

void FarPackets::count_sent(int mpi_rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = static_cast<size_t>(mpi_rank);
  if (place >= sent_.size()) sent_.resize(place + 1);
  ++sent_[place];
}

void FarPackets::count_taken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++taken_;
}

std::vector<uint64_t> FarPackets::sent(size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint64_t> counts = sent_;
  counts.resize(size);
  return counts;
}

uint64_t FarPackets::taken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return taken_;
}

}  // namespace commrt
