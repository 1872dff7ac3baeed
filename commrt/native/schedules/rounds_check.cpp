// SPDX-License-Identifier: Apache-2.0
// Checks groups of messages, and runs them with the work between them, symbolically.
#include <algorithm>
#include <map>
#include <memory>
#include <tuple>

#include "schedules/proof.hpp"
#include "schedules/rounds.hpp"
#include "schedules/stream_rows.hpp"

namespace commrt {

namespace {

struct Key {
  std::int32_t round;
  std::int32_t part;

  bool operator<(const Key& other) const {
    return std::tie(round, part) < std::tie(other.round, other.part);
  }
  bool operator==(const Key& other) const {
    return round == other.round && part == other.part;
  }
};

Key key_of(const StreamRow& group) { return {group.fragment, group.peer}; }

struct End {
  std::int32_t src;
  std::int32_t dst;
  const StreamRow* row;
};

// Every rank's groups in the order of their keys, all ranks' groups of one key together.
class AllGroups {
 public:
  AllGroups(const std::vector<RankRounds>& rounds, const std::vector<RowsView>& rows)
      : rounds_(rounds), rows_(rows) {
    std::map<Key, bool> keys;
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      RowCursor cursor{rows[rank]};
      Key before{-1, -1};
      for (cursor.skip_work(); !cursor.ended(); cursor.pass_group(), cursor.skip_work()) {
        const Key key = key_of(cursor.row());
        if (!(before < key)) throw ScheduleFault("falling", {static_cast<std::int64_t>(rank)});
        before = key;
        if (keys.empty() || keys.rbegin()->first < key) {
          keys.emplace_hint(keys.end(), key, true);
        } else {
          keys.emplace(key, true);
        }
      }
    }
    for (const auto& [key, seen] : keys) keys_.push_back(key);
  }

  const std::vector<Key>& keys() const { return keys_; }

  // In each group the messages from one rank to another are, at both ends, the same ones in the
  // same order, and equally long for every vector.
  void check_closed() const {
    std::vector<RowCursor> cursors = start();
    std::vector<End> sent, received;
    for (const Key& key : keys_) {
      sent.clear();
      received.clear();
      for (std::size_t at = 0; at < cursors.size(); ++at) {
        RowCursor& cursor = cursors[at];
        const auto rank = static_cast<std::int32_t>(at);
        if (cursor.ended() || !(key_of(cursor.row()) == key)) continue;
        for (std::int32_t i = 0; i < cursor.num_messages(); ++i) {
          const StreamRow* row = cursor.messages() + i;
          if (row->kind == StreamRowKind::kSend) {
            sent.push_back({rank, row->peer, row});
          } else {
            received.push_back({row->peer, rank, row});
          }
        }
        cursor.pass_group();
        cursor.skip_work();
      }
      compare(key, sent, received);
    }
  }

 private:
  std::vector<RowCursor> start() const {
    std::vector<RowCursor> cursors;
    for (const RowsView& own : rows_) {
      cursors.push_back({own});
      cursors.back().skip_work();
    }
    return cursors;
  }

  void compare(const Key& key, std::vector<End>& sent, std::vector<End>& received) const {
    const auto before = [](const End& x, const End& y) {
      return std::tie(x.src, x.dst) < std::tie(y.src, y.dst);
    };
    std::stable_sort(sent.begin(), sent.end(), before);
    std::stable_sort(received.begin(), received.end(), before);
    for (std::size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
      const bool both = i < sent.size() && i < received.size();
      if (!both || before(sent[i], received[i]) || before(received[i], sent[i]) ||
          sent[i].row->fragment != received[i].row->fragment || sent[i].row->k != received[i].row->k)
        not_closed(key, sent, received, i);
      const End &send = sent[i], &recv = received[i];
      const BlockSlice &src = send.row->place.slice, &dst = recv.row->place.slice;
      if (!equally_long(rounds_[send.src].spaces[src.space], src,
                        rounds_[recv.dst].spaces[dst.space], dst))
        throw ScheduleFault("length", {key.round, send.row->k, send.src, send.dst});
    }
  }

  // The first pair of ranks whose messages differ; then, for each end, how many they are, and
  // their fragments and numbers.
  [[noreturn]] static void not_closed(const Key& key, const std::vector<End>& sent,
                                      const std::vector<End>& received, std::size_t at) {
    std::pair<std::int32_t, std::int32_t> pair{INT32_MAX, INT32_MAX};
    for (const auto* ends : {&sent, &received})
      if (at < ends->size()) pair = std::min(pair, {(*ends)[at].src, (*ends)[at].dst});
    std::vector<std::int64_t> numbers{key.round, key.part, pair.first, pair.second};
    for (const auto* ends : {&sent, &received}) {
      const std::size_t count_at = numbers.size();
      numbers.push_back(0);
      for (const End& end : *ends) {
        if (std::pair{end.src, end.dst} != pair) continue;
        ++numbers[count_at];
        numbers.push_back(end.row->fragment);
        numbers.push_back(end.row->k);
      }
    }
    throw ScheduleFault("not closed", numbers);
  }

  const std::vector<RankRounds>& rounds_;
  const std::vector<RowsView>& rows_;
  std::vector<Key> keys_;
};

// Checks the sizes of a rank's groups; returns the largest one's number of messages.
std::int32_t check_sizes(std::int32_t rank, std::int32_t size, const RowsView& rows,
                         const GroupLimits& limits) {
  std::int32_t most = 0;
  std::vector<std::int32_t> count(static_cast<std::size_t>(size), 0);
  RowCursor cursor{rows};
  for (cursor.skip_work(); !cursor.ended(); cursor.pass_group(), cursor.skip_work()) {
    most = std::max(most, cursor.num_messages());
    for (const StreamRowKind kind : {StreamRowKind::kSend, StreamRowKind::kRecv}) {
      std::int32_t peers = 0, many = 0;
      const StreamRow *begin = cursor.messages(), *end = begin + cursor.num_messages();
      for (const StreamRow* row = begin; row != end; ++row) {
        if (row->kind != kind) continue;
        peers += count[row->peer]++ == 0;
        many = std::max(many, count[row->peer]);
      }
      if (peers > limits.distances || many > limits.messages)
        throw ScheduleFault("large", {cursor.row().fragment, cursor.row().peer, rank,
                                      kind == StreamRowKind::kRecv, peers, many});
      for (const StreamRow* row = begin; row != end; ++row) count[row->peer] = 0;
    }
  }
  return most;
}

// Within a group nothing is received where something else is received or sent from.
void check_undisturbed(const RankRounds& own, const RowsView& rows, std::int32_t fragments) {
  DisturbedReceives disturbed(own, fragments);
  const auto [group, receive] = disturbed.find(rows, DisturbedReceives::Unit::kGroup);
  if (receive == nullptr) return;
  throw ScheduleFault("disturbed", {group->fragment, own.rank, receive->k, receive->peer});
}

// All ranks' memory, for one way in which buffers may lie, run round by round.
class RoundsMeaning {
 public:
  RoundsMeaning(const std::vector<RankRounds>& rounds, const std::vector<RowsView>& rows,
                std::int32_t fragments, const OperationGoal& goal, CombineRule rule,
                RankSets& sets, bool in_place)
      : goal_(goal), rule_(rule), sets_(sets) {
    std::vector<const BlockSpaces*> spaces;
    for (std::size_t rank = 0; rank < rounds.size(); ++rank) {
      spaces.push_back(&rounds[rank].spaces);
      cursors_.push_back({rows[rank]});
      num_slots_.push_back(rounds[rank].num_slots);
      slots_.emplace_back(static_cast<std::size_t>(rounds[rank].num_slots) *
                          static_cast<std::size_t>(fragments));
    }
    for (std::int32_t fragment = 0; fragment < fragments; ++fragment)
      memories_.push_back(std::make_unique<SymbolicMemory>(goal, spaces, sets, in_place));
  }

  void run(const std::vector<Key>& keys) {
    for (const Key& key : keys) {
      moving_.clear();
      for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
        RowCursor& cursor = cursors_[rank];
        do_work(static_cast<std::int32_t>(rank), &key);
        if (cursor.ended() || !(key_of(cursor.row()) == key)) continue;
        moving_.push_back(static_cast<std::int32_t>(rank));
      }
      move();
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      do_work(static_cast<std::int32_t>(rank), nullptr);
      if (!cursors_[rank].ended())
        throw ScheduleFault("never", {static_cast<std::int64_t>(rank), cursors_[rank].row().fragment});
    }
    for (const auto& memory : memories_) memory->check(goal_);
  }

 private:
  void do_work(std::int32_t rank, const Key* key) {
    RowCursor& cursor = cursors_[rank];
    for (; !cursor.ended() && !cursor.at_group(); ++cursor.at) {
      const StreamRow& row = cursor.row();
      try {
        work(rank, row);
      } catch (ScheduleFault& fault) {
        fault.numbers.insert(fault.numbers.begin(),
                             {rank, row.fragment, row.kind == StreamRowKind::kReduce,
                              key != nullptr ? key->round : -1, key != nullptr ? key->part : -1});
        throw;
      }
    }
  }

  void work(std::int32_t rank, const StreamRow& row) {
    const Value& moved = read(rank, row.fragment, row.source, moved_);
    if (row.kind == StreamRowKind::kReduce) {
      const Value& own = read(rank, row.fragment, row.place, own_);
      combine_values(own, moved, rule_, goal_.idempotent, sets_, result_);
      write(rank, row.fragment, row.place, result_);
    } else {
      write(rank, row.fragment, row.place, moved);
    }
  }

  // Moves the messages of one group: all are read before any is written.
  void move() {
    sent_.clear();
    for (std::int32_t rank : moving_) {
      each_message(rank, StreamRowKind::kSend, [&](const StreamRow& row) {
        const std::size_t at = sent_.size();
        sent_.push_back({{rank, row.peer, row.fragment, row.k}, at});
        if (values_.size() <= at) values_.emplace_back();
        try {
          const Value& value = read(rank, row.fragment, row.place, values_[at]);
          if (&value != &values_[at]) values_[at] = value;
        } catch (ScheduleFault& fault) {
          fault.numbers.insert(fault.numbers.begin(),
                               {rank, row.fragment, -1, cursors_[rank].row().fragment,
                                cursors_[rank].row().peer});
          throw;
        }
      });
    }
    std::sort(sent_.begin(), sent_.end(), [](const Sent& x, const Sent& y) { return x.ends < y.ends; });
    for (std::int32_t rank : moving_) {
      each_message(rank, StreamRowKind::kRecv, [&](const StreamRow& row) {
        const Ends ends{row.peer, rank, row.fragment, row.k};
        const auto found = std::lower_bound(
            sent_.begin(), sent_.end(), ends,
            [](const Sent& one, const Ends& wanted) { return one.ends < wanted; });
        write(rank, row.fragment, row.place, values_[found->at]);
      });
      cursors_[rank].pass_group();
    }
  }

  template <class See>
  void each_message(std::int32_t rank, StreamRowKind kind, const See& see) const {
    const RowCursor& cursor = cursors_[rank];
    const StreamRow *begin = cursor.messages(), *end = begin + cursor.num_messages();
    for (const StreamRow* row = begin; row != end; ++row)
      if (row->kind == kind) see(*row);
  }

  Value& slot(std::int32_t rank, std::int32_t fragment, std::int32_t number) {
    return slots_[rank][static_cast<std::size_t>(fragment) * num_slots_[rank] + number];
  }

  // Returns the content of a place, which may be put into `scratch`.
  const Value& read(std::int32_t rank, std::int32_t fragment, const RoundPlace& place,
                    Value& scratch) {
    if (place.slot < 0) {
      memories_[fragment]->read(rank, place.slice, scratch);
      return scratch;
    }
    const Value& value = slot(rank, fragment, place.slot);
    if (value.size() == 0) throw ScheduleFault("empty slot", {place.slot});
    return value;
  }

  void write(std::int32_t rank, std::int32_t fragment, const RoundPlace& place,
             const Value& value) {
    if (place.slot < 0) {
      memories_[fragment]->write(rank, place.slice, value);
    } else {
      slot(rank, fragment, place.slot) = value;
    }
  }

  using Ends = std::array<std::int32_t, 4>;  // sender, receiver, fragment, k
  struct Sent {
    Ends ends;
    std::size_t at;  // place of its value
  };

  const OperationGoal& goal_;
  CombineRule rule_;
  RankSets& sets_;
  std::vector<std::unique_ptr<SymbolicMemory>> memories_;
  std::vector<RowCursor> cursors_;
  std::vector<std::int32_t> num_slots_;
  std::vector<std::vector<Value>> slots_;
  std::vector<std::int32_t> moving_;
  std::vector<Sent> sent_;
  std::vector<Value> values_;
  Value moved_, own_, result_;
};

// Throws unless rows name fragments, peers and places that there are; returns the fragments.
std::int32_t check_rows(const std::vector<RankRounds>& rounds, const std::vector<RowsView>& rows) {
  std::int32_t fragments = 1;
  const auto size = static_cast<std::int32_t>(rounds.size());
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const RankRounds& own = rounds[rank];
    const auto exists = [&own](const RoundPlace& place) {
      const BlockSlice& where = place.slice;
      return place.slot < own.num_slots && where.space >= 0 &&
             where.space < static_cast<std::int32_t>(own.spaces.size()) && where.lo >= 0 &&
             where.lo < where.hi && where.hi <= own.spaces[where.space].nblk;
    };
    std::int64_t left = 0;  // messages of the group
    for (std::int64_t at = 0; at < rows[rank].count; ++at) {
      const StreamRow& row = rows[rank].rows[at];
      const bool message = row.kind == StreamRowKind::kSend || row.kind == StreamRowKind::kRecv;
      const bool work = row.kind == StreamRowKind::kCopy || row.kind == StreamRowKind::kReduce;
      const bool right = message == (left > 0) && row.fragment >= 0 && row.k >= 0 &&
                         (!message || (row.peer >= 0 && row.peer < size)) &&
                         (!(message || work) || exists(row.place)) && (!work || exists(row.source));
      if (!right) throw ScheduleFault("row", {static_cast<std::int64_t>(rank), at});
      if (work && row.place.slice.count() != row.source.slice.count())
        throw ScheduleFault("work", {static_cast<std::int64_t>(rank), at});
      if (message || work) fragments = std::max(fragments, row.fragment + 1);
      left = message ? left - 1 : (work ? 0 : row.k);
    }
    if (left > 0) throw ScheduleFault("row", {static_cast<std::int64_t>(rank), rows[rank].count});
  }
  return fragments;
}

}  // namespace

std::int32_t check_stream_rows(const std::vector<RankRounds>& rounds,
                               const std::vector<RowsView>& rows, const GroupLimits& limits,
                               const OperationGoal& goal, CombineRule rule,
                               const std::vector<RowsView>& once) {
  const std::int32_t fragments = check_rows(rounds, rows);
  const std::size_t size = rounds.size();
  const AllGroups groups(rounds, rows);
  groups.check_closed();
  std::int32_t most = 0;
  for (std::size_t rank = 0; rank < size; ++rank)
    most = std::max(most, check_sizes(static_cast<std::int32_t>(rank),
                                      static_cast<std::int32_t>(size), rows[rank], limits));
  for (std::size_t rank = 0; rank < size; ++rank)
    check_undisturbed(rounds[rank], rows[rank], fragments);
  bool in_place_too = false, all_repeat = !once.empty();
  for (std::size_t rank = 0; all_repeat && rank < size; ++rank)
    all_repeat = repeats(rounds[rank], rows[rank], fragments, once[rank]);
  if (all_repeat) return most;
  for (std::size_t rank = 0; !in_place_too && rank < size; ++rank)
    in_place_too = stream_loses_input(rounds[rank], rows[rank], fragments);
  RankSets sets(goal.size);
  for (int mode = 0; mode < (in_place_too ? 2 : 1); ++mode)
    RoundsMeaning(rounds, rows, fragments, goal, rule, sets, mode == 1).run(groups.keys());
  return most;
}

}  // namespace commrt
