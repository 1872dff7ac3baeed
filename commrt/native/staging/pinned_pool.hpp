// SPDX-License-Identifier: Apache-2.0
// A pool of pinned memory for messages: blocks come back in any order.
//
// A receive may wait for ever while later messages come and go, so messages cannot use a ring.
// A block has a power of two of bytes, and serves the next message of its size when it is free.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace commrt {

class PinnedPool {
 public:
  struct Block {
    unsigned char* at = nullptr;
    int size_class = 0;
  };

  static std::size_t nbytes_of(int size_class) { return kLeast << size_class; }
  static int class_for(std::size_t nbytes) {
    int found = 0;
    while (nbytes_of(found) < nbytes) ++found;
    return found;
  }

  // False where no block of that size is free, nor a somewhat larger one.
  bool take(int size_class, Block* block) {
    constexpr int kLarger = 3;  // classes: to allocate more may wait for the whole device
    for (int each = size_class; each <= size_class + kLarger; ++each) {
      auto& free = free_[static_cast<std::size_t>(each)];
      if (free.empty()) continue;
      *block = {free.back(), each};
      free.pop_back();
      return true;
    }
    return false;
  }
  void give_back(const Block& block) {
    free_[static_cast<std::size_t>(block.size_class)].push_back(block.at);
  }
  // Takes memory that the device gave for a block of this size.
  void add(void* base, int size_class) {
    all_.push_back(base);
    total_ += nbytes_of(size_class);
    give_back({static_cast<unsigned char*>(base), size_class});
  }
  // Takes the memory that the device gave at first, and cuts it into blocks: a quarter of it for
  // each of four sizes.
  void add_first(void* base, std::size_t nbytes) {
    all_.push_back(base);
    total_ += nbytes;
    auto* at = static_cast<unsigned char*>(base);
    for (const int size_class : {8, 6, 4, 2}) {
      for (std::size_t i = 0; i < nbytes / 4 / nbytes_of(size_class); ++i) {
        give_back({at, size_class});
        at += nbytes_of(size_class);
      }
    }
  }

  std::size_t total() const { return total_; }
  template <class F>
  void each(F function) const {
    for (void* base : all_) function(base);
  }

 private:
  static constexpr std::size_t kLeast = 256;
  std::array<std::vector<unsigned char*>, 48> free_;
  std::vector<void*> all_;
  std::size_t total_ = 0;
};

}  // namespace commrt
