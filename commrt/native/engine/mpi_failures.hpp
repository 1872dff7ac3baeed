// SPDX-License-Identifier: Apache-2.0
// ULFM's word on which ranks of a communicator have failed (MPI's user-level failure mitigation).
//
// MPI hears of a failure by its launcher, and only while somebody calls it. So whoever asks here
// lets it make progress first. Asking is local, and sends nothing.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/mpi_api.hpp"

namespace commrt {

class MpiFailures {
 public:
  // `places[m]`: the rank of member m in `comm`.
  MpiFailures(Handle comm, const std::vector<int>& places);

  // Returns the members that have failed since the last call.
  std::vector<int> ask();

  // Looks up the functions and constants that this needs; returns the name of the first that is
  // missing, empty when complete. Without it nobody may make one.
  static std::string load(const std::unordered_map<std::string, uint64_t>& found);
  static bool is_loaded();
  // True if the code of a failed call says that a rank has failed, or that the communicator was
  // revoked.
  static bool is_failure(int code);
  static bool is_revocation(int code);

 private:
  const Handle comm_;
  std::vector<int> member_of_;  // by rank of the communicator, -1: none
  std::vector<bool> known_;     // by rank of the communicator
  int num_known_ = 0;
};

}  // namespace commrt
