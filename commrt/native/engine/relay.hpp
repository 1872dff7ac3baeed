// SPDX-License-Identifier: Apache-2.0
// The relay sends messages to other nodes where there is no MPI. Connections of its own carry them
// (tcp_links.hpp), or gloo (commrt/gloo/relay.py). It does what MPI would do: it matches messages by rank and tag, in
// order, and offers requests to poll. The engine calls it as it calls MPI, by a table of functions
// (relay_api), under its lock and without the GIL; so the relay never waits for Python.
//
// Between two ranks go frames, in order, and behind a frame at most one payload:
//
//   Message:  a message of at most kEagerNbytes, whole
//   Credit:   so many bytes of such messages have been received
//   Ask:      what does a rank of a communicator do?
//   Answer:   its state (rank_states.hpp); nothing where the communicator is not known there
//   Ready:    a longer one waits for its receive
//   Clear:    its receive is there, and so is that of its payload, whose number it says
//   Done:     the payload of this number has been sent, before this
//   Count:    so many operations of a communicator have been started here, and no more will be
//   Dump:     write the last operations into a file (flight_files.hpp)
//   Gone:     the process of this rank, of the sender's node, has ended
//   Bye:      the sender's last frame
//
// By connections of its own a payload follows its frame in a stream. There are two streams to each
// rank: long payloads have one of their own, so that what is short need not wait behind them. Any
// thread sends, and whoever waits receives.
// By gloo a payload comes before its frame. For each peer, one thread receives frames (arrived,
// landed). Any thread that has the GIL anyway sends frames: it calls, waits or receives
// (relay_carrier.hpp). A second thread for each peer sends what the progress thread leaves, and
// waits until gloo no longer needs the sent memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/layout.hpp"
#include "engine/liveness.hpp"
#include "engine/mpi_api.hpp"
#include "engine/rank_states.hpp"
#include "engine/told_afar.hpp"

namespace commrt {

class Relay : public std::enable_shared_from_this<Relay> {
 public:
  // Longer messages wait for their receives, and so do all while a peer has kWindowNbytes of
  // others that it has not received: memory for what comes unexpected ends.
  // Fragments of 256 KiB are rounded, and a packet has a header.
  static constexpr size_t kEagerNbytes = (256 << 10) + 4096;
  static constexpr uint64_t kWindowNbytes = 16 << 20;
  static constexpr int kTruncated = 1;  // the code of a message longer than its receive
  static constexpr size_t kHeaderNbytes = 32;
  static constexpr size_t kFrameNbytes = kHeaderNbytes + kEagerNbytes;

  // Belongs to the engine until a test says that it has ended.
  struct Request {
    std::atomic<bool> done{false};
    bool cancelled = false;  // a receive, before it had a message
    int code = 0;
    uint64_t nbytes = 0;  // of a receive: its room, then what came
    unsigned char* data = nullptr;
    Relay* owner = nullptr;
    int peer = 0, tag = 0;

    void end(int with = 0);
    static std::atomic<int> num_open;  // that have not ended
  };

  // The next work of the thread that sends to a peer.
  struct Todo {
    bool ends = false;         // nothing ever again
    uint64_t frame_nbytes = 0;
    const void* payload = nullptr;  // to be sent before the frame
    uint64_t payload_nbytes = 0;
    void* landing = nullptr;  // to be received into; begins before a later frame is sent
    uint64_t landing_nbytes = 0;
    uint64_t where = 0;  // number of the payload, or of the one to be received
  };
  // Tells the thread that receives from a peer what follows a frame. kNext: it takes the next
  // frame. kEnd: it takes none any more. Positive: it first waits for the payload of this number.
  using Then = int64_t;
  static constexpr Then kNext = 0, kEnd = -1;

  // The streams to a peer: that of payloads that both sides have agreed upon, and that of the rest.
  enum class Lane : size_t { Frames, Payloads };
  static constexpr size_t kLanes = 2;

  // Sends frames as soon as there are any. Called without the relay's lock.
  class Sender {
   public:
    virtual ~Sender() = default;
    virtual void send(int peer, Lane lane) = 0;
    // A peer is lost: it is told so, if it still is there.
    virtual void drop(int peer) = 0;
    // Nothing is sent or received after this.
    virtual void stop() = 0;
  };
  // The next frame for a stream, and what follows it there.
  struct Parts {
    unsigned char head[kHeaderNbytes];
    const void* body = nullptr;
    uint64_t nbytes = 0;         // of the body
    Request* request = nullptr;  // ends once its body is not needed any more
    bool is_payload = false;     // its end is told by `sent`
    bool ends = false;           // nothing ever again
    bool has_next = false;       // another frame follows at once
    std::shared_ptr<const RankState> state;  // keeps the body
  };
  // Memory for what follows a frame in a stream.
  struct Body {
    void* to = nullptr;
    uint64_t nbytes = 0;  // 0: nothing follows
    bool ends = false;    // nothing ever again
  };

  Relay(int rank, int size);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // -- for the threads that carry frames --
  // Waits for something to send and writes its frame; the peer's only sender calls it.
  Todo next(int peer, unsigned char* frame);
  // The oldest payload that has been taken has left.
  void sent(int peer);

  // -- for streams --
  // From now on, `sender` sends all frames.
  void be_sent_by(std::shared_ptr<Sender> sender);
  // Takes the next frame. `first`: false if nobody else sends, and then the caller does, until
  // there is none. Nobody does after that.
  bool take_parts(int peer, Lane lane, Parts& parts, bool first);
  // A frame has come. What follows it goes to the memory that this returns.
  Body head_arrived(int peer, Lane lane, const unsigned char* head);
  // All of that is there.
  void body_arrived(int peer, Lane lane);
  // True while something is to come from other nodes, or to leave.
  static bool is_awaited();

  // -- for gloo --
  // From now on, frames are taken by `take`. At most `most` of them may be on their way.
  void be_carried(int most);
  // True if this thread is to send to a peer: there are frames, there is room, and nobody else
  // sends. It goes on until `take` has nothing more.
  bool begin_to_take(int peer);
  // Writes a frame if there is one, and room for it. False: nothing is left to this thread.
  bool take(int peer, unsigned char* frame, Todo& todo);
  // Memory of the oldest frame on its way is free again.
  void frame_left(int peer);
  // Wakes the thread that attends to a peer, and what it waits in; false: nothing comes any more.
  void call(int peer);
  bool attend(int peer);
  // For threads without the GIL: lets the threads of the relay send what there is.
  static void order();
  // True if any relay of this process has frames that nobody sends.
  static bool is_due();
  // Changes by `more` the number of other calls that wait for the GIL (gloo_calls.hpp).
  static void add_due(int more);
  static bool has_calls();  // true if there are any of these
  Then arrived(int peer, const unsigned char* frame, uint64_t nbytes);
  // The payload of this number is there.
  void landed(int peer, uint64_t where);
  // Nothing comes from this peer any more, and nothing reaches it; `error` is the carrier's word.
  void lost(int peer, const std::string& why, const std::string& error = {});
  // From now on `liveness` is told who is lost and who leaves, and other nodes whose process has
  // ended here. Its members are the relay's ranks, of which those `away` are on other nodes.
  void watch(std::shared_ptr<Liveness> liveness, const std::vector<int>& away);
  // True if a peer that has left had started an operation, as far as it has said.
  bool did_its_part(int peer, int tag, uint64_t seq);
  // Says Bye to all peers, behind what has been sent so far.
  void leave();
  // Asks a peer, whose threads answer whatever its program does; the number of the question. It is
  // `about` the peer itself, or about another rank of its node: whether that one is stopped.
  uint64_t ask(int peer, int tag, int about);
  struct Answer {
    bool is_known = false;  // the communicator is there
    RankState state;
  };
  // Asks all peers to write their last operations.
  void ask_for_dumps();
  // Returns whether the answer is there, and puts it into `said`; then the question is forgotten.
  bool answer(uint64_t question, Answer& said);
  int size() const { return static_cast<int>(peers_.size()); }
  // Why a peer is lost; empty: it is not.
  std::string failure_of(int peer) const;
  // The text of an error code.
  static std::string text_of(int code);

  // -- for the engine, in MPI's words --
  // `leaves`: false for a message behind which the caller sends another one at once. It may wait
  // for that one, and leave with it.
  int isend(const void* data, int nbytes, int peer, int tag, Request** request,
            bool leaves = true);
  int irecv(void* data, int nbytes, int peer, int tag, Request** request);
  int iprobe(int peer, int tag, int* flag, int* count);
  void cancel(Request* request);
  // -- and beyond them: memory to memory, for a message that both sides have agreed upon --
  // `where` is for the peer, who may give it as soon as it knows; what tells it so is to be sent
  // after this.
  int expect(void* data, uint64_t nbytes, int peer, uint64_t* where, Request** request);
  int deliver(const void* data, uint64_t nbytes, int peer, uint64_t where, Request** request);
  // What ranks that ask are told of the communicator of this tag, to be kept there.
  std::shared_ptr<ToldAfar> told_of(int tag);
  // Waits until something has changed for the engine since `seen`, at most for a moment, and
  // brings `seen` up to date. It waits for all relays of this process. The moment is short if
  // ranks of this node could want a look.
  static void wait_for_change(uint64_t& seen);
  // Something has changed.
  static void tell();
  // A communicator has ranks of this node and of others: their messages tell nobody.
  static void expect_neighbors();
  static bool expects_neighbors();

 private:
  struct Incoming {  // a message that has no receive yet
    std::unique_ptr<unsigned char[]> bytes;  // null: it waits at its sender, or is `in_frame`
    const unsigned char* in_frame = nullptr;
    uint64_t nbytes = 0;
    uint64_t id = 0;  // the sender's
  };
  // Expect is no frame: it only begins to receive a payload.
  enum class FrameKind : uint32_t { Message, Credit, Ready, Clear, Done, Ask, Answer, Bye, Expect,
                                    Count, Gone, Dump };
  struct Frame {
    FrameKind kind = FrameKind::Bye;
    int32_t tag = 0;
    uint64_t nbytes = 0;  // of the message
    uint64_t id = 0;
    uint64_t where = 0;  // number of a payload
  };
  static_assert(sizeof(Frame) == kHeaderNbytes);
  struct Outgoing {
    Frame frame;
    const void* payload = nullptr;
    void* landing = nullptr;
    Request* request = nullptr;  // of a send: ends once this has left
    std::shared_ptr<const RankState> state;  // the payload of an answer
  };
  struct Landing {
    Request* request;
    std::unique_ptr<unsigned char[]> nowhere;  // what is too long for its receive comes here
  };
  struct Coming {  // what follows a frame in a stream
    Frame frame;
    Request* request = nullptr;
    std::unique_ptr<unsigned char[]> bytes;
  };
  // Sends to a peer, once the lock is free again: to be made before it is locked.
  class SendAtEnd {
   public:
    SendAtEnd(Relay& relay, int peer, bool sends = true)
        : relay_(relay), peer_(peer), sends_(sends) {}
    ~SendAtEnd() {
      if (sends_) relay_.send(peer_);
    }
    SendAtEnd(const SendAtEnd&) = delete;
    SendAtEnd& operator=(const SendAtEnd&) = delete;

   private:
    Relay& relay_;
    const int peer_;
    const bool sends_;
  };
  struct Peer {
    std::deque<Outgoing> queue;
    std::deque<Outgoing> payloads;  // of a stream of their own
    bool sends_payload = false;     // somebody does
    std::atomic<int> num_queued[kLanes] = {};
    Coming coming;
    uint64_t landing_now = 0;  // the payload that comes; of the thread that receives
    size_t num_ended = 0;      // streams from there; of that thread, too
    std::condition_variable changed;
    std::deque<Request*> leaving;  // of payloads, between next or take and sent
    int num_leaving = 0;           // frames, between take and frame_left
    bool is_taken = false;         // somebody sends
    bool is_due = false;           // nobody does, and there are frames and room
    bool is_called = false;
    bool is_attended = false;      // a thread waits until it is called
    std::unordered_map<uint64_t, std::pair<Request*, const void*>> waiting;  // by id: for Clear
    std::unordered_map<int, std::deque<Request*>> posted;                   // by tag
    std::unordered_map<int, std::deque<Incoming>> unexpected;               // by tag
    std::unordered_map<uint64_t, Landing> landing;  // by number
    std::atomic<int> num_unexpected{0};
    std::atomic<int> failure{0};  // a code, once it is lost
    uint64_t next_id = 1;
    uint64_t next_where = 0;
    uint64_t eager_out = 0;  // bytes that this peer has not said it has received
    uint64_t eager_in = 0;   // bytes received that it has not been told of
    bool said_bye = false;
    bool is_away = false;
    std::unordered_map<int, uint64_t> counts;  // by tag: what it had started when it left
  };

  Peer& peer_of(int peer) { return peers_[static_cast<size_t>(peer)]; }
  void push(Peer& peer, Outgoing&& what);
  void push_to_stream(Peer& peer, Outgoing&& what);
  void send(int peer);
  Todo write_frame(Peer& peer, unsigned char* frame);
  void look(Peer& peer);
  void match(Peer& peer, Request* request, Incoming&& message);
  void count_received(Peer& peer, uint64_t nbytes);
  void take_message(Peer& peer, int tag, Incoming&& message);
  void send_payload(Peer& peer, const Frame& clear);
  static uint64_t next_where(Peer& peer);
  static int code_of(const std::string& text);
  void end_receives(Peer& peer, int code);
  void see_leave(int number);
  void push_last();
  void answer_ask(Peer& peer, const Frame& ask);
  void hear_of_gone(int number, uint64_t rank);
  void tell_gone(int rank);
  void tell_others(const Frame& frame, int but);
  std::unique_ptr<Request> make_request(int peer, int tag, uint64_t nbytes);
  int why_no_send(const Peer& peer, int number) const;

  const int rank_;
  std::shared_ptr<Liveness> liveness_;
  mutable std::mutex mutex_;
  ToldByTag told_;
  std::unordered_map<uint64_t, Answer> answers_;  // by question
  uint64_t questions_ = 0;
  int most_leaving_ = 0;  // of frames; 0: a thread takes them by `next`
  std::shared_ptr<Sender> sender_;
  std::atomic<bool> has_sender_{false};
  std::vector<Peer> peers_;
};

// The table through which a communicator calls a relay; its handle is the relay's address.
const MpiApi& relay_api();

}  // namespace commrt
