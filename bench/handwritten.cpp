// SPDX-License-Identifier: Apache-2.0
// The yardstick of the schedule engine: allreduce of float32 between two ranks, written by
// hand for exactly that. Compiled on the fly by `python -m commrt.bench handwritten`.
//
// `exchange` is recursive doubling: each rank shows its whole vector, both add.
// `direct` is reduce-scatter and allgather: per chunk, show the peer's half, add the own
// half from the own input and the peer's slot, show the sum, take the peer's sum.
// `cross` is the bound of both: each rank shows its vector and only reads the other's.
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kInline = 48;

struct alignas(64) Line {
  std::atomic<uint64_t> seq;
  uint64_t unused;
  unsigned char payload[kInline];
};

struct Region {
  Line lines[64];
  alignas(64) std::atomic<uint64_t> consumed;
  alignas(4096) unsigned char slots[4 << 20];
};

struct Side {
  Region* mine;
  const Region* theirs;
  uint64_t sent = 0, taken = 0;
};

void wait_for(const Line& line, uint64_t seq) {
  while (line.seq.load(std::memory_order_acquire) != seq) __builtin_ia32_pause();
}

void add(float* out, float* out2, const float* a, const float* b, size_t n) {
  if (out2 == nullptr) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
  } else {
    for (size_t i = 0; i < n; ++i) out2[i] = out[i] = a[i] + b[i];
  }
}

unsigned char* slot(Region* region, uint64_t id, size_t nbytes) {
  const size_t slots = sizeof(region->slots) / nbytes;
  return region->slots + (id % (slots < 4 ? slots : 4)) * nbytes;
}

void may_reuse(const Side& s, uint64_t id) {
  while (id >= 4 && s.theirs->consumed.load(std::memory_order_acquire) < id - 3) {
    __builtin_ia32_pause();
  }
}

void show(Side& s) {
  s.mine->lines[s.sent & 63].seq.store(s.sent + 1, std::memory_order_release);
  ++s.sent;
}

// Shows m values in a slot and returns the other rank's, once they are there.
const float* trade(Side& s, const float* values, size_t m, size_t chunk) {
  may_reuse(s, s.sent);
  std::memcpy(slot(s.mine, s.sent, chunk * 4), values, m * 4);
  show(s);
  wait_for(s.theirs->lines[s.taken & 63], s.taken + 1);
  return reinterpret_cast<const float*>(
      slot(const_cast<Region*>(s.theirs), s.taken, chunk * 4));
}

void took(Side& s) { s.mine->consumed.store(++s.taken, std::memory_order_release); }

}  // namespace

extern "C" {

size_t handwritten_region_nbytes() { return sizeof(Region); }

void* handwritten_side(void* regions, int rank) {
  auto* all = static_cast<Region*>(regions);
  return new Side{&all[rank], &all[1 - rank]};
}

void handwritten_exchange(void* side, const float* in, float* out, size_t n, size_t chunk,
                          int repetitions) {
  Side& s = *static_cast<Side*>(side);
  for (int r = 0; r < repetitions; ++r) {
    if (n * 4 <= kInline) {
      Line& line = s.mine->lines[s.sent & 63];
      may_reuse(s, s.sent);
      std::memcpy(line.payload, in, n * 4);
      show(s);
      const Line& theirs = s.theirs->lines[s.taken & 63];
      wait_for(theirs, s.taken + 1);
      float value[kInline / 4];
      std::memcpy(value, theirs.payload, n * 4);
      add(out, nullptr, in, value, n);
      took(s);
      continue;
    }
    for (size_t at = 0; at < n; at += chunk) {
      const size_t m = n - at < chunk ? n - at : chunk;
      const float* value = trade(s, in + at, m, chunk);
      add(out + at, nullptr, in + at, value, m);
      took(s);
    }
  }
}

// Reads a float of every line: what is left is writing a slot and moving its lines.
float handwritten_cross(void* side, const float* in, size_t n, size_t chunk, int repetitions) {
  Side& s = *static_cast<Side*>(side);
  float seen = 0;
  for (int r = 0; r < repetitions; ++r) {
    for (size_t at = 0; at < n; at += chunk) {
      const size_t m = n - at < chunk ? n - at : chunk;
      const float* value = trade(s, in + at, m, chunk);
      for (size_t i = 0; i < m; i += 16) seen += value[i];
      took(s);
    }
  }
  return seen;
}

void handwritten_direct(void* side, int rank, const float* in, float* out, size_t n,
                        size_t chunk, int repetitions) {
  Side& s = *static_cast<Side*>(side);
  const size_t half = n / 2;
  const size_t own = rank == 0 ? 0 : half, own_n = rank == 0 ? half : n - half;
  const size_t other = rank == 0 ? half : 0, other_n = n - own_n;
  const size_t longest = own_n > other_n ? own_n : other_n;
  for (int r = 0; r < repetitions; ++r) {
    for (size_t at = 0; at < longest; at += chunk) {
      const size_t theirs_n = at >= other_n ? 0 : other_n - at < chunk ? other_n - at : chunk;
      const size_t mine_n = at >= own_n ? 0 : own_n - at < chunk ? own_n - at : chunk;
      may_reuse(s, s.sent);
      std::memcpy(slot(s.mine, s.sent, chunk * 4), in + other + at, theirs_n * 4);
      show(s);
      wait_for(s.theirs->lines[s.taken & 63], s.taken + 1);
      const auto* value = reinterpret_cast<const float*>(
          slot(const_cast<Region*>(s.theirs), s.taken, chunk * 4));
      may_reuse(s, s.sent);
      auto* sum = reinterpret_cast<float*>(slot(s.mine, s.sent, chunk * 4));
      add(out + own + at, sum, in + own + at, value, mine_n);
      took(s);
      show(s);
      wait_for(s.theirs->lines[s.taken & 63], s.taken + 1);
      std::memcpy(out + other + at, slot(const_cast<Region*>(s.theirs), s.taken, chunk * 4),
                  theirs_n * 4);
      took(s);
    }
  }
}

}  // extern "C"
