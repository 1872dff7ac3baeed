// SPDX-License-Identifier: Apache-2.0
// The plan of a staged collective on device memory: which bytes the device copies to pinned memory
// and back, and what the host runs in between. It depends on the call's arguments alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "devices/box_launch.hpp"

namespace commrt {

class Plan;

// Bytes of one of the call's arrays, and where they are in pinned memory.
struct StagedCopy {
  int array = 0;
  std::size_t at = 0;      // in the array, of the first piece
  std::size_t stride = 0;  // from a piece to the next one, there
  std::size_t nbytes = 0;
  std::size_t pinned = 0;  // from where the piece's memory begins
};

// A launch that packs boxes of arrays into a buffer of the device, or takes them out of it.
struct StagedLaunch {
  BoxLaunch launch;         // with the table, and without addresses of arrays and buffer
  int buffer = 0;           // numbers of the call's arrays
  std::vector<int> arrays;
};

struct StagedPart {
  std::shared_ptr<const Plan> runs;  // on the host
  std::vector<StagedLaunch> packs, unpacks;
  std::vector<StagedCopy> in, out;
  std::size_t out_at = 0;            // of the host's output, in the piece's memory
  // If has_table, the host is given a table of addresses instead. These are their offsets in the
  // piece's memory, in bytes.
  std::vector<std::size_t> table;
  bool has_table = false;
};

// The facts that must be the same on all ranks, compared before any piece begins. Each fact is one
// word, which is 0 on ranks that do not know the fact. The ranks compute the maxima of the words
// and of their complements. Both maxima belong to the same word only if all ranks that know the
// fact agree.
struct StagedAgreement {
  std::shared_ptr<const Plan> runs;  // the maximum over ranks, of the words and their complements
  std::vector<std::uint64_t> words;
  std::vector<std::string> names;    // of the facts, for messages

  std::size_t nbytes() const { return 2 * words.size() * sizeof(std::uint64_t); }
  // Puts there what this rank says.
  void say(std::uint64_t* place) const;
  // Names the facts on which ranks differ, given what came of it; empty: none.
  std::string differences(const std::uint64_t* heard) const;
};

// It can share itself, so that a call has the very pointer that Python's object has. Another
// pointer would be dropped with Python's lock, in whatever thread ends the call.
struct StagedPlan : std::enable_shared_from_this<StagedPlan> {
  std::vector<StagedPart> parts;  // of each piece; or of all but the last, and of the last
  std::int64_t pieces = 1;
  std::size_t slot_nbytes = 0;    // pinned memory of a piece
  bool serial = false;            // a piece begins when the one before is back on the device
  bool by_kernel = false;         // kernels copy to pinned memory and back, and no copy engine
  std::shared_ptr<const StagedAgreement> agreement;  // null: the ranks have compared before
  std::shared_ptr<const std::string> words;  // how another rank makes it (device_refusals.hpp)

  // Bytes of memory that it takes, with the plans that it runs on the host.
  std::size_t memory_nbytes() const;

  const StagedPart& part(std::size_t piece) const {
    const auto all = static_cast<std::size_t>(pieces);
    if (parts.size() == all) return parts[piece];
    return piece + 1 == all ? parts.back() : parts.front();
  }
};

}  // namespace commrt
