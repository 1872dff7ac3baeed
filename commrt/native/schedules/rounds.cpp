// SPDX-License-Identifier: Apache-2.0
// The round of a message is the earliest one in which its value is there.
#include "schedules/rounds.hpp"

#include <algorithm>
#include <tuple>

#include "schedules/engine_run.hpp"

namespace commrt {

namespace {

constexpr std::int32_t kBefore = -1;  // the round of what waits for no message

bool sends(const LoweredProgram& one, std::int32_t index) {
  for (const auto* e = one.outputs.begin(index); e != one.outputs.end(index); ++e) {
    if (e->local()) continue;
    if (one.outputs.count(index) != 1 || one.inputs.count(index) != 1 ||
        !one.inputs.begin(index)->local())
      throw ScheduleFault("sends and works", {one.rank, index});
    return true;
  }
  return false;
}

// The rounds in which each instruction of each rank is done, and each message moves.
struct Timing {
  std::vector<std::vector<std::int32_t>> done;
  std::vector<std::int32_t> of_message;

  Timing(const std::vector<LoweredProgram>& programs, const MessageNumbers& numbers)
      : of_message(static_cast<std::size_t>(numbers.size()), kBefore), programs_(programs),
        numbers_(numbers) {
    run();
  }

 private:
  struct Node {
    std::int32_t rank;
    std::int32_t index;
  };

  void run() {
    std::vector<Node> receivers(of_message.size(), {-1, -1});
    std::vector<std::vector<std::int32_t>> missing;
    std::vector<IndexRows> followers;
    std::vector<Node> ready;
    for (const LoweredProgram& one : programs_) {
      done.emplace_back(static_cast<std::size_t>(one.size()), kBefore);
      missing.emplace_back(static_cast<std::size_t>(one.size()), 0);
      IndexRows& after = followers.emplace_back();
      after.starts.assign(static_cast<std::size_t>(one.size()) + 1, 0);
      for (std::int32_t dep : one.deps.values) ++after.starts[dep + 1];
      for (std::int32_t i = 0; i < one.size(); ++i) after.starts[i + 1] += after.starts[i];
      after.values.resize(one.deps.values.size());
      std::vector<std::int32_t> next(after.starts.begin(), after.starts.end() - 1);
      for (std::int32_t index = 0; index < one.size(); ++index) {
        std::int32_t needs = one.deps.count(index);
        for (const auto* dep = one.deps.begin(index); dep != one.deps.end(index); ++dep)
          after.values[next[*dep]++] = index;
        for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e) {
          if (e->local()) continue;
          ++needs;
          const std::int64_t message = numbers_.of(e->a, one.rank, e->b);
          if (message >= 0) receivers[message] = {one.rank, index};
        }
        missing.back()[index] = needs;
        if (needs == 0) ready.push_back({one.rank, index});
      }
    }
    const auto meet = [&](const Node& node) {
      if (--missing[node.rank][node.index] == 0) ready.push_back(node);
    };
    while (!ready.empty()) {
      const auto [rank, index] = ready.back();
      ready.pop_back();
      const LoweredProgram& one = programs_[rank];
      const std::int64_t sent = settle(one, index);
      for (const auto* f = followers[rank].begin(index); f != followers[rank].end(index); ++f)
        meet({rank, *f});
      if (sent < 0) continue;
      if (receivers[sent].rank < 0) {
        const InstructionEntry& message = *one.outputs.begin(index);
        throw ScheduleFault("not received", {rank, message.b, message.a});
      }
      meet(receivers[sent]);
    }
    for (const LoweredProgram& one : programs_)
      for (std::int32_t index = 0; index < one.size(); ++index)
        if (missing[one.rank][index] != 0) throw ScheduleFault("no rounds", {one.rank, index});
  }

  // Finds the round of an instruction; returns the number of the message that it sends, or -1.
  std::int64_t settle(const LoweredProgram& one, std::int32_t index) {
    std::vector<std::int32_t>& own = done[one.rank];
    std::int32_t last = kBefore;
    for (const auto* dep = one.deps.begin(index); dep != one.deps.end(index); ++dep)
      last = std::max(last, own[*dep]);
    if (sends(one, index)) {
      // The value that it sends was made in an earlier round, at the latest.
      const InstructionEntry& message = *one.outputs.begin(index);
      const std::int64_t number = numbers_.of(one.rank, message.a, message.b);
      if (number < 0) throw ScheduleFault("not received", {one.rank, message.b, message.a});
      own[index] = of_message[number] = 1 + last;
      return number;
    }
    for (const auto* e = one.inputs.begin(index); e != one.inputs.end(index); ++e)
      if (!e->local()) last = std::max(last, of_message[numbers_.of(e->a, one.rank, e->b)]);
    own[index] = last;
    return -1;
  }

  const std::vector<LoweredProgram>& programs_;
  const MessageNumbers& numbers_;
};

// The memory that groups of each round read and write: a bit for each round and block.
class Touched {
 public:
  Touched(std::int32_t num_rounds, std::int32_t num_blocks)
      : words_((static_cast<std::size_t>(num_blocks) + 63) / 64),
        bits_(words_ * static_cast<std::size_t>(num_rounds)) {}

  void add(std::int32_t round, std::int32_t lo, std::int32_t hi) {
    each_word(round, lo, hi, [](std::uint64_t& word, std::uint64_t mask) {
      word |= mask;
      return false;
    });
  }
  bool meets(std::int32_t round, std::int32_t lo, std::int32_t hi) {
    return each_word(round, lo, hi,
                     [](std::uint64_t& word, std::uint64_t mask) { return (word & mask) != 0; });
  }

 private:
  template <class See>
  bool each_word(std::int32_t round, std::int32_t lo, std::int32_t hi, const See& see) {
    std::uint64_t* row = bits_.data() + words_ * static_cast<std::size_t>(round);
    for (std::int32_t at = lo; at < hi;) {
      const std::int32_t until = std::min(hi, (at / 64 + 1) * 64);
      std::uint64_t mask = ~std::uint64_t{0} << (at % 64);
      if (until % 64 != 0) mask &= ~(~std::uint64_t{0} << (until % 64));
      if (see(row[at / 64], mask)) return true;
      at = until;
    }
    return false;
  }

  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

struct Span {
  std::int32_t lo;
  std::int32_t hi;

  bool meets(const Span& other) const {
    return std::max(lo, other.lo) < std::min(hi, other.hi);
  }
  bool operator==(const Span& other) const { return lo == other.lo && hi == other.hi; }
};

// The rounds of one rank, filled instruction by instruction.
class RankFilling {
 public:
  RankFilling(const LoweredProgram& one, std::int32_t num_rounds, const Timing& timing,
              const MessageNumbers& numbers)
      : one_(one), done_(timing.done[one.rank]), of_message_(timing.of_message),
        numbers_(numbers), touched_(num_rounds, num_locations(one.spaces)) {
    made_.rank = one.rank;
    made_.spaces = one.spaces;
    made_.rounds.resize(static_cast<std::size_t>(num_rounds) + 1);
  }

  RankRounds run() {
    for (std::int32_t index = 0; index < one_.size(); ++index)
      if (sends(one_, index)) send(index);
    for (std::int32_t index = 0; index < one_.size(); ++index)
      if (!sends(one_, index)) compute(index);
    for (OneRound& each : made_.rounds) {
      for (auto* ends : {&each.sends, &each.recvs})
        std::sort(ends->begin(), ends->end(), [](const RoundMessage& x, const RoundMessage& y) {
          return std::tie(x.peer, x.k) < std::tie(y.peer, y.k);
        });
    }
    made_.num_slots = num_slots_;
    return std::move(made_);
  }

 private:
  OneRound& round(std::int32_t number) {
    return number == kBefore ? made_.rounds.back() : made_.rounds[number];
  }

  // The numbers of its blocks, those of `in` as those of `out`.
  Span blocks(const BlockSlice& where) const {
    const std::int32_t first = one_.spaces[where.space].first;
    return {first + where.lo, first + where.hi};
  }

  void touch(std::int32_t number, const BlockSlice& where) {
    const Span span = blocks(where);
    touched_.add(number, span.lo, span.hi);
  }

  void send(std::int32_t index) {
    const BlockSlice source = one_.inputs.begin(index)->slice();
    const InstructionEntry& message = *one_.outputs.begin(index);
    round(done_[index]).sends.push_back({message.a, message.b, {-1, source}});
    touch(done_[index], source);
  }

  void compute(std::int32_t index) {
    const std::int32_t number = done_[index];
    std::vector<InstructionEntry> inputs(one_.inputs.begin(index), one_.inputs.end(index));
    std::vector<BlockSlice> outputs;
    for (const auto* e = one_.outputs.begin(index); e != one_.outputs.end(index); ++e)
      outputs.push_back(e->slice());
    bool straight = may_come_straight(index, outputs);
    // The first two operands may stand in either order.
    if (straight && inputs.size() > 1 && !arrives(inputs[0], number))
      std::swap(inputs[0], inputs[1]);
    straight = straight && arrives(inputs[0], number);
    std::vector<RoundPlace> places;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].local()) {
        places.push_back({-1, inputs[i].slice()});
      } else {
        places.push_back(receive(inputs[i], outputs, inputs, straight && i == 0));
      }
    }
    if (outputs.empty()) return;
    std::vector<RoundWork>& work = round(number).work;
    const RoundPlace where = combine(places, outputs[0], work);
    for (const BlockSlice& output : outputs)
      if (const RoundPlace target{-1, output}; !(target == where))
        work.push_back({false, target, where});
  }

  // Returns whether a message comes in the round in which it is used.
  bool arrives(const InstructionEntry& entry, std::int32_t number) const {
    return !entry.local() && of_message_[numbers_.of(entry.a, one_.rank, entry.b)] == number;
  }

  // Returns whether a message may be received where the first output is.
  bool may_come_straight(std::int32_t index, const std::vector<BlockSlice>& outputs) {
    const std::int32_t number = done_[index];
    if (outputs.empty() || number == kBefore) return false;
    for (const auto* dep = one_.deps.begin(index); dep != one_.deps.end(index); ++dep)
      if (done_[*dep] >= number) return false;
    const Span target = blocks(outputs[0]);
    for (const auto* e = one_.inputs.begin(index); e != one_.inputs.end(index); ++e)
      if (e->local() && target.meets(blocks(e->slice()))) return false;
    return !touched_.meets(number, target.lo, target.hi);
  }

  RoundPlace receive(const InstructionEntry& entry, const std::vector<BlockSlice>& outputs,
                     const std::vector<InstructionEntry>& inputs, bool straight) {
    const std::int32_t number = of_message_[numbers_.of(entry.a, one_.rank, entry.b)];
    RoundPlace place;
    if (straight) {
      place.slice = outputs[0];
      touch(number, outputs[0]);
    } else if (!outputs.empty()) {
      place = slot(outputs[0]);
    } else {
      const auto own = std::find_if(inputs.begin(), inputs.end(),
                                    [](const InstructionEntry& e) { return e.local(); });
      if (own == inputs.end()) throw ScheduleFault("no length", {one_.rank, entry.b, entry.a});
      place = slot(own->slice());
    }
    round(number).recvs.push_back({entry.a, entry.b, place});
    return place;
  }

  RoundPlace slot(const BlockSlice& like) { return {num_slots_++, like}; }

  // Reduces `places` from the left; returns where the value is then.
  RoundPlace combine(std::vector<RoundPlace> places, const BlockSlice& output,
                     std::vector<RoundWork>& work) {
    if (places.size() == 1) return places[0];
    const Span target = blocks(output);
    // Operands that lie at the place of the result.
    std::vector<std::size_t> shared;
    for (std::size_t i = 0; i < places.size(); ++i)
      if (places[i].slot < 0 && target.meets(blocks(places[i].slice))) shared.push_back(i);
    const auto is_target = [&](const RoundPlace& place) {
      return place.slot < 0 && blocks(place.slice) == target;
    };
    if (shared == std::vector<std::size_t>{1} && is_target(places[1])) {
      std::swap(places[0], places[1]);
      shared = {0};
    }
    RoundPlace where;
    if (shared.empty() || (shared == std::vector<std::size_t>{0} && is_target(places[0]))) {
      // If in[i] and out[i] are the same, in place, this copies a block to itself.
      where.slice = output;
    } else if (places[0].slot >= 0) {
      where = places[0];
    } else {
      where = slot(output);
    }
    if (!(where == places[0])) work.push_back({false, where, places[0]});
    for (std::size_t i = 1; i < places.size(); ++i) work.push_back({true, where, places[i]});
    return where;
  }

  const LoweredProgram& one_;
  const std::vector<std::int32_t>& done_;
  const std::vector<std::int32_t>& of_message_;
  const MessageNumbers& numbers_;
  Touched touched_;
  RankRounds made_;
  std::int32_t num_slots_ = 0;
};

// Cuts a round by what both ends of a message know: its place among the pair's messages, and
// the distance from sender to receiver.
class GroupCutting {
 public:
  GroupCutting(const RankRounds& own, std::int32_t size, const GroupLimits& limits)
      : own_(own), size_(size), limits_(limits), spans_((size + limits.distances - 1) / limits.distances),
        seen_(static_cast<std::size_t>(size), 0), met_(static_cast<std::size_t>(size), 0) {}

  void cut(std::int32_t number, const std::vector<std::pair<std::int32_t, std::int32_t>>& moving,
           StreamRows& rows) {
    ends_.clear();
    for (const bool is_recv : {false, true}) {
      ++turn_;
      for (const auto& [fragment, at] : moving)
        for (const RoundMessage& message : is_recv ? own_.rounds[at].recvs : own_.rounds[at].sends)
          add(message, fragment, is_recv);
    }
    std::stable_sort(ends_.begin(), ends_.end(),
                     [](const End& x, const End& y) { return x.part < y.part; });
    for (std::size_t i = 0; i < ends_.size();) {
      std::size_t until = i;
      while (until < ends_.size() && ends_[until].part == ends_[i].part) ++until;
      rows.push_back({StreamRowKind::kGroup, number, ends_[i].part,
                      static_cast<std::int32_t>(until - i), {}, {}});
      for (; i < until; ++i) {
        const RoundMessage& message = *ends_[i].message;
        rows.push_back({ends_[i].is_recv ? StreamRowKind::kRecv : StreamRowKind::kSend,
                        ends_[i].fragment, message.peer, message.k, message.place, {}});
      }
    }
  }

 private:
  struct End {
    std::int32_t part;
    std::int32_t fragment;
    bool is_recv;
    const RoundMessage* message;
  };

  void add(const RoundMessage& message, std::int32_t fragment, bool is_recv) {
    const std::int32_t peer = message.peer;
    if (met_[peer] != turn_) met_[peer] = turn_, seen_[peer] = 0;
    const std::int32_t k = seen_[peer]++;
    std::int32_t ahead = (is_recv ? own_.rank - peer : peer - own_.rank) % size_;
    if (ahead < 0) ahead += size_;
    ends_.push_back({k / limits_.messages * spans_ + ahead / limits_.distances, fragment, is_recv,
                     &message});
  }

  const RankRounds& own_;
  const std::int32_t size_;
  const GroupLimits& limits_;
  const std::int32_t spans_;
  std::vector<std::int32_t> seen_, met_;
  std::int32_t turn_ = 0;
  std::vector<End> ends_;
};

void add_work(const std::vector<RoundWork>& work, std::int32_t fragment, StreamRows& rows) {
  for (const RoundWork& one : work)
    rows.push_back({one.reduces ? StreamRowKind::kReduce : StreamRowKind::kCopy, fragment, -1, 0,
                    one.dst, one.src});
}

}  // namespace

std::vector<RankRounds> rounds_of(const std::vector<LoweredProgram>& programs) {
  const MessageNumbers numbers(programs);
  const Timing timing(programs, numbers);
  std::int32_t count = 0;
  for (const auto& own : timing.done)
    for (std::int32_t number : own) count = std::max(count, number + 1);
  std::vector<RankRounds> made;
  made.reserve(programs.size());
  for (const LoweredProgram& one : programs)
    made.push_back(RankFilling(one, count, timing, numbers).run());
  return made;
}

StreamRows sequence_rounds(const RankRounds& own, std::int32_t size, std::int32_t fragments,
                           std::int32_t lag, const GroupLimits& limits) {
  GroupCutting groups(own, size, limits);
  StreamRows rows;
  std::vector<std::pair<std::int32_t, std::int32_t>> moving;
  const std::int32_t last = own.num_rounds();
  for (std::int32_t number = 0; number <= last + (fragments - 1) * lag; ++number) {
    moving.clear();
    for (std::int32_t f = 0; f < fragments; ++f) {
      const std::int32_t at = number - f * lag;
      if (at == 0) add_work(own.before().work, f, rows);
      if (at >= 0 && at < last) moving.push_back({f, at});
    }
    groups.cut(number, moving, rows);
    for (const auto& [f, at] : moving) add_work(own.rounds[at].work, f, rows);
  }
  return rows;
}

}  // namespace commrt
