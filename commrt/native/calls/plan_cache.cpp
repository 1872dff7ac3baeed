// SPDX-License-Identifier: Apache-2.0
// Plans by their calls, the last used first, and families of calls.
#include "calls/plan_cache.hpp"

#include <algorithm>
#include <utility>

#include "engine/comm.hpp"

namespace commrt {

namespace {

// What a map and a list need for an entry, roughly.
constexpr size_t kEntryBytes = 128;
// The same for a family, with the key that Python has of it.
constexpr size_t kFamilyBytes = 1024;
constexpr uint32_t kNumbered = 0x80000000;

PlanKey without_count(PlanKey key) {
  key.count = PlanKey::kNoCount;
  return key;
}

}  // namespace

void PlanFamily::add(int64_t lo, int64_t hi, std::shared_ptr<PlanTemplate> made) {
  const auto next = std::find_if(ranges_.begin(), ranges_.end(),
                                 [lo](const Range& one) { return one.hi > lo; });
  if (lo >= hi || (next != ranges_.end() && next->lo < hi)) return;  // it is there already
  const bool goes_on = next != ranges_.begin() && std::prev(next)->hi == lo &&
                       std::prev(next)->by == made;
  const bool leads_on = next != ranges_.end() && next->lo == hi && next->by == made;
  if (goes_on && leads_on) {
    std::prev(next)->hi = next->hi;
    ranges_.erase(next);
  } else if (goes_on) {
    std::prev(next)->hi = hi;
  } else if (leads_on) {
    next->lo = lo;
  } else {
    ranges_.insert(next, {lo, hi, std::move(made)});
  }
}

std::shared_ptr<PlanTemplate> PlanFamily::named(const std::string& label) const {
  for (const Range& one : ranges_) {
    if (one.by->prototype.label == label) return one.by;
  }
  return nullptr;
}

const PlanTemplate* PlanFamily::at(int64_t num_elements) const {
  for (const Range& one : ranges_) {
    if (num_elements < one.hi) return num_elements >= one.lo ? one.by.get() : nullptr;
  }
  return nullptr;
}

void PlanFamily::count_bytes() {
  nbytes_ = kFamilyBytes + ranges_.capacity() * sizeof(Range);
  if (boxes_ != nullptr) nbytes_ += boxes_->nbytes();
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const auto same = [&](const Range& one) { return one.by == ranges_[i].by; };
    const auto here = ranges_.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::none_of(ranges_.begin(), here, same)) nbytes_ += ranges_[i].by->nbytes();
  }
}

// Where nothing is about to be dropped, nobody needs the order. A young plan goes in its turn,
// however often it was used: a length that a program has in each of its layers, and then never
// again, is none to keep.
void PlanCache::note_use(Order::iterator at) {
  if (!at->is_young && plans_nbytes_ > limit_nbytes / 4) {
    order_.splice(order_.begin(), order_, at);
    at->used = ++uses_;
  }
}

const PlanPtr* PlanCache::find_other(const PlanKey& key) {
  const auto it = plans_.find(key);
  if (it == plans_.end()) return nullptr;
  note_use(it->second);
  note_use(*it->second->family);
  last_key_ = key;
  last_plan_ = it->second->plan;
  last_family_ = it->second->family;
  return &last_plan_;
}

PlanFamily& PlanCache::family_of(const PlanKey& key) {
  const auto it = families_.find(key);
  return it == families_.end() ? no_family_ : *it->second;
}

const PlanPtr* PlanCache::find(const VectorKey& key, PyObject* const* given, int num) {
  if (last_vector_plan_ == nullptr || !(key == last_vector_key_)) {
    const auto it = vector_plans_.find(key);
    if (it == vector_plans_.end()) return nullptr;
    note_use(it->second);
    remember(key, it->second->plan, *it->second->family);
  }
  note_use(*last_vector_family_);
  remember_arguments(given, num);
  return &last_vector_plan_;
}

void PlanCache::remember(const VectorKey& key, const PlanPtr& plan, PlanFamily& family) {
  last_vector_key_ = key;
  last_vector_plan_ = plan;
  last_vector_family_ = &family;
  for (nb::object& argument : last_arguments_) argument.reset();
}

void PlanCache::remember_arguments(PyObject* const* given, int num) {
  for (int i = 0; i < num; ++i) {
    // Kept, so that no other object gets its address.
    last_arguments_[i] = PyTuple_CheckExact(given[i]) ? nb::borrow(given[i]) : nb::object();
  }
}

void PlanCache::count(const Kept& entry, size_t nbytes) {
  plans_nbytes_ += nbytes;
  if (entry.is_young) young_nbytes_ += nbytes;
}

void PlanCache::uncount(Kept& entry) {
  plans_nbytes_ -= entry.nbytes;
  if (entry.is_young) young_nbytes_ -= entry.nbytes;
  entry.nbytes = 0;
}

void PlanCache::put(Order::iterator at, PlanPtr plan, size_t key_nbytes) {
  uncount(*at);
  at->nbytes = plan->nbytes() + key_nbytes + kEntryBytes;
  at->plan = std::move(plan);
  at->used = ++uses_;
  count(*at, at->nbytes);
  Order& order = order_of(*at);
  order.splice(order.begin(), order, at);
  bound();
}

// Python would take a hundred times as long to plan its plans again.
void PlanCache::keep_for_long(Order::iterator at) {
  at->made_by = nullptr;
  if (!at->is_young) return;
  uncount(*at);
  at->is_young = false;
  order_.splice(order_.begin(), young_, at);
}

void PlanCache::keep(const PlanKey& key, PlanPtr plan) {
  last_key_ = PlanKey{-1, 0, 0};  // it may have been this one
  last_plan_.reset();
  const auto [it, is_new] = plans_.try_emplace(key);
  if (is_new) {
    it->second = order_.insert(order_.begin(), {&it->first, nullptr, nullptr, 0, nullptr, nullptr});
  }
  keep_for_long(it->second);
  it->second->family = &family_of(without_count(key));
  put(it->second, std::move(plan), nbytes_of(key));
}

void PlanCache::keep(const VectorKey& key, PlanPtr plan) {
  last_vector_plan_.reset();
  const auto [it, is_new] = vector_plans_.try_emplace(key);
  if (is_new) {
    it->second = order_.insert(order_.begin(), {nullptr, &it->first, nullptr, 0, nullptr, nullptr});
  }
  keep_for_long(it->second);
  it->second->family = &family_of(without_count(key.plain));
  put(it->second, std::move(plan), nbytes_of(key));
}

void PlanCache::drop(Order::iterator at) {
  uncount(*at);
  if (at->plain != nullptr) {
    plans_.erase(*at->plain);
  } else {
    vector_plans_.erase(*at->counted);
  }
  order_of(*at).erase(at);
}

uint64_t PlanCache::hash_of(const Kept& entry) {
  return entry.plain != nullptr ? PlanKeyHash()(*entry.plain) : VectorKeyHash()(*entry.counted);
}

void PlanCache::let_go(Order::iterator young) {
  gone_.add(hash_of(*young));
  drop(young);
}

// The plan that was made last stays, however much it takes.
void PlanCache::bound() {
  while (young_nbytes_ > young_limit() && young_.size() > 1) let_go(std::prev(young_.end()));
  while (plans_nbytes_ > plans_limit() && young_.size() + order_.size() > 1) {
    if (order_.empty() || (!young_.empty() && young_.back().used < order_.back().used)) {
      let_go(std::prev(young_.end()));
    } else {
      drop(std::prev(order_.end()));
    }
  }
}

// The entry whose memory a plan of that template can have, as it would go next; the end of its
// list where there is none. It has vectors of the right lengths, and a key of the right kind.
template <class Map>
PlanCache::Order::iterator PlanCache::going(Map& plans, const void* by, bool is_young) {
  Order& order = is_young ? young_ : order_;
  const size_t nbytes = is_young ? young_nbytes_ : plans_nbytes_;
  const size_t limit = is_young ? young_limit() : plans_limit();
  // If it is held here alone, nobody can get at it any more.
  const auto fits = [&](const Kept& one) {
    return one.made_by == by && key_in(one, plans) != nullptr && nbytes + one.nbytes > limit &&
           one.plan.use_count() == 1;
  };
  // Where a program has a few calls of a new length in turn, one of the next few is of the kind.
  constexpr int kNext = 4;
  auto at = order.end();
  for (int i = 0; i < (is_young ? kNext : 1) && at != order.begin(); ++i) {
    if (fits(*--at)) return at;
  }
  return order.end();
}

template <class Map>
PlanCache::Spare<Map> PlanCache::take_spare(Map& plans, const void* by, bool is_young) {
  Spare<Map> spare;
  Order& order = is_young ? young_ : order_;
  const auto at = going(plans, by, is_young);
  if (at == order.end() || order.size() < 2) return spare;
  if (is_young) gone_.add(hash_of(*at));
  // Counting up and down once comes after whatever another thread did before it let go.
  spare.plan = std::const_pointer_cast<Plan>(at->plan);
  at->plan.reset();
  uncount(*at);
  spare.node = plans.extract(*key_in(*at, plans));
  spare.entry.splice(spare.entry.begin(), order, at);
  return spare;
}

template <class Map, class Make>
const PlanPtr* PlanCache::make_new(Map& plans, const typename Map::key_type& key,
                                   PlanFamily& family, const void* by, Make make) {
  // Where the near cache holds only a few such plans, being young wins nothing.
  const bool is_young = !gone_.take(plans.hash_function()(key)) &&
                        family.plan_nbytes_ <= young_limit() / 4;
  Spare<Map> spare = take_spare(plans, by, is_young);
  const bool is_used = spare.plan != nullptr;
  PlanPtr plan = make(std::move(spare.plan));
  if (plan == nullptr) return nullptr;
  if (!is_used) {
    spare.entry.push_front({nullptr, nullptr, nullptr, 0, by, &family, is_young});
    const auto [it, is_new] = plans.try_emplace(key, spare.entry.begin());
    set_key(*spare.entry.begin(), it->first);
  } else {
    spare.entry.begin()->family = &family;
    spare.node.key() = key;
    spare.node.mapped() = spare.entry.begin();
    plans.insert(std::move(spare.node));
  }
  const auto at = spare.entry.begin();
  Order& order = order_of(*at);
  order.splice(order.begin(), spare.entry);
  put(at, std::move(plan), nbytes_of(key));
  family.plan_nbytes_ = at->nbytes;
  return &at->plan;
}

const PlanPtr* PlanCache::make(const PlanKey& key, Comm& comm) {
  const auto it = families_.find(without_count(key));
  if (it == families_.end() || key.count < 0) return nullptr;
  PlanFamily& family = *it->second;
  note_use(family);
  int64_t num_elements;
  if (__builtin_mul_overflow(key.count, family.unit(), &num_elements)) return nullptr;
  const PlanTemplate* const by = family.at(num_elements);
  if (by == nullptr || by->counts != Counts::None || by->lacks_reach(num_elements)) return nullptr;
  const PlanPtr* const made = make_new(plans_, key, family, by, [&](std::shared_ptr<Plan> used) {
    return by->make(num_elements, {}, comm, std::move(used));
  });
  if (made == nullptr) return nullptr;
  last_key_ = key;
  last_plan_ = *made;
  last_family_ = &family;
  return &last_plan_;
}

const PlanPtr* PlanCache::make(const VectorKey& key, PyObject* const* given, int num,
                               int64_t given_elems, Comm& comm) {
  const auto it = families_.find(without_count(key.plain));
  if (it == families_.end()) return nullptr;
  PlanFamily& family = *it->second;
  note_use(family);
  const auto size = static_cast<size_t>(comm.size);
  if (key.counts.size() % size != 0 || key.counts.empty()) return nullptr;
  int64_t num_elements = 0;
  for (size_t i = 0; i < key.counts.size(); i += size) {
    int64_t sum = 0;
    for (size_t k = i; k < i + size; ++k) {
      if (__builtin_add_overflow(sum, key.counts[k], &sum)) return nullptr;
    }
    if (i == 0) num_elements = sum;
  }
  const PlanTemplate* const by = family.at(num_elements);
  if (by == nullptr || by->lacks_reach(num_elements)) return nullptr;
  const size_t lists = by->counts == Counts::Pairs ? 2 : 1;
  if (by->counts == Counts::None || key.counts.size() != lists * size) return nullptr;
  const auto own = static_cast<size_t>(comm.rank);
  if (lists == 2 && key.counts[own] != key.counts[size + own]) return nullptr;
  if (given_elems >= 0 && by->given_elems(num_elements, key.counts) != given_elems) return nullptr;
  const PlanPtr* const made =
      make_new(vector_plans_, key, family, by, [&](std::shared_ptr<Plan> used) {
        return by->make(num_elements, key.counts, comm, std::move(used));
      });
  if (made == nullptr) return nullptr;
  remember(key, *made, family);
  remember_arguments(given, num);
  return &last_vector_plan_;
}

FamilyPtr PlanCache::add_family(const PlanKey& key, int64_t unit, bool is_plain) {
  PlanKey found = without_count(key);
  // Numbers come again after two thousand million families; the old one is dropped then.
  if (!is_plain) found = {PlanKey::kNoCount, kNumbered | next_number_++, -1};
  const auto old = families_.find(found);
  if (old != families_.end()) drop_family(FamilyPtr(old->second));
  const auto made = std::make_shared<PlanFamily>(found, unit);
  made->count_bytes();
  note_use(*made);
  families_nbytes_ += made->nbytes();
  families_[found] = made;
  return made;
}

FamilyPtr PlanCache::add_family(std::shared_ptr<const BoxTemplate> boxes) {
  const uint32_t what = PlanKey::pack(boxes->kind.coll, DType::U8, 0, kHost);
  FamilyPtr made = add_family(PlanKey{PlanKey::kNoCount, what, 0}, 1, false);
  families_nbytes_ -= made->nbytes();
  made->boxes_ = std::move(boxes);
  made->count_bytes();
  families_nbytes_ += made->nbytes();
  return made;
}

PlanPtr PlanCache::box_plan(PlanFamily& family, std::vector<int64_t> numbers,
                            const std::vector<int64_t>& strides, Comm& comm) {
  note_use(family);
  const size_t num = numbers.size();
  VectorKey key{family.key(), std::move(numbers)};
  key.plain.count = static_cast<int64_t>(num);
  key.counts.insert(key.counts.end(), strides.begin(), strides.end());
  const auto it = vector_plans_.find(key);
  if (it != vector_plans_.end()) {
    note_use(it->second);
    return it->second->plan;
  }
  const BoxTemplate& by = *family.boxes();
  const auto make = [&](std::shared_ptr<Plan> used) -> PlanPtr {
    return by.make(key.counts.data(), num, strides.data(), strides.size(), comm, std::move(used));
  };
  // Nobody asks again for the plans of a family that was dropped meanwhile.
  if (!has(family)) return make(nullptr);
  return *make_new(vector_plans_, key, family, &by, make);
}

void PlanCache::add_range(PlanFamily& family, int64_t lo, int64_t hi,
                          std::shared_ptr<PlanTemplate> made) {
  if (!has(family)) return;
  families_nbytes_ -= family.nbytes();
  family.add(lo, hi, std::move(made));
  family.count_bytes();
  note_use(family);
  families_nbytes_ += family.nbytes();
}

void PlanCache::drop_family(const FamilyPtr& family) {
  const auto it = families_.find(family->key());
  if (it == families_.end() || it->second != family) return;
  for (Order* const order : {&young_, &order_}) {
    for (auto at = order->begin(); at != order->end();) {
      const auto here = at++;
      const PlanKey& key = here->plain != nullptr ? *here->plain : here->counted->plain;
      if (without_count(key) == family->key()) drop(here);
    }
  }
  families_nbytes_ -= family->nbytes();
  families_.erase(it);
  forget_last();
}

FamilyPtr PlanCache::too_much() const {
  if (families_.size() < 2 || families_nbytes_ <= limit_nbytes / 2) return nullptr;
  const auto least = std::min_element(
      families_.begin(), families_.end(), [](const auto& one, const auto& other) {
        return one.second->last_used_ < other.second->last_used_;
      });
  return least->second;
}

void PlanCache::forget_all() {
  young_.clear();
  order_.clear();
  plans_.clear();
  vector_plans_.clear();
  young_nbytes_ = plans_nbytes_ = families_nbytes_ = 0;
  // Python has them, too, and will ask them again.
  for (auto& [key, family] : families_) {
    family->ranges_.clear();
    family->count_bytes();
    families_nbytes_ += family->nbytes();
  }
  forget_last();
}

void PlanCache::forget_last() {
  last_key_ = PlanKey{-1, 0, 0};
  last_plan_.reset();
  last_vector_plan_.reset();
  last_family_ = last_vector_family_ = &no_family_;
}

std::vector<PlanPtr> PlanCache::all() const {
  std::vector<const Kept*> entries;
  for (const Order* const order : {&young_, &order_}) {
    for (const Kept& one : *order) entries.push_back(&one);
  }
  std::sort(entries.begin(), entries.end(),
            [](const Kept* one, const Kept* other) { return one->used > other->used; });
  std::vector<PlanPtr> found;
  for (const Kept* const one : entries) found.push_back(one->plan);
  return found;
}

}  // namespace commrt
