// SPDX-License-Identifier: Apache-2.0
// Bugs that tests plant in the engine, to prove that they find them.
//
// Only a build with the CMake option COMMRT_PLANTED_BUGS has any. In every other build is() is the
// constant false, so the compiler drops what a bug would do, and its name is not there either.
#pragma once

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef COMMRT_PLANTED_BUGS
#include <atomic>
#endif

namespace commrt {

// The bug that is planted in one work, by default None. A list of bugs is an enumeration from None
// to Count, with a function `std::vector<std::string> names_of(Bug)` beside it.
template <class Bug>
class PlantedBug {
#ifdef COMMRT_PLANTED_BUGS
 public:
  bool is(Bug bug) const { return planted_.load(std::memory_order_relaxed) == bug; }
  static std::vector<std::string> names() { return names_of(Bug::None); }
  // Throws std::invalid_argument for a name that is not in the list.
  void plant(const std::string& name) {
    const std::vector<std::string> all = names();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] == name) return planted_.store(static_cast<Bug>(i + 1));
    }
    if (name != "none") throw std::invalid_argument("no bug is called " + name);
    planted_.store(Bug::None);
  }

 private:
  std::atomic<Bug> planted_{Bug::None};  // by a test's thread

// Names of the bugs from the one after None on.
#define COMMRT_NAMES_OF_BUGS(Bug, ...)                                                    \
  std::vector<std::string> names_of(Bug) {                                                \
    static const char* const all[] = {__VA_ARGS__};                                       \
    static_assert(sizeof(all) / sizeof(all[0]) + 1 == static_cast<std::size_t>(Bug::Count), \
                  "each bug has a name");                                                 \
    return {std::begin(all), std::end(all)};                                              \
  }
#else
 public:
  static constexpr bool is(Bug) { return false; }
  static std::vector<std::string> names() { refuse(); }
  void plant(const std::string&) { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    throw std::runtime_error(
        "this build of the engine has no planted bugs. Tests that plant bugs need the CMake option "
        "COMMRT_PLANTED_BUGS=ON, which `make install` sets; by hand: pip install . "
        "-C cmake.define.COMMRT_PLANTED_BUGS=ON");
  }

#define COMMRT_NAMES_OF_BUGS(Bug, ...)
#endif
};

}  // namespace commrt
