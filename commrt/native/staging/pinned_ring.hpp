// SPDX-License-Identifier: Apache-2.0
// A ring of pinned memory for collectives: blocks come back in the order in which they were taken.
//
// Operations of a communicator end in the order of their copies back, so their memory comes
// back in that order: a ring is enough. Nothing is searched, nothing is split.
#pragma once

#include <cstddef>
#include <vector>

namespace commrt {

class PinnedRing {
 public:
  struct Part {
    unsigned char* at = nullptr;
    std::size_t slab = 0, end = 0;
  };

  // False where there is no room now.
  bool take(std::size_t nbytes, Part* part) {
    if (nbytes == 0) nbytes = kAlign;
    nbytes = (nbytes + kAlign - 1) / kAlign * kAlign;
    for (std::size_t i = slabs_.size(); i-- > 0;) {  // the latest is the largest
      Slab& slab = slabs_[i];
      if (slab.parts == 0) slab.head = slab.tail = 0;
      const bool wrapped = slab.parts != 0 && slab.head <= slab.tail;
      std::size_t at = slab.head;
      if (wrapped ? slab.tail - slab.head < nbytes : slab.nbytes - slab.head < nbytes) {
        if (wrapped || slab.tail < nbytes) continue;
        at = 0;
      }
      slab.head = at + nbytes;
      ++slab.parts;
      *part = {slab.base + at, i, slab.head};
      return true;
    }
    return false;
  }

  // Parts of a slab, in the order in which they were taken.
  void give_back(const Part& part) {
    Slab& slab = slabs_[part.slab];
    slab.tail = part.end;
    --slab.parts;
  }

  void add(void* base, std::size_t nbytes) {
    slabs_.push_back({static_cast<unsigned char*>(base), nbytes});
    total_ += nbytes;
  }

  std::size_t total() const { return total_; }
  std::size_t largest() const { return slabs_.empty() ? 0 : slabs_.back().nbytes; }
  template <class F>
  void each(F function) const {
    for (const Slab& slab : slabs_) function(slab.base);
  }

 private:
  static constexpr std::size_t kAlign = 256;
  struct Slab {
    unsigned char* base;
    std::size_t nbytes;
    std::size_t head = 0, tail = 0;  // used from tail on to head, around the end
    std::size_t parts = 0;
  };
  std::vector<Slab> slabs_;
  std::size_t total_ = 0;
};

}  // namespace commrt
