// SPDX-License-Identifier: Apache-2.0
// Finds what is not finite by its exponent, whose bits are all set: added to the lowest bit of the
// exponent, they carry into the sign. So a block takes three operations of integers for each word,
// which every compiler makes vectors of.
#include "kernels/finite.hpp"

#include <algorithm>
#include <cstring>

namespace commrt {

namespace {

constexpr int64_t kBlock = 2048;  // elements between two looks

template <class Word>
int64_t find(const void* data, int64_t count, Word lowest_of_exponent) {
  constexpr int kSign = 8 * sizeof(Word) - 1;
  constexpr auto kMagnitude = static_cast<Word>(~(Word{1} << kSign));
  const auto* at = static_cast<const unsigned char*>(data);
  const auto carried = [&](int64_t i) {
    Word word;
    std::memcpy(&word, at + static_cast<size_t>(i) * sizeof word, sizeof word);
    return static_cast<Word>(static_cast<Word>(word & kMagnitude) + lowest_of_exponent);
  };
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t end = std::min(count, start + kBlock);
    Word any = 0;
    for (int64_t i = start; i < end; ++i) any = static_cast<Word>(any | carried(i));
    if ((any >> kSign) == 0) continue;
    for (int64_t i = start; i < end; ++i) {
      if ((carried(i) >> kSign) != 0) return i;
    }
  }
  return -1;
}

int64_t of_pairs(int64_t found) { return found < 0 ? found : found / 2; }

template <class Word>
bool has_nan(const void* data, int64_t first, int num, Word lowest_of_exponent) {
  for (int64_t i = first; i < first + num; ++i) {
    Word word;
    std::memcpy(&word, static_cast<const unsigned char*>(data) + static_cast<size_t>(i) * sizeof word,
                sizeof word);
    const auto exponent = static_cast<Word>(
        static_cast<Word>(~static_cast<Word>(lowest_of_exponent - 1)) &
        static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1))));
    const bool all_set = (word & exponent) == exponent;
    if (all_set && (word & static_cast<Word>(lowest_of_exponent - 1)) != 0) return true;
  }
  return false;
}

}  // namespace

bool is_nan_at(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::F16: return has_nan<uint16_t>(data, index, 1, 1u << 10);
    case DType::BF16: return has_nan<uint16_t>(data, index, 1, 1u << 7);
    case DType::F32: return has_nan<uint32_t>(data, index, 1, 1u << 23);
    case DType::F64: return has_nan<uint64_t>(data, index, 1, uint64_t{1} << 52);
    case DType::C64: return has_nan<uint32_t>(data, 2 * index, 2, 1u << 23);
    case DType::C128: return has_nan<uint64_t>(data, 2 * index, 2, uint64_t{1} << 52);
    case DType::F8E5M2: return has_nan<uint8_t>(data, index, 1, 1u << 2);
    default: return true;
  }
}

int64_t first_not_finite(DType dtype, const void* data, int64_t count) {
  constexpr uint64_t kDouble = uint64_t{1} << 52;
  constexpr uint32_t kSingle = 1u << 23;
  switch (dtype) {
    case DType::F16: return find<uint16_t>(data, count, 1u << 10);
    case DType::BF16: return find<uint16_t>(data, count, 1u << 7);
    case DType::F32: return find<uint32_t>(data, count, kSingle);
    case DType::F64: return find<uint64_t>(data, count, kDouble);
    case DType::C64: return of_pairs(find<uint32_t>(data, 2 * count, kSingle));
    case DType::C128: return of_pairs(find<uint64_t>(data, 2 * count, kDouble));
    case DType::F8E4M3: return find<uint8_t>(data, count, 1);  // it has no infinity
    case DType::F8E5M2: return find<uint8_t>(data, count, 1u << 2);
    default: return -1;
  }
}

}  // namespace commrt
