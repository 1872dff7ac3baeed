// SPDX-License-Identifier: Apache-2.0
// Reads the steps once, in order, and fuses them as commrt/schedule/lower.py explains.
#include "schedules/lowering.hpp"

#include <algorithm>
#include <unordered_map>

namespace commrt {

namespace {

struct Instruction {
  std::vector<InstructionEntry> inputs;
  std::vector<InstructionEntry> outputs;
  bool joins = false;  // a receive, reducing or not, that may take more inputs
  std::vector<std::int32_t> after;
};

InstructionEntry local(const BlockSlice& where) {
  return {kLocalEntry, where.space, where.lo, where.hi};
}

struct SliceHash {
  std::size_t operator()(const BlockSlice& one) const {
    auto mixed = static_cast<std::uint64_t>(one.space) * 0x9E3779B97F4A7C15ull;
    mixed ^= (static_cast<std::uint64_t>(static_cast<std::uint32_t>(one.lo)) << 32 |
              static_cast<std::uint32_t>(one.hi)) *
             0xC2B2AE3D27D4EB4Full;
    return mixed ^ mixed >> 29;
  }
};

// Counts messages by peer, in the order in which peers are met.
class Counter {
 public:
  std::int32_t next(std::int32_t peer) {
    if (peer >= static_cast<std::int32_t>(place_.size())) place_.resize(peer + 1, -1);
    if (place_[peer] < 0) {
      place_[peer] = static_cast<std::int32_t>(counts.size());
      counts.push_back({peer, 0});
    }
    return counts[place_[peer]].second++;
  }

  PeerCounts counts;

 private:
  std::vector<std::int32_t> place_;
};

class Lowering {
 public:
  Lowering(const StepColumns& steps, const BlockSpaces& spaces, std::int32_t rank,
           const std::vector<std::uint8_t>& fuses)
      : steps_(steps), spaces_(spaces), rank_(rank), fuses_(fuses) {
    std::int32_t following = 0;
    for (const BlockSpace& space : spaces) {
      offset_.push_back(following);
      following += space.nblk;
    }
    num_blocks_ = following;
    const auto locations = static_cast<std::size_t>(num_locations(spaces));
    writer_.assign(locations, -1);
    reader_.assign(locations, -1);
    first_copy_.assign(locations, -1);
    copies_.resize(static_cast<std::size_t>(following));
    of_step_.assign(static_cast<std::size_t>(steps.size()), -1);
  }

  LoweredProgram run() {
    for (std::int32_t index = 0; index < steps_.size(); ++index) handle(index);
    finish_copies();
    return pack(drop_dead());
  }

 private:
  // A noted copy of a block: where its data is, and how many instructions came before it.
  struct Copy {
    std::int32_t space = -1;  // -1: none
    std::int32_t block = 0;
    std::int32_t position = 0;
    std::int32_t next = -1;  // other copies of the same block, by their numbers
    std::int32_t before = -1;
  };

  void handle(std::int32_t index) {
    const ScheduleStep& step = steps_.row(index);
    check(step, index);
    const std::vector<std::int32_t>* after = steps_.after(index);
    const bool free = after == nullptr;
    std::int32_t made = -1;
    switch (step.op) {
      case kSendStep: made = send(step, free); break;
      case kRecvStep: made = recv(step); break;
      case kRredStep: made = rred(step, free); break;
      case kRedStep: made = red(step); break;
      default: copy(step);
    }
    if (made < 0) return;
    of_step_[index] = made;
    if (after != nullptr) wait_for(made, *after);
  }

  void check(const ScheduleStep& step, std::int32_t index) const {
    if (step.peer == rank_) throw ScheduleFault("itself", {rank_, index});
    for (const BlockSlice* end : {&step.src, &step.dst}) {
      if (!end->given()) continue;
      const bool known = end->space < static_cast<std::int32_t>(spaces_.size());
      if (!known || end->lo < 0 || end->lo >= end->hi || end->hi > spaces_[end->space].nblk)
        throw ScheduleFault("step", {rank_, index});
    }
    const bool moves = step.op == kSendStep || step.op == kRecvStep || step.op == kRredStep;
    const bool reads = step.op != kRecvStep, writes = step.op != kSendStep;
    if (step.src.given() != reads || step.dst.given() != writes || (step.peer >= 0) != moves ||
        step.op < kSendStep || step.op > kCopyStep ||
        (reads && writes && step.src.count() != step.dst.count()))
      throw ScheduleFault("step", {rank_, index});
  }

  // Honours the author's `after`; a predecessor that was a copy has no part.
  void wait_for(std::int32_t made, const std::vector<std::int32_t>& after) {
    for (std::int32_t other : after) {
      if (other < 0 || other >= steps_.size() || of_step_[other] < 0) continue;
      const std::int32_t before = of_step_[other];
      instructions_[made].after.push_back(before);
      // It must not wait for more than its own messages: others wait for it.
      instructions_[before].joins = false;
    }
  }

  // Where blocks are, and who touched them.

  std::int32_t first(const BlockSlice& where) const {
    return spaces_[where.space].first + where.lo;
  }
  std::int32_t end(const BlockSlice& where) const { return spaces_[where.space].first + where.hi; }

  std::int32_t emit(std::vector<InstructionEntry> inputs, std::vector<InstructionEntry> outputs,
                    bool joins = false) {
    const auto index = static_cast<std::int32_t>(instructions_.size());
    for (const InstructionEntry& entry : inputs)
      if (entry.local()) note(reader_, entry.slice(), index);
    for (const InstructionEntry& entry : outputs)
      if (entry.local()) note(writer_, entry.slice(), index);
    instructions_.push_back({std::move(inputs), std::move(outputs), joins, {}});
    return index;
  }

  void note(std::vector<std::int32_t>& table, const BlockSlice& where, std::int32_t index) {
    for (std::int32_t at = first(where); at < end(where); ++at)
      table[at] = std::max(table[at], index);
  }

  bool writes(std::int32_t index, const BlockSlice& where) const {
    for (const InstructionEntry& entry : instructions_[index].outputs)
      if (entry.local() && entry.slice() == where) return true;
    return false;
  }

  // Returns the instruction one of whose local outputs is exactly `where`, or -1.
  std::int32_t maker(const BlockSlice& where) const {
    const std::int32_t found = writer_[first(where)];
    if (found < 0) return -1;
    for (std::int32_t at = first(where); at < end(where); ++at)
      if (writer_[at] != found) return -1;
    return writes(found, where) ? found : -1;
  }

  bool unchanged_since(const BlockSlice& where, std::int32_t index) const {
    for (std::int32_t at = first(where); at < end(where); ++at)
      if (writer_[at] > index) return false;
    return true;
  }

  // Returns whether instruction `index`, which has src, may also write dst. A noted copy has
  // seen no access to dst since; those before it count.
  bool may_also_write(std::int32_t index, const BlockSlice& src, const BlockSlice& dst) const {
    const std::int32_t lo = first(dst), hi = end(dst);
    if (lo == first(src) && hi == end(src) && dst.space != src.space)
      return true;  // in[i] to out[i]: in place it changes nothing
    std::int32_t last = -1;
    for (std::int32_t at = lo; at < hi; ++at) {
      if (writer_[at] >= index) return false;
      last = std::max(last, reader_[at]);
    }
    if (last < index) return true;
    if (last != index) return false;
    // Its own operand may be the very same blocks: it is read before it is written.
    for (const InstructionEntry& entry : instructions_[index].inputs) {
      if (!entry.local()) continue;
      const std::int32_t a = first(entry.slice()), b = end(entry.slice());
      const bool same = a == lo && b == hi;
      if (!same && std::max(a, lo) < std::min(b, hi)) return false;
    }
    return true;
  }

  // Copies are noted, then resolved.

  std::int32_t number(std::int32_t space, std::int32_t block) const {
    return offset_[space] + block;
  }

  // Returns the real place of the data of `where`.
  BlockSlice resolve(const BlockSlice& where) {
    std::int32_t noted = 0;
    for (std::int32_t block = where.lo; block < where.hi; ++block)
      noted += copies_[number(where.space, block)].space >= 0;
    if (noted == 0) return where;
    if (noted == where.count()) {
      const Copy& head = copies_[number(where.space, where.lo)];
      bool run = true;
      for (std::int32_t i = 1; i < where.count() && run; ++i) {
        const Copy& one = copies_[number(where.space, where.lo + i)];
        run = one.space == head.space && one.block == head.block + i;
      }
      if (run) return {head.space, head.block, head.block + where.count()};
    }
    std::vector<std::int32_t> blocks;
    for (std::int32_t block = where.lo; block < where.hi; ++block)
      blocks.push_back(number(where.space, block));
    materialise(blocks);
    return where;
  }

  // Forgets copies into `where`; carries out copies from what it overwrites.
  void before_write(const BlockSlice& where) {
    for (std::int32_t block = where.lo; block < where.hi; ++block)
      forget(number(where.space, block));
    std::vector<std::int32_t> read;
    for (std::int32_t at = first(where); at < end(where); ++at) {
      if (first_copy_[at] < 0) continue;
      read.clear();
      for (std::int32_t one = first_copy_[at]; one >= 0; one = copies_[one].next)
        read.push_back(one);
      std::sort(read.begin(), read.end());
      materialise(read);
    }
  }

  Copy forget(std::int32_t block) {
    Copy& noted = copies_[block];
    const Copy found = noted;
    if (found.space < 0) return found;
    if (found.before >= 0) {
      copies_[found.before].next = found.next;
    } else {
      first_copy_[spaces_[found.space].first + found.block] = found.next;
    }
    if (found.next >= 0) copies_[found.next].before = found.before;
    noted = Copy{};
    return found;
  }

  void remember(std::int32_t block, std::int32_t space, std::int32_t source,
                std::int32_t position) {
    std::int32_t& head = first_copy_[spaces_[space].first + source];
    copies_[block] = {space, source, position, head, -1};
    if (head >= 0) copies_[head].before = block;
    head = block;
  }

  // Carries out noted copies, in runs of blocks with consecutive sources.
  void materialise(const std::vector<std::int32_t>& blocks) {
    struct Run {
      BlockSlice dst, src;
      std::int32_t position;
    };
    std::vector<Run> runs;
    for (std::int32_t block : blocks) {
      const Copy noted = forget(block);
      if (noted.space < 0) continue;
      const std::int32_t space = space_of(block), at = block - offset_[space];
      if (!runs.empty()) {
        Run& last = runs.back();
        if (space == last.dst.space && at == last.dst.hi && noted.space == last.src.space &&
            noted.block == last.src.hi && noted.position == last.position) {
          ++last.dst.hi;
          ++last.src.hi;
          continue;
        }
      }
      runs.push_back({{space, at, at + 1},
                      {noted.space, noted.block, noted.block + 1},
                      noted.position});
    }
    for (const Run& run : runs) carry_out(run.dst, run.src, run.position);
  }

  std::int32_t space_of(std::int32_t block) const {
    const auto after = std::upper_bound(offset_.begin(), offset_.end(), block);
    return static_cast<std::int32_t>(after - offset_.begin()) - 1;
  }

  // Copies src to dst: as outputs of instructions that hold the value, or anew.
  void carry_out(const BlockSlice& dst, const BlockSlice& src, std::int32_t position) {
    const std::int32_t shift = dst.lo - src.lo;
    std::vector<std::int32_t> ends;
    for (std::int32_t done = src.lo; done < src.hi;) {
      bool hosted = false;
      value_ends(src.space, done, src.hi, ends);
      for (std::int32_t until : ends) {
        const BlockSlice piece{src.space, done, until};
        const BlockSlice target{dst.space, done + shift, until + shift};
        const std::int32_t by = host(piece, target, position);
        if (by < 0) continue;
        instructions_[by].outputs.push_back(local(target));
        // A term added to one of its outputs would be added to all of them.
        instructions_[by].joins = false;
        note(writer_, target, by);
        done = until;
        hosted = true;
        break;
      }
      if (hosted) continue;
      std::int32_t until = done + 1;
      while (until < src.hi && !begins_value(src.space, until, src.hi)) ++until;
      emit({local({src.space, done, until})}, {local({dst.space, done + shift, until + shift})});
      done = until;
    }
  }

  bool begins_value(std::int32_t space, std::int32_t lo, std::int32_t limit) {
    value_ends(space, lo, limit, begun_);
    return !begun_.empty();
  }

  // Finds the ends of values starting at `lo`, the longest first.
  void value_ends(std::int32_t space, std::int32_t lo, std::int32_t limit,
                  std::vector<std::int32_t>& found) const {
    found.clear();
    const auto sent = sent_ends_.find({space, lo, 0});
    if (sent != sent_ends_.end()) found = sent->second;
    const std::int32_t writer = writer_[spaces_[space].first + lo];
    if (writer >= 0) {
      for (const InstructionEntry& entry : instructions_[writer].outputs)
        if (entry.local() && entry.a == space && entry.b == lo) found.push_back(entry.c);
    }
    found.erase(std::remove_if(found.begin(), found.end(),
                               [limit](std::int32_t one) { return one > limit; }),
                found.end());
    std::sort(found.begin(), found.end(), std::greater<>());
    found.erase(std::unique(found.begin(), found.end()), found.end());
  }

  // Returns an instruction that holds the value of src and may also write dst, or -1.
  std::int32_t host(const BlockSlice& src, const BlockSlice& dst, std::int32_t position) const {
    const std::int32_t made_by = maker(src);
    if (made_by >= 0 && may_also_write(made_by, src, dst)) return made_by;
    const auto sender = sent_from_.find(src);
    if (sender != sent_from_.end() && sender->second >= position &&
        unchanged_since(src, sender->second) && may_also_write(sender->second, src, dst))
      return sender->second;
    return -1;
  }

  void finish_copies() {
    std::vector<std::int32_t> out;
    for (std::size_t space = 0; space < spaces_.size(); ++space) {
      if (spaces_[space].kind != BlockSpaceKind::kOut) continue;
      for (std::int32_t block = 0; block < spaces_[space].nblk; ++block)
        if (copies_[offset_[space] + block].space >= 0) out.push_back(offset_[space] + block);
    }
    materialise(out);
  }

  // One handler per kind of step; each returns its instruction, if it made one.

  bool fuses(std::int32_t peer) const {
    return peer < static_cast<std::int32_t>(fuses_.size()) && fuses_[peer] != 0;
  }

  std::int32_t send(const ScheduleStep& step, bool free) {
    const InstructionEntry message{kMessageEntry, step.peer, sent_.next(step.peer), 0};
    const BlockSlice src = resolve(step.src);
    const bool fused = fuses(step.peer) && free;
    const std::int32_t by = fused ? sender(src) : -1;
    if (by >= 0) {
      instructions_[by].outputs.push_back(message);
      note(reader_, src, by);
      instructions_[by].joins = false;
      return by;
    }
    const std::int32_t made = emit({local(src)}, {message});
    if (fused) {
      sent_from_[src] = made;
      sent_ends_[{src.space, src.lo, 0}].push_back(src.hi);
    }
    return made;
  }

  std::int32_t sender(const BlockSlice& src) const {
    const std::int32_t made_by = maker(src);
    if (made_by >= 0) return made_by;
    const auto found = sent_from_.find(src);
    if (found != sent_from_.end() && unchanged_since(src, found->second)) return found->second;
    return -1;
  }

  InstructionEntry message_in(std::int32_t peer) {
    return {kMessageEntry, peer, received_.next(peer), 0};
  }

  std::int32_t recv(const ScheduleStep& step) {
    const InstructionEntry message = message_in(step.peer);
    before_write(step.dst);
    return emit({message}, {local(step.dst)}, true);
  }

  std::int32_t rred(const ScheduleStep& step, bool free) {
    const InstructionEntry message = message_in(step.peer);
    const BlockSlice src = resolve(step.src);
    if (src == step.dst && free) {
      const std::int32_t joined = joinable(src);
      if (joined >= 0) {
        instructions_[joined].inputs.push_back(message);
        return joined;
      }
    }
    before_write(step.dst);
    return emit({local(src), message}, {local(step.dst)}, true);
  }

  // Returns the receive-and-reduce that made dst if it can take one more input, or -1.
  std::int32_t joinable(const BlockSlice& dst) const {
    const std::int32_t made_by = maker(dst);
    if (made_by < 0 || !instructions_[made_by].joins) return -1;
    for (std::int32_t at = first(dst); at < end(dst); ++at)
      if (reader_[at] > made_by || first_copy_[at] >= 0) return -1;
    for (const InstructionEntry& entry : instructions_[made_by].inputs)
      if (entry.local() && !unchanged_since(entry.slice(), made_by)) return -1;
    return made_by;
  }

  std::int32_t red(const ScheduleStep& step) {
    const BlockSlice own = resolve(step.dst);
    const BlockSlice src = resolve(step.src);
    before_write(step.dst);
    return emit({local(own), local(src)}, {local(step.dst)});
  }

  void copy(const ScheduleStep& step) {
    const BlockSlice& dst = step.dst;
    if (step.src == dst || resolve(step.src) == dst) return;
    before_write(dst);
    // Only now: carrying out what read the destination may have moved the source.
    const BlockSlice src = resolve(step.src);
    const auto position = static_cast<std::int32_t>(instructions_.size());
    for (std::int32_t offset = 0; offset < src.count(); ++offset) {
      const std::int32_t block = number(dst.space, dst.lo + offset);
      forget(block);
      remember(block, src.space, src.lo + offset, position);
    }
  }

  // Drops outputs nobody reads, then instructions without effect; returns the rest.
  std::vector<std::int32_t> drop_dead() {
    std::vector<std::uint8_t> live(static_cast<std::size_t>(num_blocks_), 0);
    for (std::size_t space = 0; space < spaces_.size(); ++space) {
      if (spaces_[space].kind == BlockSpaceKind::kOut)
        std::fill_n(live.begin() + offset_[space], spaces_[space].nblk, std::uint8_t{1});
    }
    const auto mark = [&](const BlockSlice& where, std::uint8_t value) {
      std::fill_n(live.begin() + number(where.space, where.lo), where.count(), value);
    };
    std::vector<std::int32_t> kept;
    for (auto index = static_cast<std::int32_t>(instructions_.size()) - 1; index >= 0; --index) {
      Instruction& one = instructions_[index];
      std::vector<InstructionEntry> outputs;
      bool only_messages = true, fused = true, stays_here = false;
      for (const InstructionEntry& entry : one.outputs) {
        if (entry.local() && !any(live, entry.slice())) continue;
        only_messages = only_messages && !entry.local();
        stays_here = stays_here || entry.local();
        outputs.push_back(entry);
      }
      for (const InstructionEntry& entry : one.inputs) {
        only_messages = only_messages && !entry.local();
        fused = fused && (entry.local() || fuses(entry.a));
      }
      // A message that is passed on as it came, or that comes from another node, has its length
      // from a local operand alone. One that has a single place here is received right there.
      const bool relays = !outputs.empty() && only_messages;
      if (!relays && (fused || stays_here)) one.outputs = std::move(outputs);
      for (const InstructionEntry& entry : one.outputs)
        if (entry.local()) mark(entry.slice(), 0);
      if (one.outputs.empty()) {
        // Its messages must still be taken, its local operands need not be read.
        one.inputs.erase(std::remove_if(one.inputs.begin(), one.inputs.end(),
                                        [](const InstructionEntry& e) { return e.local(); }),
                         one.inputs.end());
      }
      if (one.inputs.empty() && one.outputs.empty()) continue;
      for (const InstructionEntry& entry : one.inputs)
        if (entry.local()) mark(entry.slice(), 1);
      kept.push_back(index);
    }
    std::reverse(kept.begin(), kept.end());
    return kept;
  }

  bool any(const std::vector<std::uint8_t>& live, const BlockSlice& where) const {
    const auto begin = live.begin() + number(where.space, where.lo);
    return std::find(begin, begin + where.count(), std::uint8_t{1}) != begin + where.count();
  }

  LoweredProgram pack(const std::vector<std::int32_t>& kept) {
    LoweredProgram made;
    made.rank = rank_;
    made.spaces = spaces_;
    made.messages_in = received_.counts;
    made.messages_out = sent_.counts;
    made.used_spaces.assign(spaces_.size(), 0);
    std::vector<std::int32_t> numbers(instructions_.size(), -1);
    for (std::size_t i = 0; i < kept.size(); ++i) numbers[kept[i]] = static_cast<std::int32_t>(i);
    DataDependencies tracker;
    std::vector<BlockSlice> reads, writes;
    for (std::int32_t position = 0; position < static_cast<std::int32_t>(kept.size());
         ++position) {
      Instruction& one = instructions_[kept[position]];
      reads.clear();
      writes.clear();
      for (const InstructionEntry& entry : one.inputs)
        if (entry.local()) reads.push_back(entry.slice());
      for (const InstructionEntry& entry : one.outputs)
        if (entry.local()) writes.push_back(entry.slice());
      for (const auto* all : {&reads, &writes})
        for (const BlockSlice& where : *all) made.used_spaces[where.space] = 1;
      std::vector<std::int32_t> needed;
      tracker.access(position, reads, writes,
                     [this](const BlockSlice& where) -> std::int64_t {
                       return spaces_[where.space].first;
                     },
                     needed);
      for (std::int32_t other : one.after)
        if (numbers[other] >= 0 && numbers[other] != position) needed.push_back(numbers[other]);
      std::sort(needed.begin(), needed.end());
      needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
      made.deps.values.insert(made.deps.values.end(), needed.begin(), needed.end());
      made.deps.close_row();
      // In rank order, a local operand at the place of its own rank.
      std::stable_sort(one.inputs.begin(), one.inputs.end(),
                       [this](const InstructionEntry& x, const InstructionEntry& y) {
                         return (x.local() ? rank_ : x.a) < (y.local() ? rank_ : y.a);
                       });
      made.inputs.entries.insert(made.inputs.entries.end(), one.inputs.begin(), one.inputs.end());
      made.inputs.close_row();
      bool publishes = false;
      for (const InstructionEntry& entry : one.outputs) publishes = publishes || !entry.local();
      made.num_publishes += publishes;
      made.outputs.entries.insert(made.outputs.entries.end(), one.outputs.begin(),
                                  one.outputs.end());
      made.outputs.close_row();
    }
    return made;
  }

  const StepColumns& steps_;
  const BlockSpaces& spaces_;
  const std::int32_t rank_;
  const std::vector<std::uint8_t>& fuses_;
  std::vector<std::int32_t> offset_;  // number of the first block of each space, all different
  std::int32_t num_blocks_ = 0;
  std::vector<Instruction> instructions_;
  Counter received_;
  Counter sent_;
  std::vector<std::int32_t> writer_;
  std::vector<std::int32_t> reader_;
  std::vector<Copy> copies_;              // by block
  std::vector<std::int32_t> first_copy_;  // by location: a copy of it, or -1
  std::unordered_map<BlockSlice, std::int32_t, SliceHash> sent_from_;
  std::unordered_map<BlockSlice, std::vector<std::int32_t>, SliceHash> sent_ends_;
  std::vector<std::int32_t> of_step_;
  std::vector<std::int32_t> begun_;
};

}  // namespace

LoweredProgram lower_steps(const StepColumns& steps, const BlockSpaces& spaces, std::int32_t rank,
                           const std::vector<std::uint8_t>& fuses) {
  return Lowering(steps, spaces, rank, fuses).run();
}

}  // namespace commrt
