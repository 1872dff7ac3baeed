// SPDX-License-Identifier: Apache-2.0
// The memory that a communicator's on-node ranks share: one region per rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace commrt {

constexpr size_t kLineBytes = 64;
constexpr int kLines = 64;         // messages in flight per ordered pair
constexpr size_t kInlineBytes = 48;  // payload that rides in the line itself
constexpr size_t kMoreBytes = 2048; // and of what may ride in lines that belong to it
constexpr size_t kMostInlineBytes = kInlineBytes + kMoreBytes;
constexpr int kLanes = 8;          // operations with payload in flight per rank
constexpr int kCallLines = 64;     // long operations in flight that show where their result goes
constexpr int kPacketLines = 16;   // point-to-point packets in flight per ordered pair
constexpr size_t kPacketBytes = 16384;
constexpr int kRefusals = 64;      // refused calls per rank that some peer has not looked at
constexpr uint64_t kContextEnds = 64;  // contexts of fused() that a rank can be ahead of another

// One message. `seq` is written last (release) and polled by the receiver (acquire): on the
// reader's side the payload is then in the cache line it already holds.
struct alignas(kLineBytes) Line {
  std::atomic<uint64_t> seq;  // of a collective: message id + the call's mark (call_mark.hpp)
  uint64_t meta;              // see pack_meta
  unsigned char payload[kInlineBytes];
};
static_assert(sizeof(Line) == kLineBytes);

// The rest of a payload that rides in lines. Its place follows from the message's id. So the
// receiver's core may fetch it beside the line, and not only after the line, as it would if the
// line pointed to it.
struct alignas(kLineBytes) More {
  unsigned char payload[kMoreBytes];
  uint64_t sum;  // the checksum of the message's value, wherever that is, where messages have one
};

// Payloads of more than kInlineBytes and at most kMostInlineBytes, to and from such lines.
inline void spread(Line& line, More& more, const unsigned char* from, size_t nbytes) {
  std::memcpy(line.payload, from, kInlineBytes);
  std::memcpy(more.payload, from + kInlineBytes, nbytes - kInlineBytes);
}
inline void gather(unsigned char* to, const Line& line, const More& more, size_t nbytes) {
  std::memcpy(to, line.payload, kInlineBytes);
  std::memcpy(to + kInlineBytes, more.payload, nbytes - kInlineBytes);
}

// An arena is smaller by far: the length needs the bits, because it must tell all messages
// that fit into a lane apart.
constexpr int kSlotBits = 38;
constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;
constexpr uint64_t kInlineFlag = uint64_t{1} << kSlotBits;
// The payload is in the sender's own buffer in the symmetric heap: its Place rides in the line.
constexpr uint64_t kExposedFlag = uint64_t{2} << kSlotBits;
// The sender has written the payload to where the receiver wants it.
constexpr uint64_t kDeliveredFlag = uint64_t{4} << kSlotBits;
constexpr int kLengthShift = kSlotBits + 3;
constexpr uint64_t kLengthMask = (uint64_t{1} << 23) - 1;

// Offset into the arena, whether the payload is inline, and the low bits of its length: the
// receiver knows the length too, and a difference means that the ranks called with
// different arguments.
inline uint64_t pack_meta(uint64_t offset, uint64_t flag, size_t nbytes) {
  return offset | flag | ((nbytes & kLengthMask) << kLengthShift);
}
// Shows a line whose payload is written: in the line itself, or at `offset` of the arena.
// Release: the payload and the meta word are visible before the sequence word.
inline void publish(Line& line, uint64_t seq, uint64_t meta) {
  line.meta = meta;
  line.seq.store(seq, std::memory_order_release);
}
inline void publish(Line& line, uint64_t seq, bool is_inline, uint64_t offset, size_t nbytes) {
  publish(line, seq, pack_meta(offset, is_inline ? kInlineFlag : 0, nbytes));
}
inline bool meta_length_is(uint64_t meta, size_t nbytes) {
  return (meta >> kLengthShift) == (nbytes & kLengthMask);
}
// A payload of this length in a slot, to which the line points.
inline bool is_in_slot(uint64_t meta, size_t nbytes) {
  return meta_length_is(meta, nbytes) &&
         (meta & (kInlineFlag | kExposedFlag | kDeliveredFlag)) == 0;
}

// The number of messages of one sender that a receiver has consumed. It is on a line of its own
// because the sender reads it only when it has used up its lines.
struct alignas(kLineBytes) Ack {
  std::atomic<uint64_t> consumed;
};

// A buffer in the symmetric heap, as (number of the segment + 1) << 40 | offset into the part
// of its rank; 0: not in the heap.
using Place = uint64_t;
constexpr int kSegmentShift = 40;
constexpr uint64_t kOffsetMask = (uint64_t{1} << kSegmentShift) - 1;
inline Place place_of(size_t segment, uint64_t offset) {
  return (static_cast<uint64_t>(segment + 1) << kSegmentShift) | offset;
}
// Memory that all on-node ranks map: each has a part of it, in the order of the members.
struct Segment {
  unsigned char* base;
  size_t part_nbytes;
};

// Addresses at which this rank has a piece of its own part a second time.
struct Mirror {
  const unsigned char* start;
  size_t nbytes;
  Place place;
};

// The contents of the line of an exposed payload.
struct Shown {
  Place place;
  uint64_t raw;  // 1: the reader multiplies it by the plan's factor
};
inline size_t segment_of(Place place) { return static_cast<size_t>(place >> kSegmentShift) - 1; }
inline uint64_t offset_of(Place place) { return place & kOffsetMask; }

// The relation of a rank's send buffer to its receive buffer. The values are bits: a schedule
// keeps the set of cases in which it allows something.
enum class Sharing : uint8_t { Apart = 1, InPlace = 2, OwnBlock = 4 };

// The place where a rank wants an operation's result, so that peers can write it there. `seq` is
// written last.
struct alignas(kLineBytes) CallLine {
  std::atomic<uint64_t> seq;  // sequence number + the call's mark (call_mark.hpp)
  Place out;
  uint8_t sharing;
};

enum class Farewell : uint64_t { None = 0, Left = 1, Freed = 2 };

// The reason that a communicator has ended for; others raise another error for some of them.
enum class FailureCause : uint64_t { Other = 0, Damage = 1, Difference = 2, Revoked = 3 };

// What a rank waits for, on whichever communicator, while it waits for long (rank_states.hpp).
struct alignas(kLineBytes) Waits {
  std::atomic<uint64_t> looked_ns;  // CLOCK_MONOTONIC of its last look; 0: it does not wait
  std::atomic<uint64_t> since_ns;
  std::atomic<uint64_t> what;  // the operation's code, and the peer of a message
  std::atomic<uint64_t> seq;
  std::atomic<uint64_t> on[4];  // the communicator's name
};
static_assert(sizeof(Waits) == kLineBytes);

struct alignas(kLineBytes) RankHeader {
  std::atomic<uint64_t> started;  // collectives this rank has started on this communicator
  // The latest one: its mark (call_mark.hpp), and ticks() of its start. They are on the line of the
  // count, which each call writes anyway. The mark's lowest bit is 0 where nobody is to compare it.
  std::atomic<uint64_t> latest_mark, latest_ticks;
  // The first operation that failed here, as Failure writes it. It is on a line of its own,
  // because it is written once and peers look at it again and again.
  alignas(kLineBytes) std::atomic<uint64_t> failed;
  std::atomic<uint32_t> failed_by_death;  // 1 + the rank whose death is the reason; before it
  // The rank says here that it leaves, or that it has freed the communicator, once it has done its
  // part in all that it had started. Ranks wait for one that has freed it until its process ends.
  std::atomic<Farewell> farewell;
  std::atomic<FailureCause> cause;  // of its failure; before it
  std::atomic<bool> revoked;  // its program has ended the communicator; before its failure
  alignas(kLineBytes) std::atomic<uint64_t> num_refused;  // calls that this rank has refused
  // Refusals by ranks of other nodes, of operations that this rank was in.
  alignas(kLineBytes) std::atomic<uint64_t> num_heard_afar;
  // Both of all ranks of the node; in the first member's header only.
  alignas(kLineBytes) std::atomic<uint64_t> num_refused_here;
  // 1 + the member that has found first that the calls differ; the same place. 0: nobody has.
  std::atomic<uint64_t> first_to_differ;
  Waits waits;
};

// The words of a rank on itself for ranks of other nodes, which ask for them (relay.hpp).
struct ToldAfar {
  std::atomic<uint64_t> started{0}, latest_mark{0}, latest_ticks{0};
  Waits waits{};
};

// The last calls that a rank gave to a library (call_trail.hpp).
constexpr uint64_t kTrail = 256;
constexpr int kTrails = 2;  // of each rank
struct alignas(kLineBytes) Trail {
  struct alignas(32) Slot {
    std::atomic<uint64_t> seq, sum, mark, length;
  };
  // Of the calls until a comparison of that number. Lines that a rank writes in each call would cost
  // it and its readers more.
  static constexpr uint64_t kMarks = 16;
  struct alignas(16) Mark {
    std::atomic<uint64_t> number, hash;
  };
  // Calls in all. The next one's slot is written before it: whoever reads looks at it twice.
  alignas(kLineBytes) std::atomic<uint64_t> num;
  alignas(kLineBytes) Mark marks[kMarks];
  alignas(kLineBytes) Slot slots[kTrail];
};

// A call that a rank has refused (refusals.hpp).
struct alignas(kLineBytes) Refusal {
  static constexpr size_t kMostBytes = 4 * kLineBytes - 24;
  uint64_t seq;
  uint64_t nbytes;
  int64_t rank;  // who has refused it
  char reason[kMostBytes];
};

// A peer's answer to it: the ids of messages that the rank skips; or that its marks tell them,
// since the peer had done its part.
struct Answer {
  static constexpr uint64_t kByMarks = ~uint64_t{0};
  uint64_t begin, end;
};

// Where a context of fused() ended in the order of operations (context_ends.hpp). `word` is written last.
struct alignas(16) EndSlot {
  std::atomic<uint64_t> word, seq;
  static uint64_t word_of(uint64_t number, bool is_lost) { return 2 * number + 1 + (is_lost ? 0 : 1); }
};
struct alignas(kLineBytes) ContextSlots {
  // Where the rank is in a meeting: the number of the next operation, and how often ranks met before it.
  std::atomic<uint64_t> meeting;
  static constexpr int kMeetsBits = 16;
  EndSlot ends[kContextEnds];
};

// The first operation that failed on a rank, in one word that only gets smaller; 0: none. Peers
// whose ranks still compare what they have called (Op::agreement) do not need one that failed
// by what it had compared: that has been sent, and tells them more.
struct Failure {
  static uint64_t word(uint64_t seq, bool had_agreed) { return 2 * seq + (had_agreed ? 2 : 1); }
  static uint64_t seq_of(uint64_t word) { return (word - 1) / 2; }
  // True if a peer's operation `seq` waits in vain for the rank that wrote `word`.
  static bool ends(uint64_t word, uint64_t seq, bool still_agrees) {
    return word != 0 && word <= Failure::word(seq, !still_agrees);
  }
};

// Why a rank gave up, for the errors of others: a text, filled up with zeros.
constexpr size_t kWhyBytes = 768;

// The places of things in a region. Every member computes the same layout.
struct RegionLayout {
  int members = 0;
  size_t lane_nbytes = 0;
  size_t calls = 0, probes = 0, acks = 0, lines = 0, more = 0;
  size_t packet_acks = 0, packet_lines = 0, packets = 0, lanes = 0;
  size_t refusals = 0, heard_afar = 0, answers = 0, heard = 0, ends = 0, why = 0, trail = 0;
  size_t nbytes = 0;

  RegionLayout() = default;
  RegionLayout(int members_, size_t lane_nbytes_) : members(members_), lane_nbytes(lane_nbytes_) {
    const size_t g = static_cast<size_t>(members);
    size_t at = sizeof(RankHeader);
    auto take = [&at](size_t nbytes, size_t align) {
      at = (at + align - 1) / align * align;
      const size_t here = at;
      at += nbytes;
      return here;
    };
    calls = take(kCallLines * sizeof(CallLine), kLineBytes);
    refusals = take(kRefusals * sizeof(Refusal), kLineBytes);
    heard_afar = take(kRefusals * sizeof(Refusal), kLineBytes);
    answers = take(g * kRefusals * sizeof(Answer), kLineBytes);
    heard = take(g * sizeof(Ack), kLineBytes);
    ends = take(sizeof(ContextSlots), kLineBytes);
    why = take(kWhyBytes, kLineBytes);
    trail = take(kTrails * sizeof(Trail), kLineBytes);
    probes = take(g * sizeof(Ack), kLineBytes);
    acks = take(g * sizeof(Ack), kLineBytes);
    lines = take(g * kLines * sizeof(Line), kLineBytes);
    more = take(g * kLines * sizeof(More), kLineBytes);
    packet_acks = take(g * sizeof(Ack), kLineBytes);
    packet_lines = take(g * kPacketLines * sizeof(Line), kLineBytes);
    packets = take(g * kPacketLines * kPacketBytes, 4096);
    lanes = take(kLanes * lane_nbytes, 4096);
    nbytes = take(0, 4096);
  }
};

}  // namespace commrt
