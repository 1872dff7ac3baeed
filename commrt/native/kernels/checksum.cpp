// SPDX-License-Identifier: Apache-2.0
// Four lanes of multiplications and rotations, as in XXH64 (Collet: xxHash, 2012), so that a core
// has always several of them under way. Each step can be undone, so no single flip is lost.
#include "kernels/checksum.hpp"

#include <cstring>
#include <initializer_list>

namespace commrt {

namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87ull, kP2 = 0xC2B2AE3D27D4EB4Full,
                   kP3 = 0x165667B19E3779F9ull, kP4 = 0x85EBCA77C2B2AE63ull,
                   kP5 = 0x27D4EB2F165667C5ull;

inline uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

inline uint64_t word_at(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t stirred(uint64_t lane, uint64_t word) {
  return rotated(lane + word * kP2, 31) * kP1;
}

}  // namespace

uint64_t checksum(const void* data, std::size_t nbytes, uint64_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  const auto* const end = at + nbytes;
  uint64_t sum = seed + kP5;
  if (nbytes >= 32) {
    uint64_t a = seed + kP1 + kP2, b = seed + kP2, c = seed, d = seed - kP1;
    for (; end - at >= 32; at += 32) {
      a = stirred(a, word_at(at));
      b = stirred(b, word_at(at + 8));
      c = stirred(c, word_at(at + 16));
      d = stirred(d, word_at(at + 24));
    }
    sum = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18);
    for (const uint64_t lane : {a, b, c, d}) sum = (sum ^ stirred(0, lane)) * kP1 + kP4;
  }
  sum += nbytes;
  for (; end - at >= 8; at += 8) sum = rotated(sum ^ stirred(0, word_at(at)), 27) * kP1 + kP4;
  for (; at != end; ++at) sum = rotated(sum ^ *at * kP5, 11) * kP1;
  sum = (sum ^ sum >> 33) * kP2;
  sum = (sum ^ sum >> 29) * kP3;
  return sum ^ sum >> 32;
}

}  // namespace commrt
