// SPDX-License-Identifier: Apache-2.0
// Lists that calls fill and empty, in memory that stays.
#pragma once

#include <cstddef>
#include <vector>

namespace commrt {

// A list that the next call of this thread uses again, as long as it is short.
template <class T>
class KeptList {
 public:
  explicit KeptList(std::vector<T>& list) : list_(list) {}
  KeptList(const KeptList&) = delete;
  KeptList& operator=(const KeptList&) = delete;
  ~KeptList() {
    constexpr size_t kMostBytes = 64 << 10;
    list_.clear();
    if (list_.capacity() * sizeof(T) > kMostBytes) list_.shrink_to_fit();
  }
  std::vector<T>* operator->() { return &list_; }
  std::vector<T>& operator*() { return list_; }

 private:
  std::vector<T>& list_;
};

}  // namespace commrt
