// SPDX-License-Identifier: Apache-2.0
// Allocations of simulated devices, and the ranges that were touched in them.
#include "devices/sim_memory.hpp"

#include <cstdlib>
#include <cstring>
#include <limits>

namespace commrt::sim {
namespace {

// The byte of fresh memory: not zero, not a small number, and a NaN of every float type.
constexpr int kFresh = 0xff;
constexpr int kFreed = 0xfb;
// Freed memory is kept this long.
constexpr std::size_t kMostFreed = 256;
constexpr std::size_t kMostFreedBytes = std::size_t{64} << 20;
constexpr std::size_t kAlignment = 256;
// So many values of a flag are told apart. Of an older value, the simulation assumes that a reader
// knows more than it does.
constexpr std::size_t kMostValues = 16;

const char* kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::Device: return "device memory";
    case MemoryKind::Pinned: return "pinned memory";
    case MemoryKind::Managed: return "managed memory";
    default: return "pageable memory";
  }
}

}  // namespace

std::string Allocation::name() const {
  if (!id) return kind_name(kind);
  return std::string(kind_name(kind)) + " " + std::to_string(id);
}

void Flag::write(std::uint32_t value, const Clock& clock) {
  if (seen(value)) return;
  written_.emplace_back(value, clock);
  if (written_.size() > kMostValues) written_.pop_front();
}

const Clock* Flag::seen(std::uint32_t value) const {
  for (auto at = written_.rbegin(); at != written_.rend(); ++at)
    if (at->first == value) return &at->second;
  return nullptr;
}

const Clock* Flag::first_to_reach(std::uint32_t value) const {
  for (auto& [reached, clock] : written_)
    if (flag_reached(reached, value)) return &clock;
  return nullptr;
}

Memory::Memory() { pageable_.nbytes = std::numeric_limits<std::uint64_t>::max(); }

Memory::~Memory() {
  for (auto& [base, allocation] : by_base_) std::free(reinterpret_cast<void*>(base));
}

Allocation* Memory::alloc(MemoryKind kind, int device, std::size_t nbytes, bool poison) {
  if (nbytes > std::numeric_limits<std::size_t>::max() - kAlignment) return nullptr;
  const std::size_t whole = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, whole ? whole : kAlignment);
  if (!memory) return nullptr;
  if (poison) std::memset(memory, kFresh, nbytes);
  auto made = std::make_unique<Allocation>();
  made->id = next_id_++;
  made->kind = kind;
  made->device = device;
  made->base = reinterpret_cast<std::uint64_t>(memory);
  made->nbytes = nbytes;
  Allocation* allocation = made.get();
  by_base_[allocation->base] = std::move(made);
  live_nbytes_ += nbytes;
  ++live_count_;
  return allocation;
}

void Memory::free(Allocation* allocation, bool poison) {
  allocation->freed = true;
  allocation->touched.clear();
  allocation->flags.clear();
  if (poison)
    std::memset(reinterpret_cast<void*>(allocation->base), kFreed, allocation->nbytes);
  live_nbytes_ -= allocation->nbytes;
  --live_count_;
  freed_nbytes_ += allocation->nbytes;
  freed_.push_back(allocation);
  while (freed_.size() > kMostFreed || freed_nbytes_ > kMostFreedBytes) forget_oldest();
}

void Memory::forget_oldest() {
  Allocation* oldest = freed_.front();
  freed_.pop_front();
  freed_nbytes_ -= oldest->nbytes;
  if (latest_ == oldest) latest_ = nullptr;
  std::free(reinterpret_cast<void*>(oldest->base));
  by_base_.erase(oldest->base);
}

Allocation* Memory::find(std::uint64_t address) {
  const auto holds = [address](const Allocation* one) {
    return address >= one->base && address - one->base < (one->nbytes ? one->nbytes : 1);
  };
  if (latest_ && holds(latest_)) return latest_;
  auto next = by_base_.upper_bound(address);
  if (next == by_base_.begin()) return &pageable_;
  Allocation* found = std::prev(next)->second.get();
  if (!holds(found)) return &pageable_;
  return latest_ = found;
}

namespace {

using Ranges = std::map<std::uint64_t, Touched>;

// Cuts the range that goes on over `at`, if there is one.
void cut(Ranges& ranges, std::uint64_t at) {
  auto next = ranges.lower_bound(at);
  if (next == ranges.begin()) return;
  auto before = std::prev(next);
  if (before->second.end <= at) return;
  Touched rest = before->second;
  before->second.end = at;
  ranges.emplace_hint(next, at, std::move(rest));
}

void check(const Touched& range, bool writes, Actor self, const Clock& clock,
           std::vector<Conflict>* conflicts) {
  const Access& write = range.write;
  if (write.what && write.actor != self && clock.of(write.actor) < write.tick)
    conflicts->push_back({write, true});
  if (!writes) return;
  for (const Access& read : range.reads)
    if (read.actor != self && clock.of(read.actor) < read.tick)
      conflicts->push_back({read, false});
}

// Flags that a plain write covers.
void forget_flags(std::unordered_map<std::uint64_t, Flag>& flags, std::uint64_t address,
                  std::uint64_t end) {
  if (flags.size() > (end - address) / sizeof(std::uint32_t)) {
    for (std::uint64_t at = address; at < end; ++at) flags.erase(at);
    return;
  }
  for (auto at = flags.begin(); at != flags.end();)
    at = at->first >= address && at->first < end ? flags.erase(at) : std::next(at);
}

void add_read(Touched& range, const Access& access, const Clock& clock) {
  auto& reads = range.reads;
  // Accesses that come after this read also come after the reads that this read follows.
  reads.erase(std::remove_if(reads.begin(), reads.end(),
                             [&](const Access& one) {
                               return one.actor == access.actor ||
                                      clock.of(one.actor) >= one.tick;
                             }),
              reads.end());
  reads.push_back(access);
}

}  // namespace

void Memory::touch(Allocation* allocation, std::uint64_t address, std::size_t nbytes, bool writes,
                   const Access& access, const Clock& clock, std::vector<Conflict>* conflicts) {
  if (!nbytes) return;
  Ranges& ranges = allocation->touched;
  const std::uint64_t end = address + nbytes;
  auto exact = ranges.find(address);
  if (exact == ranges.end() || exact->second.end != end) {
    cut(ranges, address);
    cut(ranges, end);
    exact = ranges.end();
  }
  auto at = exact != ranges.end() ? exact : ranges.lower_bound(address);
  if (writes) {
    if (!allocation->flags.empty()) forget_flags(allocation->flags, address, end);
    const auto first = at;
    auto last = at;
    for (; last != ranges.end() && last->first < end; ++last)
      check(last->second, true, access.actor, clock, conflicts);
    if (first != last && first->first == address) {
      ranges.erase(std::next(first), last);
      first->second.end = end;
      first->second.write = access;
      first->second.reads.clear();
    } else {
      ranges.erase(first, last);
      ranges[address] = Touched{end, access, {}};
    }
    return;
  }
  std::uint64_t from = address;
  while (from < end) {
    if (at == ranges.end() || at->first > from) {  // a gap
      const std::uint64_t to = at == ranges.end() ? end : std::min(end, at->first);
      at = ranges.emplace_hint(at, from, Touched{to, {}, {}});
    } else {
      check(at->second, false, access.actor, clock, conflicts);
    }
    add_read(at->second, access, clock);
    from = at->second.end;
    ++at;
  }
}

}  // namespace commrt::sim
