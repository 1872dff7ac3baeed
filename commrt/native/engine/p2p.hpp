// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages with tags, over packets in shared memory or over MPI.
//
// A message of up to one packet travels with its header (EAGER). A longer one is announced
// (RTS); the receiver answers when a matching receive is posted (CTS), and the sender
// streams DATA packets addressed to that receive. Messages of one pair are announced in the
// order of their sends and matched in the order of arrival, so equal tags never overtake.
//
// A message that no receive has asked for waits at its receiver. So that memory has a bound,
// a sender counts what of its EAGER messages is not known to be received (CREDIT tells it),
// and announces even short messages where that is too much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"

namespace commrt {

// The most that a rank holds of one peer's short messages that it has not received, in bytes. Each
// message counts kEagerOverhead more, for its place in the list of such messages.
constexpr uint64_t kEagerBytes = 4 << 20;
constexpr uint64_t kEagerOverhead = 192;

// Gone answers a CTS for a message that its sender has given up meanwhile. Dropped answers an RTS
// whose receive was refused; the payload says why. Refused tells ranks of other nodes of a call that
// was refused. Heard answers that, Left says that a rank has left the call
// of others, and Ended says that the communicator ends by it. Called has an entry of its trail, in
// send_id, recv_id, offset and nbytes. Waits has the number and the mark of the call in which a rank
// waits, in send_id and recv_id. Part says what a rank has done with the library's collective of that
// number (stand_ins.hpp). ContextEnd asks or says where a context of fused() ended (context_ends.hpp):
// its number and that of the operation are in send_id and recv_id, and the tag is a Count. AskDevice and
// OnDevice are a question and an answer about a refused call (device_refusals.hpp): the tag is a Part.
enum class PacketKind : uint8_t {
  Eager, Rts, Cts, Data, Credit, Gone, Dropped, Refused, Heard, Left, Ended, Called, Waits, Part,
  ContextEnd, AskDevice, OnDevice
};

// The code of a message's element type, or kAnyType where nobody compares it.
using TypeCode = uint8_t;
constexpr TypeCode kAnyType = 255;
// The type of a message that its sender has refused: the payload says why.
constexpr TypeCode kRefusedType = 254;
inline bool types_meet(TypeCode sent, TypeCode received) {
  if (sent == kRefusedType) return false;
  return sent == received || sent == kAnyType || received == kAnyType;
}

struct PacketHeader {
  PacketKind kind;
  TypeCode type;  // of a message (Eager, Rts)
  int32_t tag;  // Called: which trail; Ended: a FailureCause; of a Difference the payload has the words
  uint64_t nbytes;   // of the whole message; of the payload for Data; received, for Credit
  // The sender's name for the message; the operation's number, for Refused, Heard and Left; that of
  // the first one that fails, for Ended, which has in recv_id 1 + the rank whose death is the reason.
  // Heard has what it tells (Afar::Told) in recv_id, offset and nbytes.
  uint64_t send_id;
  uint64_t recv_id;  // the receiver's name for it (Cts, Data)
  // Data: where the payload belongs; Cts: what a relay calls that, or 0. Eager and Rts: the checksum
  // of the whole message, where messages have one. Ended: 1 where a rank has revoked, whatever the cause.
  uint64_t offset;
};
constexpr uint64_t kDiscard = ~uint64_t{0};

// In an EAGER packet in shared memory, only the first members of the header count. A payload that
// fits behind them rides in the line, so that one cache line brings it all.
constexpr size_t kEagerHeaderBytes = offsetof(PacketHeader, send_id);
constexpr size_t kEagerInlineBytes = kInlineBytes - kEagerHeaderBytes;
inline bool rides_in_line(const PacketHeader& header) {
  return header.kind == PacketKind::Eager && header.nbytes <= kEagerInlineBytes;
}

enum class Stage : uint8_t {
  Queued,     // send: its peer has not been told of it
  Announced,  // send: it has
  Posted,     // receive: without a message
  Matched     // both sides know of each other
};

// The parts of a sendrecv (a receive and a send) or a multi_sendrecv.
struct Parts {
  std::vector<std::shared_ptr<Op>> ops;  // until all have ended
  size_t left = 0;                       // have not ended
  bool is_list = false;                  // a multi_sendrecv
  size_t num_sends = 0, num_recvs = 0;   // of a list, with those that were over at once
  size_t first_recv = 0;                 // of a list: these were, and have no part
  std::vector<uint64_t> received;        // of a list: bytes, for each receive
  int dest = -1, sendtag = 0;            // of a sendrecv, beside peer and tag of its receive
};

// A message that arrived and is not matched, or not yet taken by its receive.
struct Incoming {
  PacketHeader header;
  std::vector<unsigned char> payload;
};

struct P2PTask {
  bool is_send = false;
  Stage stage = Stage::Queued;
  int peer = 0;
  int tag = 0;
  TypeCode type = kAnyType;
  bool mistyped = false;    // receive: of a message of another type
  const unsigned char* send_buffer = nullptr;
  unsigned char* recv_buffer = nullptr;
  uint64_t nbytes = 0;      // to send, or room to receive
  uint64_t moved = 0;       // sent so far, or received so far
  uint32_t leaving = 0;     // send: packets of it that MPI has not sent yet
  uint64_t expected = 0;    // receive: length of the matched message
  uint64_t sum = 0;         // checksum of the whole message, as its sender says, if it has one
  bool has_sum = false;     // send: it is known already
  uint64_t id = 0;
  uint64_t peer_id = 0;
  int source = -1;          // receive: whose message it was
  std::unique_ptr<unsigned char[]> copy;  // send in place: what leaves, if it must wait
  Gate gate;  // before its memory is touched; its place among others it has from the start
  std::unique_ptr<Incoming> early;        // receive: what came before the gate was open
  std::unique_ptr<std::string> refusal;   // why it was refused; a receive drops its message
  std::shared_ptr<Op> whole;              // of a part: the operation that it belongs to
  std::unique_ptr<Parts> parts;           // of a whole
};

// A message to or from another rank; of a receive, `nbytes` is the room for it.
struct Message {
  void* data;
  uint64_t nbytes;
  int peer, tag;
  TypeCode type;
  bool replaced;  // a send: a receive of the same list goes to the same memory
};

struct MessageLists {
  std::vector<Message> sends, recvs;
  bool in_place = false;  // some are replaced
  uint64_t nbytes() const;
  // False: memory is written twice, or both sent and written; in place it may be, where a send
  // and a receive have the very same.
  bool settle_overlaps(bool may_replace);
};

// The progress of a multi_sendrecv that is not an operation yet: how many of its sends and
// receives are done.
struct Begun {
  static constexpr size_t kMost = 32;  // messages of each kind
  uint64_t seq = 0;
  size_t sent = 0, received = 0;
  uint64_t lengths[kMost];
};

// A message that no receive has asked for.
struct Waiting {
  int source = -1;
  uint64_t nbytes = 0;
  TypeCode type = kAnyType;
  std::optional<std::string> refusal;  // why its sender has refused it
};

class P2P {
 public:
  explicit P2P(Comm& comm);

  std::shared_ptr<Op> send(const Message& message);
  std::shared_ptr<Op> recv(const Message& message);
  // Starts both as one operation, which ends when both have. `sent`: the message is away already.
  std::shared_ptr<Op> sendrecv(const Message& leaving, const Message& coming, bool sent);
  // Starts any number of messages, in any order of the peers, as one operation that ends when all
  // have; without those that `begun` says are over.
  std::shared_ptr<Op> multi(const MessageLists& lists, const Begun& begun, const Gate& gate = {});
  // True if starting a message takes no longer than one packet does.
  bool calm(const Message& message) const;
  // A message that is away at once, without an operation. False: nothing has happened; send().
  bool send_now(const Message& message);
  // A message that is here, or comes within `spins` looks. False: recv() as if nothing had been.
  bool recv_now(const Message& message, int spins);
  enum class Now { Nothing, Sent, Both };
  Now sendrecv_now(const Message& leaving, const Message& coming, int spins);
  // True: all is over. Else `begun` says what is; spins for messages at most `spins` times.
  bool multi_now(const MessageLists& lists, int spins, Begun& begun);
  bool calm(const MessageLists& lists) const;
  // A message of this tag that is here, or announced, and asked for by no receive. `num` ranks are
  // looked at, from `first` on; source -1: there is none. One that its sender has refused is taken
  // where `takes_refused` says so.
  Waiting waiting(int tag, int first, int num, bool takes_refused = false);
  // One pass over all peers, with a bounded number of packets each.
  bool progress();
  // Ends what an on-node peer that has given up will never answer; true if `op` has ended.
  bool fail_after_peer(const std::shared_ptr<Op>& op);
  // Take the place of a message that was refused here. The receive of a refused send fails. The
  // message of a refused receive is dropped, and its send fails if it has not ended by then.
  void refuse_send(int peer, int tag, const std::string& reason);
  void refuse_recv(int peer, int tag, const std::string& reason);
  // Tells the ranks of other nodes that this rank's operation `seq` was refused.
  void tell_refused(uint64_t seq, const std::string& reason);
  // Tells such a rank that this one knows of it.
  void tell_heard(int rank, uint64_t seq, const Afar::Told& told);
  // Tells such a rank that this one has left operation `seq`, which another rank has refused.
  void tell_left(int rank, uint64_t seq);
  // Sends a rank of another node an entry of one of this rank's trails.
  void tell_called(int rank, int trail, const CallTrail::Entry& entry);
  // Tells a rank what this one has done with operation `seq`: a record, and what follows it.
  void tell_part(int rank, uint64_t seq, const void* head, size_t nbytes, const std::string& rest);
  // Asks a rank what it has made of operation `seq`, which this one refuses; or tells it that.
  void ask_of_device(int rank, uint64_t seq, const std::string& reason);
  void tell_of_device(int rank, uint64_t seq, DeviceRefusals::Part part, const std::string& words);
  // Tells such a rank in which call this one waits.
  void tell_waits(int rank, uint64_t seq, uint64_t mark);
  // Asks such a rank where a context of fused() ended, by a Count that is unknown; or tells it that.
  void tell_context_end(int rank, uint64_t number, ContextEnds::End end);
  // True if such an answer has not gone. Its caller may make no call for long, so it goes at once.
  bool is_urgent() const { return urgent_; }
  // Tells such a rank that the communicator has ended, from operation `seq` on.
  void tell_ended(int rank, uint64_t seq, uint64_t dead = 0);
  // The same for all of them that live, where it ends since a rank has died.
  void tell_death(uint64_t seq);
  // Takes all that ranks of other nodes have sent that are gone. True if the operation has ended: one
  // of them has said why it ended the communicator.
  bool fail_after_last_words(Op& op);
  // Ends a message that is not matched, on this rank alone: it waits for its peer no more.
  void take_back(const std::shared_ptr<Op>& op, const std::string& why);
  // The same for all messages of this rank: the communicator has ended.
  void take_all_back(const std::string& why);
  // "from rank 3, tag 7", and what an operation waits for.
  static std::string whom(const Op& op);
  std::string waits_for(const Op& op) const;
  uint64_t next_seq() const { return next_id_ - 1; }
  // True if nothing is in flight, packets of sends that are over included.
  bool idle() const;
  // The next pass looks at what peers have sent, even if nothing is in flight here.
  void look_closely() { idle_passes_ = kLookEvery - 1; }

 private:
  static constexpr unsigned kLookEvery = 64;  // passes

  // By source and tag, in order of arrival; a queue that is empty is not kept.
  template <class T>
  using Queues = std::unordered_map<uint64_t, std::list<T>>;
  static uint64_t key(int source, int tag) {
    return static_cast<uint64_t>(source) << 32 | static_cast<uint32_t>(tag);
  }
  struct MpiPacket {
    MpiRequest request;
    size_t nbytes = 0;
    std::unique_ptr<unsigned char[]> bytes;
    std::shared_ptr<Op> op;  // the send that it is a part of; null: of none that waits for it
  };
  // A long message that a relay carries from memory to memory.
  struct Direct {
    MpiRequest request;
    std::shared_ptr<Op> op;
  };
  using Tasks = std::unordered_map<uint64_t, std::shared_ptr<Op>>;  // by the task's id
  struct Channel {
    uint64_t out = 0, acked_seen = 0, in = 0;
    Line* out_lines = nullptr;
    const Line* in_lines = nullptr;
    unsigned char* out_packets = nullptr;
    const unsigned char* in_packets = nullptr;
    const Ack* acked = nullptr;
    Ack* ack = nullptr;
    uint64_t eager_out = 0;  // of what was sent there, not known to be received
    uint64_t eager_in = 0;   // received from there, not yet told
    std::string failure;     // why MPI reaches this peer no more
    std::deque<PacketHeader> control;             // answers that wait for room
    std::deque<std::pair<PacketHeader, std::string>> notices;  // of what was refused, and why
    std::deque<std::shared_ptr<Op>> unannounced;  // sends, in order
    std::deque<std::shared_ptr<Op>> streaming;
    std::list<MpiPacket> mpi_sending;
    std::list<MpiPacket> mpi_arriving;  // in the order of their headers
    std::list<Direct> direct;           // from and to memory of the program

    const Line& in_line(uint64_t i) const { return in_lines[i % kPacketLines]; }
    // True if the peer has put at least so many packets here that this rank has not taken.
    bool waiting(uint64_t packets) const {
      const uint64_t last = in + packets - 1;
      return in_line(last).seq.load(std::memory_order_acquire) == last + 1;
    }
    void took_packet() { ack->consumed.store(++in, std::memory_order_release); }

    bool has_answers() const { return !control.empty() || !notices.empty(); }

    bool on_the_way() const {
      const bool any = has_answers() || !mpi_sending.empty() || !mpi_arriving.empty();
      return any && failure.empty();  // else nothing leaves any more
    }
  };

  void attach();
  Record& note(bool is_send, int peer, int tag, uint64_t nbytes);
  void close(Record& record);
  bool push_now(const Message& message);
  Record* take_now(const Message& message, int& spins);
  bool take_arrived(const Message& message, uint64_t which);
  std::shared_ptr<Op> make(bool is_send, const Message& message);
  std::shared_ptr<Op> begin(bool is_send, const Message& message);
  void number(Op& op);
  void launch(const std::shared_ptr<Op>& op);  // a send, which its peer is then told of
  void post(const std::shared_ptr<Op>& op);    // a receive; then what its peer says is read
  void queue_send(const std::shared_ptr<Op>& op);
  void queue(const std::shared_ptr<Op>& op);     // a send, as it is
  bool strike(const std::shared_ptr<Op>& op);    // by a fault that is injected (chaos.cpp)
  void queue_recv(const std::shared_ptr<Op>& op);
  void meet(const std::shared_ptr<Op>& op);      // a receive, and its message if that is here
  void drop(const P2PTask& task, int source, const PacketHeader& header);
  void hear_of_drop(int source, const PacketHeader& header, const unsigned char* payload);
  void fail_refused(const std::shared_ptr<Op>& op, int rank, const char* call, const void* reason,
                    size_t nbytes);
  bool serve(int peer);
  bool drain(int peer);
  bool push(int peer, const PacketHeader& header, const unsigned char* payload, size_t nbytes);
  bool pull(int peer);
  bool pull_mpi(int peer);
  bool on_the_way() const;
  bool flush(int peer);
  bool flush_self();
  bool deliver_early();
  bool reap(int peer);
  uint64_t expect_direct(const std::shared_ptr<Op>& op, int source, uint64_t nbytes);
  bool send_direct(const std::shared_ptr<Op>& op, uint64_t where);
  bool settle_direct(int peer);
  bool lose(int peer, const char* function, int code);
  void hear_of_end(int source, const PacketHeader& header, const unsigned char* words);
  void hear_of_context_end(int source, const PacketHeader& header);
  void hear_of_device(int source, const PacketHeader& header, const unsigned char* payload);
  // The next packet of an on-node peer, if there is one.
  const unsigned char* read(const Channel& c, PacketHeader& header) const;
  // True if the payload is in the line. A checksum takes its place there.
  bool is_in_line(const PacketHeader& header) const {
    return rides_in_line(header) && !comm_.checksums;
  }
  PacketHeader announcement(PacketKind kind, const P2PTask& task) const;
  void complete_received(const std::shared_ptr<Op>& op);
  void answer(int peer, const PacketHeader& header);
  void count_received(int source, uint64_t nbytes);
  void arrived(int source, const PacketHeader& header, const unsigned char* payload);
  void deliver(const std::shared_ptr<Op>& op, int source, const PacketHeader& header,
               const unsigned char* payload);
  bool refused(const std::shared_ptr<Op>& op, int peer);  // because MPI reaches the peer no more
  void complete(const std::shared_ptr<Op>& op, std::string error = {});
  void end(const std::shared_ptr<Op>& op, std::string error);
  void part_ended(const std::shared_ptr<Op>& whole);
  void forget(const std::shared_ptr<Op>& op);
  bool fail_one(const std::shared_ptr<Op>& op);
  void give_up(const std::shared_ptr<Op>& op, const std::string& why, bool by_death = false);
  bool fail_after_death(const std::shared_ptr<Op>& op);
  bool fail_after_revoke(const std::shared_ptr<Op>& op);
  void forget_matched(const std::shared_ptr<Op>& op);
  std::string others_waiting(const P2PTask& task) const;

  Comm& comm_;
  bool attached_ = false;
  std::vector<Channel> channels_;
  Queues<std::shared_ptr<Op>> posted_;        // receives without a message
  Tasks receiving_;                           // receives with one
  Tasks announced_;                           // sends that wait for their CTS
  Queues<Incoming> unexpected_;
  std::list<std::shared_ptr<Op>> early_;      // receives whose message came before their gate
  uint64_t next_id_ = 1;
  bool urgent_ = false;
  bool lingering_ = false;  // packets were on their way after the last pass
  int ended_by_ = -1;       // the rank of another node whose word has ended the communicator; -1: none
  unsigned idle_passes_ = 0;
  uint64_t took_ = 0;  // bytes of the last message that take_now() took
};

}  // namespace commrt
