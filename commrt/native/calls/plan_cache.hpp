// SPDX-License-Identifier: Apache-2.0
// The plans of one communicator, and what new ones are made of.
//
// A call is found by its key in about 20 ns. If its length is new, its family may have a template
// for such lengths, and the plan is made of it here. Only where there is none does Python choose
// and plan. All of it is bounded by bytes.
//
// A plan is some forty lines of memory. Writing and reading them takes longer than all the rest of
// planning, unless the core has them in a near cache. So a new plan is young: it takes the memory
// of a young plan that goes, and all young ones together fit into that cache. A length that comes
// back after its young plan went is kept for longer, among those of which the one that was not
// used for longest goes first. (2Q: Johnson, Shasha, VLDB 1994, section 2.)
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/box_template.hpp"
#include "engine/plan_template.hpp"

namespace commrt {

namespace nb = nanobind;

struct PlanKey {
  static constexpr int64_t kNoCount = -1;

  int64_t count;
  uint32_t what;  // operation, dtype, reduction, kind of device; or the number of a family
  int32_t root;
  bool operator==(const PlanKey& other) const {
    return count == other.count && what == other.what && root == other.root;
  }
  static uint32_t pack(int coll, DType dtype, int redop, int device) {
    return static_cast<uint32_t>(coll) | static_cast<uint32_t>(dtype) << 8 |
           static_cast<uint32_t>(redop) << 16 | static_cast<uint32_t>(device != kHost) << 24;
  }
};

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    uint64_t h = static_cast<uint64_t>(key.count) * 0x9E3779B97F4A7C15ull;
    h ^= (static_cast<uint64_t>(key.what) << 32 | static_cast<uint32_t>(key.root)) *
         0xC2B2AE3D27D4EB4Full;
    return h ^ (h >> 29);
  }
};

using PlanPtr = std::shared_ptr<const Plan>;

// The key of an operation whose lengths differ by rank. Two calls are the same only if their
// counts are equal; an equal hash alone is not enough.
struct VectorKey {
  PlanKey plain;
  std::vector<int64_t> counts;
  bool operator==(const VectorKey& other) const {
    return plain == other.plain && counts == other.counts;
  }
};

struct VectorKeyHash {
  size_t operator()(const VectorKey& key) const {
    uint64_t h = PlanKeyHash()(key.plain);
    for (const int64_t count : key.counts) {
      h = (h ^ static_cast<uint64_t>(count)) * 0x9E3779B97F4A7C15ull;
      h ^= h >> 32;
    }
    return h;
  }
};

// The calls whose young plans went last: about as many as plans are kept. A few others pass for
// one of them, and their plans are then kept at once.
class GoneKeys {
 public:
  void add(uint64_t hash) {
    if (tags_.empty()) tags_.resize(kNum);
    tags_[place(hash)] = tag(hash);
  }
  // True if it is there; it is not any more then.
  bool take(uint64_t hash) {
    if (tags_.empty() || tags_[place(hash)] != tag(hash)) return false;
    tags_[place(hash)] = 0;
    return true;
  }

 private:
  static constexpr int kBits = 9;
  static constexpr size_t kNum = 1 << kBits;
  static uint64_t mixed(uint64_t hash) { return hash * 0x9E3779B97F4A7C15ull; }
  static size_t place(uint64_t hash) { return mixed(hash) >> (64 - kBits); }
  static uint16_t tag(uint64_t hash) {
    return static_cast<uint16_t>(mixed(hash) >> (64 - kBits - 16) | 1);
  }
  std::vector<uint16_t> tags_;
};

// Calls that differ only in their lengths: what runs them, by the length of the full vector.
class PlanFamily : public std::enable_shared_from_this<PlanFamily> {
 public:
  // `key`: of its calls, without their counts. `unit`: the full vector's elements per count.
  PlanFamily(const PlanKey& key, int64_t unit) : key_(key), unit_(unit) {}

  // The template of that name, to be added for more lengths; null: there is none.
  std::shared_ptr<PlanTemplate> named(const std::string& label) const;
  const PlanTemplate* at(int64_t num_elements) const;
  size_t nbytes() const { return nbytes_; }
  const PlanKey& key() const { return key_; }
  int64_t unit() const { return unit_; }
  // Makes the plans of calls that move boxes; null where this is no family of such calls.
  const BoxTemplate* boxes() const { return boxes_.get(); }

 private:
  friend class PlanCache;
  struct Range {
    int64_t lo, hi;
    std::shared_ptr<PlanTemplate> by;
  };
  // Adds the template for full vectors of `lo` to below `hi` elements.
  void add(int64_t lo, int64_t hi, std::shared_ptr<PlanTemplate> made);
  void count_bytes();

  PlanKey key_;
  int64_t unit_;
  std::vector<Range> ranges_;  // in order, none overlaps another
  std::shared_ptr<const BoxTemplate> boxes_;
  size_t nbytes_ = 0;
  size_t plan_nbytes_ = 0;  // of the plan that was made last
  uint64_t last_used_ = 0;  // a number of the cache's
};

using FamilyPtr = std::shared_ptr<PlanFamily>;

class PlanCache {
 public:
  // Most bytes of it all; templates have at most half of them.
  size_t limit_nbytes = 1 << 20;

  // The plan of a call; null if there is none.
  const PlanPtr* find(const PlanKey& key) {
    if (!(key == last_key_)) return find_other(key);
    note_use(*last_family_);
    return &last_plan_;
  }
  // `given`: the objects that hold the counts.
  const PlanPtr* find(const VectorKey& key, PyObject* const* given, int num);
  // Finds the plan of the very tuples of the call before, without reading them again.
  const PlanPtr* find_again(const PlanKey& key, PyObject* const* given, int num) {
    for (int i = 0; i < num; ++i) {
      if (given[i] == nullptr || given[i] != last_arguments_[i].ptr()) return nullptr;
    }
    if (last_vector_plan_ == nullptr || !(key == last_vector_key_.plain)) return nullptr;
    note_use(*last_vector_family_);
    return &last_vector_plan_;
  }
  const std::vector<int64_t>& last_counts() const { return last_vector_key_.counts; }
  // True if the last plan's first counts are also its second ones.
  bool swaps() const {
    const auto& counts = last_vector_key_.counts;
    const auto half = static_cast<std::ptrdiff_t>(counts.size() / 2);
    return std::equal(counts.begin(), counts.begin() + half, counts.begin() + half);
  }
  void keep(const PlanKey& key, PlanPtr plan);
  void keep(const VectorKey& key, PlanPtr plan);

  // Makes and keeps the plan of a call; null if its family has no template, or that has no plan.
  const PlanPtr* make(const PlanKey& key, Comm& comm);
  // The same with counts; `given_elems`: of the call's x, or below 0 where it has none. `given`:
  // the objects that hold the counts.
  const PlanPtr* make(const VectorKey& key, PyObject* const* given, int num, int64_t given_elems,
                      Comm& comm);

  // A family that the dispatcher finds by itself, or else, with `is_plain` false, by its number.
  FamilyPtr add_family(const PlanKey& key, int64_t unit, bool is_plain);
  // A family of calls that move boxes.
  FamilyPtr add_family(std::shared_ptr<const BoxTemplate> boxes);
  // The plan of a call of such a family, made if need be: its numbers, then its arrays' strides.
  PlanPtr box_plan(PlanFamily& family, std::vector<int64_t> numbers,
                   const std::vector<int64_t>& strides, Comm& comm);
  // Lets a family make the plans of full vectors of `lo` to below `hi` elements.
  void add_range(PlanFamily& family, int64_t lo, int64_t hi, std::shared_ptr<PlanTemplate> made);
  // True unless a family was dropped.
  bool has(const PlanFamily& family) const {
    const auto it = families_.find(family.key());
    return it != families_.end() && it->second.get() == &family;
  }
  // Drops a family with its plans.
  void drop_family(const FamilyPtr& family);
  // The family that was not used for longest, where they take too much; null where they do not.
  FamilyPtr too_much() const;

  void forget_all();
  size_t num_plans() const { return plans_.size() + vector_plans_.size(); }
  size_t nbytes() const { return plans_nbytes_ + families_nbytes_; }
  std::vector<PlanPtr> all() const;

 private:
  struct Kept {
    const PlanKey* plain;      // the key in its map
    const VectorKey* counted;  // or this
    PlanPtr plan;
    size_t nbytes;
    const void* made_by;  // a template, which may be gone; null: Python
    PlanFamily* family;  // dropped with all of its plans; or `no_family_`
    bool is_young = false;
    uint64_t used = 0;  // when it was used last, as far as the order says; a young one: made
  };
  using Order = std::list<Kept>;
  using Plans = std::unordered_map<PlanKey, Order::iterator, PlanKeyHash>;
  using VectorPlans = std::unordered_map<VectorKey, Order::iterator, VectorKeyHash>;

  // An entry that has left the cache, for the next one to take its memory.
  template <class Map>
  struct Spare {
    Order entry;
    typename Map::node_type node;
    std::shared_ptr<Plan> plan;  // null: there is no such entry
  };

  const PlanPtr* find_other(const PlanKey& key);
  void note_use(Order::iterator at);
  void note_use(PlanFamily& family) { family.last_used_ = ++uses_; }
  // The family of a call, by a key without a count; `no_family_` where there is none.
  PlanFamily& family_of(const PlanKey& key);
  void remember(const VectorKey& key, const PlanPtr& plan, PlanFamily& family);
  void remember_arguments(PyObject* const* given, int num);
  void forget_last();
  void put(Order::iterator at, PlanPtr plan, size_t key_nbytes);
  void count(const Kept& entry, size_t nbytes);
  void uncount(Kept& entry);
  Order& order_of(const Kept& entry) { return entry.is_young ? young_ : order_; }
  void drop(Order::iterator at);
  void let_go(Order::iterator young);
  void keep_for_long(Order::iterator at);
  static uint64_t hash_of(const Kept& entry);
  void bound();
  size_t plans_limit() const { return limit_nbytes - std::min(families_nbytes_, limit_nbytes / 2); }
  size_t young_limit() const { return limit_nbytes / 16; }
  static const PlanKey* key_in(const Kept& kept, const Plans&) { return kept.plain; }
  static const VectorKey* key_in(const Kept& kept, const VectorPlans&) { return kept.counted; }
  static void set_key(Kept& kept, const PlanKey& key) { kept.plain = &key; }
  static void set_key(Kept& kept, const VectorKey& key) { kept.counted = &key; }
  template <class Map>
  Spare<Map> take_spare(Map& plans, const void* by, bool is_young);
  template <class Map>
  Order::iterator going(Map& plans, const void* by, bool is_young);
  // The plan of a call that is not in the cache; null if there can be none. `by`: its template;
  // `make` makes the plan, of the memory of another one or of null.
  template <class Map, class Make>
  const PlanPtr* make_new(Map& plans, const typename Map::key_type& key, PlanFamily& family,
                          const void* by, Make make);
  static size_t nbytes_of(const PlanKey& key) { return sizeof key; }
  static size_t nbytes_of(const VectorKey& key) {
    return sizeof key + key.counts.size() * sizeof(int64_t);
  }

  Order young_;  // the last made first
  Order order_;  // the others; the last used first, once plans take a quarter of the limit
  GoneKeys gone_;
  size_t young_nbytes_ = 0, plans_nbytes_ = 0, families_nbytes_ = 0;  // plans': young ones, too
  Plans plans_;
  PlanKey last_key_{-1, 0, 0};
  PlanPtr last_plan_;
  PlanFamily no_family_{PlanKey{PlanKey::kNoCount, 0, -1}, 1};  // of plans that have none
  PlanFamily* last_family_ = &no_family_;
  VectorPlans vector_plans_;
  VectorKey last_vector_key_;
  PlanPtr last_vector_plan_;  // null: the key means nothing
  PlanFamily* last_vector_family_ = &no_family_;
  nb::object last_arguments_[2];  // where these are tuples, which nobody can change

  std::unordered_map<PlanKey, FamilyPtr, PlanKeyHash> families_;  // by a key without a count
  uint32_t next_number_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace commrt
