// SPDX-License-Identifier: Apache-2.0
// An instruction waits for facts: an instruction is done, a message is sent, or acknowledged.
// Running one never disables another, so one maximal run decides for all.
#include "schedules/engine_run.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

#include "schedules/execution.hpp"

namespace commrt {

namespace {

constexpr std::size_t kNamed = 3;  // facts that a fault names

enum Fact : std::int64_t { kAcked, kDone, kSent };  // in the order of their names

// For each message of a fragment, the instruction that makes it and the one that takes it.
struct MessageEnds {
  struct End {
    std::int32_t rank = -1;
    std::int32_t index = -1;
  };
  std::vector<End> maker, taker;
  std::vector<std::int32_t> k, count;  // its place among the pair's messages, and their number
  // By rank and entry of its table: the number of the message, or -1.
  std::vector<std::vector<std::int64_t>> of_input, of_output;

  MessageEnds(const std::vector<LoweredProgram>& programs, const MessageNumbers& numbers)
      : maker(static_cast<std::size_t>(numbers.size())),
        taker(maker.size()),
        k(maker.size()),
        count(maker.size()) {
    for (const LoweredProgram& one : programs) {
      std::vector<std::int64_t>& made = of_output.emplace_back(one.outputs.entries.size(), -1);
      std::vector<std::int64_t>& taken = of_input.emplace_back(one.inputs.entries.size(), -1);
      for (std::int32_t index = 0; index < one.size(); ++index) {
        for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e) {
          if (e->local()) continue;
          const std::int64_t id = numbers.of(one.rank, e->a, e->b);
          made[e - one.outputs.entries.data()] = id;
          if (id < 0) continue;
          maker[id] = {one.rank, index};
          k[id] = e->b;
          count[id] = numbers.count(one.rank, e->a);
        }
        for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e) {
          const std::int64_t id = e->local() ? -1 : numbers.of(e->a, one.rank, e->b);
          taken[e - one.inputs.entries.data()] = id;
          if (id >= 0) taker[id] = {one.rank, index};
        }
      }
    }
  }
};

class EngineRun {
 public:
  EngineRun(const std::vector<LoweredProgram>& programs, std::int32_t fragments,
            std::int32_t lines, const HasLines& has_lines)
      : programs_(programs),
        numbers_(programs),
        ends_(programs, numbers_),
        fragments_(fragments),
        lines_(lines),
        uses_lines_(static_cast<std::size_t>(numbers_.size()), 1),
        ready_(programs.size()),
        first_(programs.size(), 0) {
    for (const LoweredProgram& one : programs) {
      base_.push_back(num_nodes_);
      num_nodes_ += std::int64_t{one.size()} * fragments;
      followers_.push_back(followers_of(one));
      for (const InstructionEntry& entry : one.outputs.entries) {
        if (entry.local()) continue;
        const std::int64_t message = output_of(one, &entry);
        if (message < 0) throw ScheduleFault("uses", {one.rank, 0});
        if (has_lines && !has_lines(one.rank, entry.a)) uses_lines_[message] = 0;
      }
    }
    unmet_.assign(static_cast<std::size_t>(num_nodes_), 0);
    done_.assign(static_cast<std::size_t>(num_nodes_), 0);
  }

  std::vector<EnginePlace> run() {
    std::vector<EnginePlace> order;
    order.reserve(static_cast<std::size_t>(num_nodes_));
    for (const LoweredProgram& one : programs_) {
      for (std::int32_t position = 0; position < one.size() * fragments_; ++position) {
        std::int32_t needs = 0;
        each_need(one.rank, position, [&needs](Fact, auto, auto, auto) { ++needs; });
        unmet_[base_[one.rank] + position] = needs;
        if (needs == 0) ready_[one.rank].push(position);
      }
    }
    for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(programs_.size()); ++rank)
      active_.push_back(rank);
    while (!active_.empty()) {
      const std::int32_t rank = active_.back();
      active_.pop_back();
      const std::int32_t length = programs_[rank].size();
      while (!ready_[rank].empty() && ready_[rank].top() < first_[rank] + 2 * length) {
        const std::int32_t position = ready_[rank].top();
        ready_[rank].pop();
        order.push_back({rank, position / length, position % length});
        finish(rank, position / length, position % length);
      }
    }
    check_finished();
    return order;
  }

 private:
  static IndexRows followers_of(const LoweredProgram& one) {
    IndexRows made;
    made.starts.assign(static_cast<std::size_t>(one.size()) + 1, 0);
    for (std::int32_t dep : one.deps.values) ++made.starts[dep + 1];
    for (std::int32_t i = 0; i < one.size(); ++i) made.starts[i + 1] += made.starts[i];
    made.values.resize(one.deps.values.size());
    std::vector<std::int32_t> next(made.starts.begin(), made.starts.end() - 1);
    for (std::int32_t index = 0; index < one.size(); ++index)
      for (const auto* dep = one.deps.begin(index); dep != one.deps.end(index); ++dep)
        made.values[next[*dep]++] = index;
    return made;
  }

  // The numbers of the messages of entries.
  std::int64_t input_of(const LoweredProgram& one, const InstructionEntry* entry) const {
    return ends_.of_input[one.rank][entry - one.inputs.entries.data()];
  }
  std::int64_t output_of(const LoweredProgram& one, const InstructionEntry* entry) const {
    return ends_.of_output[one.rank][entry - one.outputs.entries.data()];
  }

  // Calls `see(fact, a, b, id)` for what a place waits for; ids count over fragments.
  template <class See>
  void each_need(std::int32_t rank, std::int32_t position, const See& see) const {
    const LoweredProgram& one = programs_[rank];
    const std::int32_t fragment = position / one.size(), index = position % one.size();
    for (const auto* dep = one.deps.begin(index); dep != one.deps.end(index); ++dep)
      see(kDone, rank, fragment * one.size() + *dep, std::int64_t{0});
    for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e)
      if (!e->local()) {
        const std::int64_t message = input_of(one, e);
        const std::int64_t count = message < 0 ? 0 : ends_.count[message];
        see(kSent, e->a, rank, fragment * count + e->b);
      }
    for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e) {
      if (e->local() || !uses_lines_[output_of(one, e)]) continue;
      const std::int64_t count = ends_.count[output_of(one, e)];
      const std::int64_t message = fragment * count + e->b;
      if (message >= lines_) see(kAcked, rank, e->a, message - lines_);
      // Slot p - Q: the same publish of the fragment before.
      if (fragment > 0 && (count != lines_ || message < lines_))
        see(kAcked, rank, e->a, message - count);
    }
  }

  void finish(std::int32_t rank, std::int32_t fragment, std::int32_t index) {
    const LoweredProgram& one = programs_[rank];
    const std::int32_t start = fragment * one.size();
    done_[base_[rank] + start + index] = 1;
    const IndexRows& followers = followers_[rank];
    for (const auto* other = followers.begin(index); other != followers.end(index); ++other)
      meet(rank, start + *other);
    const std::int32_t before = first_[rank];
    while (first_[rank] < one.size() * fragments_ && done_[base_[rank] + first_[rank]])
      ++first_[rank];
    if (first_[rank] != before) active_.push_back(rank);
    for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e) {
      if (e->local()) continue;
      const MessageEnds::End& taker = ends_.taker[output_of(one, e)];
      if (taker.rank >= 0) meet(taker.rank, fragment * programs_[taker.rank].size() + taker.index);
    }
    for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e)
      if (!e->local()) acknowledge(input_of(one, e), fragment);
  }

  void acknowledge(std::int64_t message, std::int32_t fragment) {
    if (!uses_lines_[message] || ends_.maker[message].rank < 0) return;
    const std::int32_t count = ends_.count[message];
    // Whoever needs its line again, and whoever needs the slot of its payload.
    const std::int64_t later = std::int64_t{fragment} * count + ends_.k[message] + lines_;
    const std::int64_t first = message - ends_.k[message];
    if (later < std::int64_t{fragments_} * count)
      meet_maker(first + later % count, static_cast<std::int32_t>(later / count));
    if (count != lines_ && fragment + 1 < fragments_) meet_maker(message, fragment + 1);
  }

  void meet_maker(std::int64_t message, std::int32_t fragment) {
    const MessageEnds::End& maker = ends_.maker[message];
    if (maker.rank >= 0) meet(maker.rank, fragment * programs_[maker.rank].size() + maker.index);
  }

  void meet(std::int32_t rank, std::int32_t position) {
    if (--unmet_[base_[rank] + position] != 0) return;
    ready_[rank].push(position);
    active_.push_back(rank);
  }

  bool holds(Fact fact, std::int32_t a, std::int32_t b, std::int64_t id) const {
    if (fact == kDone) return done_[base_[a] + b] != 0;
    const std::int32_t count = numbers_.count(a, b);
    if (count == 0) return false;
    const auto fragment = static_cast<std::int32_t>(id / count);
    const std::int64_t message = numbers_.of(a, b, static_cast<std::int32_t>(id % count));
    const MessageEnds::End& end = fact == kSent ? ends_.maker[message] : ends_.taker[message];
    return end.rank >= 0 &&
           done_[base_[end.rank] + fragment * programs_[end.rank].size() + end.index] != 0;
  }

  void check_finished() const {
    for (const LoweredProgram& one : programs_) {
      const std::int32_t position = first_[one.rank];
      if (position == one.size() * fragments_) continue;
      std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> missing;
      each_need(one.rank, position, [&](Fact fact, std::int32_t a, std::int32_t b, std::int64_t id) {
        if (!holds(fact, a, b, id)) missing.push_back({fact, a, b, id});
      });
      std::sort(missing.begin(), missing.end());
      std::vector<std::int64_t> numbers{one.rank, position / one.size(), position % one.size(),
                                        static_cast<std::int64_t>(missing.size())};
      for (std::size_t i = 0; i < std::min(missing.size(), kNamed); ++i) {
        const auto& [fact, a, b, id] = missing[i];
        numbers.insert(numbers.end(), {fact, a, b, id});
      }
      throw ScheduleFault("stuck", numbers);
    }
  }

  const std::vector<LoweredProgram>& programs_;
  MessageNumbers numbers_;
  MessageEnds ends_;
  const std::int32_t fragments_, lines_;
  std::vector<std::uint8_t> uses_lines_;  // by message
  std::vector<IndexRows> followers_;
  std::vector<std::int64_t> base_;
  std::int64_t num_nodes_ = 0;
  std::vector<std::int32_t> unmet_;
  std::vector<std::uint8_t> done_;
  std::vector<std::priority_queue<std::int32_t, std::vector<std::int32_t>, std::greater<>>> ready_;
  std::vector<std::int32_t> first_;  // the first unfinished place of each rank
  std::vector<std::int32_t> active_;
};

// Returns whether the messages of a table are those of its counts, each once.
bool uses_each_once(const EntryRows& table, const PeerCounts& counts) {
  std::vector<std::pair<std::int32_t, std::int32_t>> used;
  for (const InstructionEntry& entry : table.entries)
    if (!entry.local()) used.push_back({entry.a, entry.b});
  std::sort(used.begin(), used.end());
  PeerCounts sorted = counts;
  std::sort(sorted.begin(), sorted.end());
  std::size_t at = 0;
  for (const auto& [peer, count] : sorted)
    for (std::int32_t k = 0; k < count; ++k, ++at)
      if (at >= used.size() || used[at] != std::pair{peer, k}) return false;
  return at == used.size();
}

void check_lowered_races(const LoweredProgram& one) {
  using Slices = std::vector<BlockSlice>;
  RaceCheck<Slices, Slices> check(one.rank, one.spaces, one.deps);
  Slices reads, writes;
  for (std::int32_t index = 0; index < one.size(); ++index) {
    reads.clear();
    writes.clear();
    for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e)
      if (e->local()) reads.push_back(e->slice());
    for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e)
      if (e->local()) writes.push_back(e->slice());
    check.access(index, reads, writes);
  }
}

// Returns whether some instruction reads input that the program overwrites before, in place.
bool loses_input(const LoweredProgram& one) {
  InputWatch input(one.spaces);
  for (std::int32_t index = 0; index < one.size(); ++index) {
    const auto *inputs = one.inputs.begin(index), *inputs_end = one.inputs.end(index);
    for (const auto* e = inputs; e != inputs_end; ++e)
      if (e->local() && input.read(e->slice()) >= 0) return true;
    const bool copies = inputs_end - inputs == 1 && inputs->local();
    for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e)
      if (e->local() && !(copies && InputWatch::changes_nothing(inputs->slice(), e->slice())))
        input.write(e->slice());
  }
  return false;
}

// One way in which buffers may lie: the memories and messages of one fragment.
class LoweredMeaning {
 public:
  LoweredMeaning(const std::vector<LoweredProgram>& programs, const MessageNumbers& numbers,
                 const OperationGoal& goal, CombineRule rule, RankSets& sets, bool in_place)
      : programs_(programs), numbers_(numbers), goal_(goal), rule_(rule), sets_(sets),
        memory_(goal, spaces_of(programs), sets, in_place),
        messages_(static_cast<std::size_t>(numbers.size())) {}

  void run(std::int32_t rank, std::int32_t index) {
    const LoweredProgram& one = programs_[rank];
    bool first = true;
    for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e) {
      Value& operand = first ? value_ : operand_;
      if (e->local()) {
        memory_.read(rank, e->slice(), operand);
      } else {
        Value& message = messages_[static_cast<std::size_t>(numbers_.of(e->a, rank, e->b))];
        operand = std::move(message);
        message = Value();
      }
      if (!first) {
        combine_values(value_, operand_, rule_, goal_.idempotent, sets_, result_);
        std::swap(value_, result_);
      }
      first = false;
    }
    for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e) {
      if (e->local()) {
        memory_.write(rank, e->slice(), value_);
      } else {
        messages_[static_cast<std::size_t>(numbers_.of(rank, e->a, e->b))] = value_;
      }
    }
  }

  void check() const { memory_.check(goal_); }

 private:
  static std::vector<const BlockSpaces*> spaces_of(const std::vector<LoweredProgram>& programs) {
    std::vector<const BlockSpaces*> spaces;
    for (const LoweredProgram& one : programs) spaces.push_back(&one.spaces);
    return spaces;
  }

  const std::vector<LoweredProgram>& programs_;
  const MessageNumbers& numbers_;
  const OperationGoal& goal_;
  CombineRule rule_;
  RankSets& sets_;
  SymbolicMemory memory_;
  std::vector<Value> messages_;
  Value value_, operand_, result_;
};

}  // namespace

MessageNumbers::MessageNumbers(const std::vector<LoweredProgram>& programs) {
  for (const LoweredProgram& one : programs) {
    std::vector<Pair> pairs;
    for (const auto& [peer, count] : one.messages_out) {
      pairs.push_back({peer, count, size_});
      size_ += count;
    }
    std::sort(pairs.begin(), pairs.end(),
              [](const Pair& x, const Pair& y) { return x.receiver < y.receiver; });
    pairs_.push_back(std::move(pairs));
  }
}

const MessageNumbers::Pair* MessageNumbers::pair(std::int32_t sender, std::int32_t receiver) const {
  if (sender < 0 || sender >= static_cast<std::int32_t>(pairs_.size())) return nullptr;
  const std::vector<Pair>& own = pairs_[sender];
  const auto at = std::lower_bound(own.begin(), own.end(), receiver,
                                   [](const Pair& p, std::int32_t peer) { return p.receiver < peer; });
  return at == own.end() || at->receiver != receiver ? nullptr : &*at;
}

std::int64_t MessageNumbers::of(std::int32_t sender, std::int32_t receiver, std::int32_t k) const {
  const Pair* found = pair(sender, receiver);
  return found == nullptr || k < 0 || k >= found->count ? -1 : found->first + k;
}

std::int32_t MessageNumbers::count(std::int32_t sender, std::int32_t receiver) const {
  const Pair* found = pair(sender, receiver);
  return found == nullptr ? 0 : found->count;
}

std::vector<EnginePlace> run_engine(const std::vector<LoweredProgram>& programs,
                                    std::int32_t fragments, std::int32_t lines,
                                    const HasLines& has_lines) {
  return EngineRun(programs, fragments, lines, has_lines).run();
}

void check_lowered(const std::vector<LoweredProgram>& programs) {
  std::vector<PeerCounts> received;
  for (const LoweredProgram& one : programs) {
    received.push_back(one.messages_in);
    std::sort(received.back().begin(), received.back().end());
  }
  for (const LoweredProgram& one : programs) {
    for (const auto& [peer, count] : one.messages_out) {
      std::int32_t expected = 0;
      if (peer < static_cast<std::int32_t>(programs.size())) {
        const auto at = std::lower_bound(received[peer].begin(), received[peer].end(),
                                         std::pair{one.rank, std::int32_t{0}});
        if (at != received[peer].end() && at->first == one.rank) expected = at->second;
      }
      if (count != expected) throw ScheduleFault("counts", {one.rank, peer, count, expected});
    }
  }
  for (const LoweredProgram& one : programs) {
    if (!uses_each_once(one.inputs, one.messages_in)) throw ScheduleFault("uses", {one.rank, 1});
    if (!uses_each_once(one.outputs, one.messages_out)) throw ScheduleFault("uses", {one.rank, 0});
    check_lowered_races(one);
  }
}

void check_lowered_meaning(const std::vector<LoweredProgram>& programs,
                           const std::vector<EnginePlace>& order, const OperationGoal& goal,
                           CombineRule rule) {
  const MessageNumbers numbers(programs);
  const bool in_place_too = std::any_of(programs.begin(), programs.end(), loses_input);
  RankSets sets(goal.size);
  for (int mode = 0; mode < (in_place_too ? 2 : 1); ++mode) {
    LoweredMeaning meaning(programs, numbers, goal, rule, sets, mode == 1);
    for (const EnginePlace& place : order) {
      if (place.fragment != 0) continue;
      try {
        meaning.run(place.rank, place.index);
      } catch (ScheduleFault& fault) {
        fault.numbers.insert(fault.numbers.begin(), {place.rank, place.fragment, place.index});
        throw;
      }
    }
    meaning.check();
  }
}

}  // namespace commrt
