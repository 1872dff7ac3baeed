// SPDX-License-Identifier: Apache-2.0
// A plan without lengths: what calls have in common that differ in their lengths alone.
//
// A schedule depends on no length. So all that Python plans is kept once: the lowered program, and
// the rules by which offsets, fragments and stores follow from the number of elements. commrt's
// planning (planning/templates.py) hands the rules over, and has the definition of each.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/plan.hpp"

namespace commrt {

// Elements per rank of an operation whose blocks differ in length: none, one list that all ranks
// know, or what this rank sends to each and gets from each.
enum class Counts : uint8_t { None = 0, Known = 1, Pairs = 2 };

// The blocks of one buffer.
struct BlockRule {
  SpaceKind kind = SpaceKind::In;
  int64_t num = 0, den = 1;  // even blocks of so much of the full vector
  int nblk = 0;
  std::vector<uint8_t> used;    // scratch: blocks that nothing touches take no memory; empty: all
  std::vector<int32_t> parts;   // with counts: what each block holds; negative: nothing
};

// The widest messages of the schedule, over all ranks: `width` of `nblk` blocks.
struct MessageRule {
  int64_t width, nblk, num, den;
};

// Stores by the longest message, and by what the buffers of the node's ranks take together.
struct StoreRule {
  struct Kinds {
    Store first, adaptive;
  };
  size_t learns_from = 0;   // bytes of a message
  size_t beyond_cache = 0;  // bytes of the buffers
  Kinds is_short, cached, beyond;
};

// Where a message lands in its peer's result: a block of one of the peer's buffers.
struct LandingRule {
  uint32_t instr, send;
  uint32_t space;  // in landing_spaces
  int32_t block;
};

class PlanTemplate : public std::enable_shared_from_this<PlanTemplate> {
 public:
  // Everything that does not depend on lengths; finish() has not been called.
  Plan prototype;

  // Lengths of this rank's arrays.
  Counts counts = Counts::None;
  int rank = 0, size = 1;
  int64_t x_num = 1, x_den = 1;      // without counts: of the full vector
  int64_t out_num = 1, out_den = 1;
  bool x_is_own = false, out_is_own = false;  // with known counts: this rank's, and not all
  bool has_in = false, has_out = false;
  bool divides = false;  // the full vector has equal blocks

  // A schedule's.
  std::vector<BlockRule> spaces;
  int share = 1;  // with counts: blocks that one holder's data is cut into
  std::vector<MessageRule> messages;
  int64_t publishes = 0;
  int64_t chunk_nbytes = 0, long_from_nbytes = INT64_MAX, long_chunk_nbytes = 0;
  size_t lane_nbytes = 0;
  int slot_reuse = 0;
  StoreRule stores;
  int64_t on_node = 1;  // ranks on the fullest node
  std::vector<int32_t> instr_pairs;                     // with pairs: whose data it handles
  size_t shows_from_nbytes = SIZE_MAX;  // full vectors for which the symmetric heap matters
  bool wants_reach = false;             // it is not known yet what peers may reach
  std::vector<BlockRule> landing_spaces;
  std::vector<LandingRule> landings;

  // A library's collective.
  int64_t unit = 1;  // of its counts, per element
  bool is_blocked = false;

  // True if the plan of a call needs what peers may reach, which nobody has said yet.
  bool lacks_reach(int64_t num_elements) const {
    return wants_reach && shows(num_elements);
  }
  // The number of elements that a call gives, whether it is sent or not.
  int64_t given_elems(int64_t num_elements, const std::vector<int64_t>& given) const;
  // The plan for a full vector of so many elements; null where there can be none: Python says why.
  // `used`: a plan that nobody else has, or null; the new one is made in its memory.
  std::shared_ptr<const Plan> make(int64_t num_elements, const std::vector<int64_t>& given,
                                   Comm& comm, std::shared_ptr<Plan> used = nullptr) const;
  size_t nbytes() const;

 private:
  struct Cut {
    int64_t fragments;  // 0: they do not fit
    size_t longest_nbytes;
  };

  bool shows(int64_t num_elements) const {
    return static_cast<size_t>(num_elements) >= shows_from_nbytes / prototype.itemsize +
                                                   (shows_from_nbytes % prototype.itemsize != 0);
  }
  bool make_schedule(Plan& plan, int64_t num_elements, const std::vector<int64_t>& given,
                     Comm& comm) const;
  bool make_call(Plan& plan, int64_t num_elements, const std::vector<int64_t>& given) const;
  Cut cut(int64_t num_elements) const;
  Cut cut_counted(const int64_t* lengths, size_t num) const;
  bool cut_pairs(Plan& plan, const std::vector<int64_t>& given, Cut& all) const;
  int64_t part_length(int32_t part, const std::vector<int64_t>& given) const;
  void bounds(const BlockRule& rule, int64_t num_elements, const std::vector<int64_t>& given,
              std::vector<int64_t>& edges) const;
  void reach(Plan& plan, int64_t num_elements, const std::vector<int64_t>& given) const;
};

}  // namespace commrt
