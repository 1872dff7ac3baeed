// SPDX-License-Identifier: Apache-2.0
// Lengths, fragments and stores of a plan, from the number of elements.
#include "engine/plan_template.hpp"

#include <algorithm>
#include <numeric>

#include "engine/comm.hpp"

namespace commrt {

namespace {

constexpr int64_t kLine = 64;

int64_t ceil_div(int64_t value, int64_t by) { return value / by + (value % by != 0); }

// value * num / den, whose product may be longer than a word.
int64_t part_of(int64_t value, int64_t num, int64_t den) {
  int64_t product;
  if (!__builtin_mul_overflow(value, num, &product)) return product / den;
  return static_cast<int64_t>(static_cast<__int128>(value) * num / den);
}

int64_t round_to_lines(int64_t nbytes) { return ceil_div(nbytes, kLine) * kLine; }

// An upper bound of any fragment of a block.
int64_t piece_nbytes(int64_t length, int64_t itemsize, int64_t fragments) {
  if (fragments == 1) return length * itemsize;
  return (length / fragments + 1) * itemsize + kLine;
}

// The number of fragments with which messages fit, and their longest one then. `longest` says it
// of a number of fragments.
template <typename Longest>
int64_t cut_so_that_it_fits(const Longest& longest, int64_t num_elements, int64_t chunk,
                            int64_t lane_nbytes, int64_t publishes, size_t* found) {
  int64_t now = longest(1), fragments = 1;
  if (now > kLine) {
    fragments = std::max<int64_t>(1, ceil_div(now, chunk));
    // A payload may start anywhere in the first line of its slot.
    const int64_t limit = lane_nbytes / std::max<int64_t>(1, publishes) - kLine;
    for (now = longest(fragments); now > limit; now = longest(fragments)) {
      if (fragments > num_elements) return 0;
      fragments += std::max<int64_t>(1, fragments / 8);
    }
  }
  *found = static_cast<size_t>(now);
  return fragments;
}

template <typename T>
size_t nbytes_of(const std::vector<T>& one) {
  return one.capacity() * sizeof(T);
}

}  // namespace

int64_t PlanTemplate::given_elems(int64_t num_elements, const std::vector<int64_t>& given) const {
  switch (counts) {
    case Counts::None: return part_of(num_elements, x_num, x_den);
    case Counts::Known: return x_is_own ? given[static_cast<size_t>(rank)] : num_elements;
    case Counts::Pairs: return num_elements;
  }
  return 0;
}

std::shared_ptr<const Plan> PlanTemplate::make(int64_t num_elements,
                                               const std::vector<int64_t>& given, Comm& comm,
                                               std::shared_ptr<Plan> used) const {
  if (divides && num_elements % size != 0) return nullptr;
  std::shared_ptr<Plan> plan = std::move(used);
  if (plan == nullptr) {
    plan = std::make_shared<Plan>(prototype);
  } else {
    *plan = prototype;  // its vectors keep their memory, which is most of the time saved
  }
  plan->in_elems = has_in ? given_elems(num_elements, given) : 0;
  if (!has_out) {
    plan->out_elems = 0;
  } else if (counts == Counts::None) {
    plan->out_elems = part_of(num_elements, out_num, out_den);
  } else if (counts == Counts::Known) {
    plan->out_elems = out_is_own ? given[static_cast<size_t>(rank)] : num_elements;
  } else {
    plan->out_elems = std::accumulate(given.begin() + size, given.end(), int64_t{0});
  }
  const bool made = plan->native ? make_call(*plan, num_elements, given)
                                 : make_schedule(*plan, num_elements, given, comm);
  return made ? plan : nullptr;
}

bool PlanTemplate::make_call(Plan& plan, int64_t num_elements,
                             const std::vector<int64_t>& given) const {
  constexpr int64_t kMost = INT32_MAX;
  int64_t count, largest;
  if (__builtin_mul_overflow(num_elements, unit, &count)) return false;
  if (is_blocked) count /= size;
  largest = count;
  NativeCall& call = plan.call;
  if (counts != Counts::None) {
    largest = 0;
    const size_t lists = given.size() / static_cast<size_t>(size);
    for (size_t i = 0; i < lists; ++i) {
      std::vector<int>& numbers = i == 0 ? call.send_counts : call.recv_counts;
      std::vector<int>& first = i == 0 ? call.send_at : call.recv_at;
      int64_t at = 0;
      for (int peer = 0; peer < size; ++peer) {
        int64_t number;
        if (__builtin_mul_overflow(given[i * static_cast<size_t>(size) + peer], unit, &number) ||
            number > kMost - at) return false;
        numbers.push_back(static_cast<int>(number));
        first.push_back(static_cast<int>(at));
        at += number;
      }
      largest = std::max(largest, at);
    }
    // Where there is one list, an operation has one use for it.
    if (lists == 1) {
      call.recv_counts = call.send_counts;
      call.recv_at = call.send_at;
    }
    count = call.send_counts[static_cast<size_t>(rank)];
  }
  if (largest > kMost) return false;
  call.count = static_cast<int>(count);
  if (counts == Counts::None) {
    call.length = static_cast<uint64_t>(count);
  } else if (counts == Counts::Known && !call_has_root(plan.coll)) {
    for (const int one : call.recv_counts) {
      call.length = CallTrail::mixed(call.length ^ static_cast<uint64_t>(one));
    }
    call.length |= CallTrail::kOfCounts;
  }
  call.hash = CallTrail::hash_of(plan.mark, call.length);
  return true;
}

PlanTemplate::Cut PlanTemplate::cut(int64_t num_elements) const {
  const auto item = static_cast<int64_t>(prototype.itemsize);
  const auto longest = [&](int64_t fragments) {
    int64_t most = 0;
    for (const MessageRule& one : messages) {
      const int64_t block = ceil_div(part_of(num_elements, one.num, one.den), one.nblk);
      most = std::max(most, one.width * piece_nbytes(block, item, fragments));
    }
    return round_to_lines(most);
  };
  const bool is_long = num_elements > long_from_nbytes / item;
  Cut made{};
  made.fragments = cut_so_that_it_fits(longest, num_elements,
                                       is_long ? long_chunk_nbytes : chunk_nbytes,
                                       static_cast<int64_t>(lane_nbytes), publishes,
                                       &made.longest_nbytes);
  return made;
}

// Of blocks of such lengths, the longest first.
PlanTemplate::Cut PlanTemplate::cut_counted(const int64_t* lengths, size_t num) const {
  const auto item = static_cast<int64_t>(prototype.itemsize);
  int64_t width = 0;
  for (const MessageRule& one : messages) width = std::max(width, one.width);
  const size_t most = std::min(num, static_cast<size_t>(width));
  const auto longest = [&](int64_t fragments) {
    int64_t sum = 0;
    for (size_t i = 0; i < most; ++i) sum += piece_nbytes(lengths[i], item, fragments);
    return round_to_lines(sum);
  };
  const int64_t total = std::accumulate(lengths, lengths + num, int64_t{0});
  Cut made{};
  made.fragments = cut_so_that_it_fits(longest, total, chunk_nbytes,
                                       static_cast<int64_t>(lane_nbytes), publishes,
                                       &made.longest_nbytes);
  return made;
}

// Each pair has a number of fragments of its own.
bool PlanTemplate::cut_pairs(Plan& plan, const std::vector<int64_t>& given, Cut& all) const {
  all = {1, 0};
  // What this rank sends to each, then what it gets.
  thread_local std::vector<int64_t> fragments, blocks;
  fragments.assign(given.size(), 1);
  bool first = true, same = true;
  const auto own = static_cast<size_t>(rank), num = static_cast<size_t>(size);
  for (size_t i = 0; i < given.size(); ++i) {
    if (i % num == own) continue;
    const Cut one = [&] {
      if (share == 1) return cut_counted(&given[i], 1);
      blocks.clear();
      for (int block = 0; block < share; ++block) {
        blocks.push_back(part_of(given[i], block + 1, share) - part_of(given[i], block, share));
      }
      std::sort(blocks.rbegin(), blocks.rend());
      return cut_counted(blocks.data(), blocks.size());
    }();
    if (one.fragments == 0) return false;
    same = same && (first || one.fragments == all.fragments);
    first = false;
    fragments[i] = one.fragments;
    all.fragments = std::max(all.fragments, one.fragments);
    all.longest_nbytes = std::max(all.longest_nbytes, one.longest_nbytes);
  }
  if (same) return true;
  for (size_t i = 0; i < plan.instrs.size(); ++i) {
    const int32_t pair = instr_pairs[i];
    const size_t source = static_cast<size_t>(std::max(pair, 0)) / num;
    const size_t destination = static_cast<size_t>(std::max(pair, 0)) % num;
    plan.instrs[i].fragments =
        pair < 0 || (source == own && destination == own) ? all.fragments
        : source == own                                   ? fragments[destination]
                                                          : fragments[num + source];
  }
  for (PeerUse& peer : plan.peers) {
    peer.send_fragments = fragments[static_cast<size_t>(peer.rank)];
    peer.recv_fragments = fragments[num + static_cast<size_t>(peer.rank)];
  }
  return true;
}

int64_t PlanTemplate::part_length(int32_t part, const std::vector<int64_t>& given) const {
  if (part < 0) return 0;
  const int32_t holder = part / share, block = part % share;
  size_t at = static_cast<size_t>(holder);
  if (counts == Counts::Pairs) {
    const int source = holder / size, destination = holder % size;
    at = static_cast<size_t>(source == rank ? destination : size + source);
  }
  const int64_t length = given[at];
  if (share == 1) return length;
  return part_of(length, block + 1, share) - part_of(length, block, share);
}

void PlanTemplate::bounds(const BlockRule& rule, int64_t num_elements,
                          const std::vector<int64_t>& given, std::vector<int64_t>& edges) const {
  edges.clear();
  if (rule.nblk == 0) {  // a space that this rank does not have still has its place
    edges.assign(2, 0);
    return;
  }
  edges.reserve(static_cast<size_t>(rule.nblk) + 1);
  edges.push_back(0);
  const bool counted = counts != Counts::None;
  const int64_t total = counted ? 0 : part_of(num_elements, rule.num, rule.den);
  int64_t from = 0;
  for (int i = 0; i < rule.nblk; ++i) {
    int64_t length;
    if (counted) {
      length = part_length(rule.parts[static_cast<size_t>(i)], given);
    } else {
      const int64_t to = part_of(total, i + 1, rule.nblk);
      length = to - from;
      from = to;
    }
    if (!rule.used.empty() && rule.used[static_cast<size_t>(i)] == 0) length = 0;
    edges.push_back(edges.back() + length);
  }
}

void PlanTemplate::reach(Plan& plan, int64_t num_elements,
                         const std::vector<int64_t>& given) const {
  plan.shows_result = shows(num_elements);
  if (!plan.shows_result) {
    for (Instr& ins : plan.instrs) {
      ins.exposable = ins.operand_exposable = 0;
      for (Ref& ref : ins.sends) ref.deliverable = 0;
    }
    return;
  }
  std::vector<std::vector<int64_t>> peers(landing_spaces.size());
  for (size_t i = 0; i < peers.size(); ++i) bounds(landing_spaces[i], num_elements, given, peers[i]);
  for (const LandingRule& one : landings) {
    plan.instrs[one.instr].sends[one.send].landing_nbytes =
        peers[one.space][static_cast<size_t>(one.block)] * static_cast<int64_t>(plan.itemsize);
  }
}

bool PlanTemplate::make_schedule(Plan& plan, int64_t num_elements,
                                 const std::vector<int64_t>& given, Comm& comm) const {
  Cut all{};
  if (counts == Counts::None) {
    all = cut(num_elements);
  } else if (counts == Counts::Pairs) {
    if (!cut_pairs(plan, given, all)) return false;
  } else {
    thread_local std::vector<int64_t> lengths;
    lengths.clear();
    for (const int64_t count : given) {
      for (int block = 0; block < share; ++block) {
        lengths.push_back(part_of(count, block + 1, share) - part_of(count, block, share));
      }
    }
    std::sort(lengths.rbegin(), lengths.rend());
    all = cut_counted(lengths.data(), lengths.size());
  }
  if (all.fragments == 0) return false;
  for (size_t i = 0; i < spaces.size(); ++i) {
    bounds(spaces[i], num_elements, given, plan.spaces[i].offsets);
  }
  const size_t longest = all.longest_nbytes;
  const auto buffers = static_cast<size_t>(plan.in_elems + plan.out_elems) * plan.itemsize;
  const StoreRule::Kinds kinds =
      longest < stores.learns_from ? stores.is_short
      : buffers * static_cast<size_t>(on_node) < stores.beyond_cache ? stores.cached : stores.beyond;
  plan.store = kinds.first;
  plan.adaptive = kinds.adaptive;
  plan.choice.start_with(plan.store, plan.adaptive);
  // Results that do not stay in the cache anyway: each line is then read before it is written.
  constexpr int64_t kBeyondCache = 16 << 20;
  plan.heap_choice.start_with(
      store_of(false, std::max(plan.in_elems, plan.out_elems) *
                          static_cast<int64_t>(plan.itemsize) >= kBeyondCache),
      Store::Stream2);
  reach(plan, num_elements, given);
  plan.finish(all.fragments, lane_nbytes, slot_reuse, comm.slot_window);
  if (plan.run_short) plan.flatten(comm);
  return true;
}

size_t PlanTemplate::nbytes() const {
  size_t sum = sizeof *this - sizeof prototype + prototype.nbytes() + nbytes_of(messages) +
               nbytes_of(instr_pairs) + nbytes_of(landings);
  for (const auto* rules : {&spaces, &landing_spaces}) {
    for (const BlockRule& rule : *rules) {
      sum += sizeof rule + nbytes_of(rule.used) + nbytes_of(rule.parts);
    }
  }
  return sum;
}

}  // namespace commrt
