// SPDX-License-Identifier: Apache-2.0
// A communicator inside the engine: links to its peers, operations in flight, records.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/bell.hpp"
#include "engine/call_mark.hpp"
#include "engine/call_trail.hpp"
#include "engine/far_waits.hpp"
#include "engine/flight_files.hpp"
#include "engine/gate.hpp"
#include "engine/layout.hpp"
#include "engine/liveness.hpp"
#include "engine/mpi_api.hpp"
#include "engine/mpi_messages.hpp"
#include "engine/parts.hpp"
#include "engine/plan.hpp"
#include "engine/record.hpp"
#include "engine/refusals.hpp"
#include "engine/starvation.hpp"

namespace commrt {

class Chaos;
class Comm;
class Engine;
class InFlight;
class Relay;
struct Fault;
struct GlooCall;
struct Kin;
struct RankState;
struct ToldWait;

enum class LinkKind : uint8_t { Self, Shared, Mpi };

// The state of message passing with one peer. Ids count messages since the communicator
// was made, in each direction on its own.
struct Link {
  LinkKind kind = LinkKind::Self;
  Line* out_lines = nullptr;             // in this rank's region
  const Line* in_lines = nullptr;        // in the peer's region
  More* out_more = nullptr;              // beside out_lines
  const More* in_more = nullptr;         // beside in_lines
  const Ack* acked = nullptr;            // written by the peer
  Ack* ack = nullptr;                    // written by this rank
  uint64_t next_out = 0, next_in = 0;    // ids for the next operation to start
  uint64_t acked_seen = 0;               // last value read from acked
  uint64_t consumed = 0;                 // every message below is consumed
  uint64_t consumed_bits = 0;            // bit i: message consumed + i is consumed
  uint64_t mpi_out = 0, mpi_in = 0;      // ids that may be posted next (MPI keeps order)
  int mpi_rank = -1;

  bool is_acked(uint64_t id) {
    if (id < acked_seen) return true;
    acked_seen = acked->consumed.load(std::memory_order_acquire);
    return id < acked_seen;
  }
  bool line_free(uint64_t id) { return id < kLines || is_acked(id - kLines); }

  void consume(uint64_t id) {
    if (id == consumed && consumed_bits == 0) {
      ++consumed;
    } else {
      consumed_bits |= uint64_t{1} << (id - consumed);
      const int run = consumed_bits == ~uint64_t{0} ? 64 : __builtin_ctzll(~consumed_bits);
      if (run == 0) return;
      consumed += static_cast<uint64_t>(run);
      consumed_bits = run == 64 ? 0 : consumed_bits >> run;
    }
    // Release: the payload has been read before its slot and line may be reused.
    ack->consumed.store(consumed, std::memory_order_release);
  }
};

// The most that one pass does for one operation, in bytes of values. No instruction is cut. A
// waiting thread has no limit, as it has nothing better to do.
constexpr uint64_t kSliceBytes = 128 * 1024;
constexpr uint64_t kNoLimit = ~uint64_t{0};

constexpr int kSpinsWithGil = 40;  // about 2 us

enum class OpState : int { Running = 0, Done = 1, Failed = 2 };

// Point-to-point messages have peers and tags instead of a plan.
struct P2PTask;

// One operation in flight. Owned by shared_ptr: the communicator's list and the request.
class Op {
 public:
  std::shared_ptr<const Plan> plan;
  Comm* comm = nullptr;
  uint64_t seq = 0;
  uint64_t stream = 0;  // the caller's, for buffers on a device
  Store store = Store::Plain;
  uint64_t timed_from = 0;  // ticks at the start of a run that is timed, else 0
  double moved_s = 0;       // when a wait has last seen it come further; 0: never
  Starvation starved;       // of its last wait that ran out of time
  const unsigned char* in = nullptr;
  unsigned char* out = nullptr;
  unsigned char* tmp = nullptr;
  std::unique_ptr<unsigned char[]> tmp_storage;
  std::atomic<int> state{static_cast<int>(OpState::Running)};
  std::string error;
  bool given_up = false;  // failed because a peer did, or this rank earlier
  bool by_death = false;  // failed because a peer's process has ended
  bool by_mpi = false;    // failed because the MPI library did
  bool by_user = false;   // failed because the user's reduction did
  bool by_damage = false;  // failed because a message did not fit its checksum
  bool by_calls = false;   // failed because ranks made different calls, in the words of all
  // Another rank's call was refused. It has failed, or fails once nothing touches its arrays.
  bool was_refused = false;
  bool has_told = false;  // peers of other nodes know that it has left (afar.hpp)
  std::unique_ptr<UserValue> user_value;  // what is on its way through Python, or null
  bool held = false;      // failed, and MPI may still use the buffers: they are kept for ever
  // Before a collective of gloo's: the ranks compare what they have called. It has the same number,
  // and no record.
  std::shared_ptr<Op> agreement;
  bool is_agreement = false;
  int64_t compared[2] = {0, 0};  // its buffer: the largest digest, and the least, negated
  std::unique_ptr<P2PTask> p2p;
  std::unique_ptr<BucketParts> parts;  // of a bucket: its arrays, instead of `in` and `out`
  uint16_t bucket_facts = 0;           // and a digest of the calls in it and before it
  bool in_heap = false;  // may meet buffers in the symmetric heap (symmetric.cpp)
  void* keep[2] = {nullptr, nullptr};  // PyObject*: buffers, until the end
  Gate gate;  // before its first instruction; its place among others it has from the start
  std::shared_ptr<GlooCall> gloo;  // once gloo has been asked for it
  std::shared_ptr<InFlight> in_flight;  // of a nonblocking call in check mode, or null
  bool was_changed = false;             // the program wrote to its array meanwhile
  std::shared_ptr<Fault> fault;  // that is injected into what it sends (chaos.hpp), or null

  // How far it has come, in steps; of a library's collective always 0 of 0.
  uint64_t steps_done() const { return head_; }
  uint64_t steps_in_all() const { return total_; }
  bool uses_heap() const { return in_place_ != 0 || out_place_ != 0; }
  bool has_keep() const { return keep[0] != nullptr || keep[1] != nullptr; }
  // The word of a failed one for Python (commrt/group/group.py).
  const char* failure_kind() const;
  bool finished() const { return state.load(std::memory_order_acquire) != 0; }
  // True if nothing of it is to be done any more.
  bool is_over() const { return was_refused || finished(); }
  bool has_failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(OpState::Failed);
  }
  bool still_agrees() const { return is_agreement || (agreement != nullptr && gloo == nullptr); }
  // False for an operation that failed by what it compared, and for gloo's: gloo is asked only
  // once all have said the same, so peers lose nothing.
  bool had_agreed() const {
    return gloo == nullptr && agreement != nullptr && agreement->finished() &&
           !agreement->has_failed();
  }

  void bind(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_);
  // The same for an operation whose first `done` instructions are done already.
  void resume(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_,
              size_t done, int lane);
  // Runs what can run now, and stops after `limit` bytes of it; true if anything did.
  bool advance(uint64_t limit);
  void fail_by_user(const std::string& why);
  // Fails because another rank's call was refused: the communicator goes on. It may have to wait
  // for those who still read or write its arrays.
  void refuse(const std::string& why);
  // True unless the library still uses its arrays (stand_ins.hpp).
  bool has_been_let_go();

 private:
  friend class Comm;
  friend class Refusals;
  friend class Afar;
  friend class StandIns;
  uint64_t head_ = 0, total_ = 0;  // position = fragment * instructions + instruction
  uint64_t head_fragment_ = 0;
  uint64_t worked_ = 0;   // bytes in this call of advance()
  size_t completed_ = 0;  // elements of the result that nothing is left to do with
  std::vector<uint64_t> done_bits_;
  uint64_t done_mask_ = 0;  // window size - 1
  std::vector<uint64_t> out_base_, in_base_;  // first id of this operation, per plan peer
  int lane_ = -1;
  MpiRequest native_request_;
  bool native_started_ = false;
  bool left_trail_ = false;  // the call is in the trail
  size_t copied_ = 0;     // bytes of what a vendor collective wants copied
  std::unordered_map<uint64_t, MpiStep> mpi_steps_;
  std::list<MpiSend> mpi_sends_;  // in the order of their posts

  // Buffers in the symmetric heap.
  struct Result {  // of a peer
    bool known = false;
    uint8_t sharing = 0;
    unsigned char* at = nullptr;  // null: not in the heap
  };
  struct Route {  // of a message to a peer that shares memory
    enum class By : uint8_t { Slot, Exposed, Delivered } by;
    unsigned char* to;  // Delivered: the first fragment's place
  };
  struct Source {  // of what an instruction sends
    Place place = 0;
    bool constant = false;  // until the operation ends
    bool raw = false;       // to be multiplied by the plan's factor yet
  };
  Place in_place_ = 0, out_place_ = 0;
  uint8_t sharing_ = 0;
  bool shown_ = false;             // peers know where the result is wanted
  std::vector<Result> results_;    // per plan peer
  std::vector<uint64_t> exposed_;  // per plan peer: one past the last message read from here
  std::vector<Route> routes_;      // of the instruction that is about to run
  Source source_;                  // of the same

  // What the words of this call's messages have beside the messages' ids.
  uint64_t mark() const {
    return call_mark(plan->mark, seq) ^ static_cast<uint64_t>(bucket_facts) << kMarkRootShift;
  }
  bool is_done(uint64_t pos) const {
    const uint64_t i = pos & done_mask_;
    return (done_bits_[i >> 6] >> (i & 63)) & 1;
  }
  void set_done(uint64_t pos) {
    const uint64_t i = pos & done_mask_;
    done_bits_[i >> 6] |= uint64_t{1} << (i & 63);
  }
  void clear_done(uint64_t pos) {
    const uint64_t i = pos & done_mask_;
    done_bits_[i >> 6] &= ~(uint64_t{1} << (i & 63));
  }
  void adopt(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_);
  void find_in_heap();
  bool show_result();
  void mark_shown();
  void stop_showing();
  const Result& result_of(int peer);
  bool choose_routes(const Instr& ins);
  Source source_in_heap(const Instr& ins) const;
  void expose(const Instr& ins, int64_t fragment, size_t nbytes);
  bool all_taken();
  bool deps_done(const Instr& ins, uint64_t first) const;
  bool run(int64_t fragment, int index);
  bool run_mpi(int64_t fragment, int index);
  MpiStep prepare_mpi(const Instr& ins, int64_t fragment, size_t nbytes, bool one_piece);
  bool all_posted(MpiStep& step, const Instr& ins, int64_t fragment, size_t nbytes);
  bool all_arrived(MpiStep& step, const Instr& ins, int64_t fragment, size_t nbytes);
  size_t nbytes_of(const Instr& ins, int64_t fragment) const;
  bool is_empty_message(const MpiEnd& end, const void* at, uint64_t id) const;
  bool is_stamped_so(const Stamp& stamp, const Ref& ref, int64_t fragment, size_t nbytes);
  bool post_send(const Ref& ref, int64_t fragment, const unsigned char* value, size_t nbytes,
                 std::unique_ptr<unsigned char[]> staging, bool has_next = false);
  bool all_sent();
  void abandon_mpi();
  void hold(MpiInput& one);
  void fail_mpi(const char* function, int code, const std::string& what, int peer = -1);
  bool over_mpi(const Ref& ref) const;
  int rank_of(const Ref& ref) const { return plan->peers[ref.peer].rank; }
  // The address where a fragment of a local slice begins. The slice is one block, or uncut.
  unsigned char* start_of(const Instr& ins, const Ref& ref, int64_t fragment) const;
  // The call may fail the operation.
  bool inputs_arrived(const Instr& ins, int64_t fragment);
  bool outputs_free(const Instr& ins, int64_t fragment);
  bool value_ready(const Instr& ins, int64_t fragment, int index,
                   const unsigned char* const* arrived);
  void compute_and_send(const Instr& ins, int64_t fragment,
                        const unsigned char* const* arrived);
  void compute_from_own_part(const Instr& ins, unsigned char* first, unsigned char* second,
                             std::vector<const void*>& inputs, size_t elems,
                             uint64_t raw) const;
  void pack(const Instr& ins, int64_t fragment, unsigned char* to);
  unsigned char* array_of(const Box& box) const {
    return reinterpret_cast<unsigned char* const*>(in)[box.array];
  }
  void move_boxes(const Instr& ins, const unsigned char* const* messages, unsigned char* slot);
  void pack_boxes(const Instr& ins, unsigned char* to, bool streaming) const;
  void unpack_boxes(const Box* boxes, int count, const unsigned char* message, bool combines) const;
  void copy_boxes(const Box* boxes, int count, const Box* from, bool combines) const;
  bool in_parts() const { return parts != nullptr && !parts->is_packed(); }
  void compute_in_parts(const Instr& ins, int64_t fragment, const unsigned char* const* messages,
                        unsigned char* slot);
  void take_inputs(const Instr& ins, int64_t fragment);
  bool complete(uint64_t limit);
  const void* copied_where_in_place(uint64_t limit);
  bool copy_slice(void* to, const void* from, int64_t elems, uint64_t limit);
  bool advance_native(uint64_t limit);
  bool left_trail();
  bool has_agreed();
  bool contribute_slice(unsigned char* to, const unsigned char* from, int64_t elems, uint64_t limit);
  bool prepare_for_gloo(uint64_t limit, const void*& from, void*& into);
  bool advance_gloo(uint64_t limit);
  void fail(std::string message);
  void take_over(const GaveUp& found);
  bool finds_difference() const;
  void tell_difference(bool is_own);
  void end_record(OpState how);
  void fail_by_length(int peer, size_t expected);
  bool fits(const unsigned char* value, size_t nbytes, uint64_t sum, int peer);
  size_t tail_nbytes(size_t nbytes) const;  // behind the value of a message to another node
  void damage(unsigned char* value, size_t nbytes);
  void damage_input();
  void repeat_message(int peer, uint64_t id);
  void finish();
  uint64_t in_id(const Ref& ref, int64_t fragment) const {
    return in_base_[ref.peer] +
           static_cast<uint64_t>(fragment) * plan->peers[ref.peer].recvs_per_fragment + ref.k;
  }
  uint64_t out_id(const Ref& ref, int64_t fragment) const {
    return out_base_[ref.peer] +
           static_cast<uint64_t>(fragment) * plan->peers[ref.peer].sends_per_fragment + ref.k;
  }
  const unsigned char* base(int space) const;
};

// The time for a line of a payload, in ns: its writing plus its reading by a peer.
struct SlotTimes {
  double same_ns;    // in the slot that held the payload before
  double moving_ns;  // in the next one of a window that exceeds a core's own cache
};

struct Lane {
  bool busy = false;
  size_t at = 0;    // where the slots of the operation that has it begin
  size_t next = 0;  // and those of the next one
  std::vector<uint64_t> last;  // per rank: one past the last message published from here
};

class Comm {
 public:
  Comm(Engine& engine, int rank, int size, std::string name);
  ~Comm();

  // On-node peers: members[i] is the rank whose region is the i-th of the arena.
  void attach_arena(void* base, size_t region_nbytes, size_t lane_nbytes,
                    const std::vector<int>& members);
  // Adds a segment to the symmetric heap; collective over the on-node ranks.
  void attach_segment(void* base, size_t part_nbytes) {
    heap_.push_back({static_cast<unsigned char*>(base), part_nbytes});
  }
  bool has_heap() const { return !heap_.empty(); }
  // The pages at `original`, in this rank's part of a segment, are mapped at `start`, too: buffers
  // there count as lying in the heap. False if `original` does not lie there. Local.
  bool add_mirror(const void* start, size_t nbytes, const void* original);
  void remove_mirror(const void* start);
  // Forgets arena and heap, which are about to be unmapped. Nothing may be in flight.
  void detach();
  // Peers on this node can be woken: `members[r]` is the member of `bells` that rank r is, or -1.
  void attach_bells(std::shared_ptr<Bells> bells, std::vector<int> members);
  // Wakes a peer of this node that sleeps: something was written for it.
  void ring(int peer) {
    if (any_asleep()) wake_peer(peer);
  }
  // The same for all ranks of this node with which a plan exchanges messages.
  void ring(const Plan& plan) {
    if (any_asleep()) wake_peers(plan);
  }
  // What becomes of peers is known: `members[r]` is the member of `liveness` that rank r is, or -1.
  void attach_liveness(std::shared_ptr<Liveness> liveness, std::vector<int> members);
  // True if something in flight ends without anybody ringing: it has to be asked for.
  bool tells_nobody() const;
  // The next pass takes in what peers send unasked.
  void look_closely();
  // Off-node peers, reached over MPI: ranks in `mpi_comm`, all messages under `tag`.
  void attach_mpi(Handle mpi_comm, int tag, const std::vector<int>& mpi_ranks);
  // The same, where a relay stands in for MPI.
  void attach_relay(std::shared_ptr<Relay> relay, int tag, const std::vector<int>& ranks);
  // From now on the communicator's state is told there, for ranks of other nodes that ask.
  void tell_afar(std::shared_ptr<ToldAfar> told) { told_ = std::move(told); }

  // `keep` are the owners of the buffers of a nonblocking call (references handed over to
  // the operation), or null. Does at most `limit` bytes of the work at once.
  std::shared_ptr<Op> start(const std::shared_ptr<const Plan>& plan, const void* in, void* out,
                            void* const* keep, bool timed = false, uint64_t limit = kNoLimit);
  // The same for one that begins once its gate is open: until then its buffers are not touched.
  std::shared_ptr<Op> start_gated(const std::shared_ptr<const Plan>& plan, const void* in,
                                  void* out, const Gate& gate, uint64_t stream);
  // The same for the arrays of a bucket, one after the other.
  std::shared_ptr<Op> start_bucket(const std::shared_ptr<const Plan>& plan,
                                   std::unique_ptr<BucketParts> parts, void* keep, uint64_t limit, uint16_t facts);
  // Keeps the books of an operation that runs elsewhere, by a library of its own.
  uint64_t count_elsewhere(const Record& what);
  // Names a rank of this node that gave up operation `seq` or an earlier one, or a rank that is gone
  // without its part in it. While the ranks still agree on the operation, a rank that gave it up
  // later does not count. One that has left by itself is gone, if such are heeded.
  GaveUp who_gave_up(uint64_t seq, bool still_agrees = false, bool heeds_leavers = true) const;
  std::string told_difference(uint64_t seq) const;
  // Names a rank that has died, or `peer` if that has left. Asks the kernel, `anew` in any case.
  std::string who_died(int peer = -1, bool anew = false) const;
  // The same, where rank `by` of another node has just said that a rank has died.
  std::string who_died_as_told(int rank, int by) const;
  // 1 + a rank that has died, as this rank or others know; 0: there is none.
  uint32_t who_is_dead() const;
  bool is_gone(int peer) const;  // takes part in nothing any more, as far as is known
  // This rank takes no part in later operations, and has done its part in earlier ones.
  void leave(Farewell how);
  // A short plan with nothing else in flight: null when complete, else the Op it became.
  // Spins at most `spins` times for a message.
  std::shared_ptr<Op> run_short(const std::shared_ptr<const Plan>& plan, const void* in,
                                void* out, int spins);
  // The store kind of a run. Timed runs of a plan that learns are reported at their end.
  // `in_heap`: the buffers lie in the symmetric heap, where another kind may be best.
  Store store_for_run(const Plan& plan, bool timed, bool in_heap = false);
  void report_run(const Plan& plan, uint64_t took_ticks, bool in_heap = false);
  bool quiet() const {
    return active_.empty() && messages_in_flight == 0 && !refusals.disturb() && !is_watched;
  }
  void recycle(std::shared_ptr<Op> op);  // a finished operation nobody refers to
  // One pass, with at most `limit` bytes of every operation.
  bool progress(uint64_t limit);
  bool idle() const;
  // Names the ranks on other nodes that a relay has lost, and says why; empty: there are none.
  std::string who_is_lost() const;
  // True if nothing is in flight but collectives that gloo has been given.
  bool only_gloo() const;
  Link& link(int rank) { return links_[rank]; }
  int member_of(int rank) const { return member_index_[rank]; }

  // Ends an operation behind one that failed on this rank; true if there is one.
  bool fail_after_own(Op& op);
  // Ends an operation, and with it the communicator's use.
  void fail_op(Op& op, const std::string& why);
  // Ends an operation that an on-node peer has given up; true if it has ended.
  bool fail_after_peer(const std::shared_ptr<Op>& op);
  // Lets the ranks of this node know that they wait in vain from operation `seq` on; or, where
  // this rank had agreed on it, from the end of their own agreement on.
  void tell_failure(uint64_t seq, bool had_agreed = false);
  // The same for ranks of other nodes, too. This rank's operations from `seq` on fail.
  void end_everywhere(uint64_t seq, const std::string& why);
  // Ends all operations in flight, and all that would follow, on all ranks.
  void revoke(const std::string& why);
  int who_revoked() const;  // a rank of this node that did; -1: none
  void end_with(Comm& origin);  // from which this was made
  bool ends_with_origin();  // true if it has ended now, as a rank has revoked its origin
  // True if an on-node peer's operation `seq` failed. What was read from its buffers may be anything.
  bool gave_up(int peer, uint64_t seq) const;
  // The calls of ranks differ, as this rank or another has found. Returns the words for that which all
  // ranks of this node use: those of the first of them that has found a difference.
  std::string words_of_difference(const std::string& found);
  FailureCause cause() const {
    return is_damaged ? FailureCause::Damage
           : calls_differ ? FailureCause::Difference
           : was_revoked ? FailureCause::Revoked : FailureCause::Other;
  }
  // Makes the communicator unusable; the first reason stays.
  void break_down(const std::string& why, bool by_death = false);
  // True if an operation can fail on all ranks without harm to the next one.
  bool can_take_back(const Op& op) const;
  // What a rank does, as it says itself and the kernel says of its process (rank_states.hpp).
  RankState state_of(int peer) const;
  // Tells ranks of this node what this one waits for; null: nothing.
  void show_wait(const ToldWait* wait);
  // Counts one more operation, and tells the other ranks; returns its number.
  uint64_t take_number();
  void tell_count();
  std::shared_ptr<Op> take_spare() { return std::move(spare_); }  // it keeps its plan
  // What a try of faults does to an operation that has its number (chaos.cpp).
  void inject(Op& op);
  // Remembers what an operation's array holds, in check mode (in_flight.cpp).
  void guard(Op& op);
  // An operation in flight whose value wants Python, marked as Running, or null.
  std::shared_ptr<Op> take_wanted();

  // Ranks of this node that have not started operation `seq` yet.
  std::vector<int> not_started(uint64_t seq) const;
  // Best half round trip to a peer of this node, which calls it as often, in ns; < 0: time ran out.
  double probe_latency(int peer, int rounds, double timeout_s);
  // Measures both, while the peer does the same; negative where time ran out, here or there.
  SlotTimes probe_slots(int peer, size_t window, double timeout_s);

  Engine& engine;
  const int rank, size;
  const std::string name;
  uint64_t next_seq = 0;
  size_t messages_in_flight = 0;  // point-to-point sends and receives not complete
  uint64_t failed_from = ~uint64_t{0};  // operations from this one on do not complete here
  std::string failure;  // why the communicator can't be used any more; written once
  bool failed_by_death = false;  // written with it
  std::atomic<bool> broken{false};  // release: `failure` is written
  uint64_t fork_epoch = 0;
  int spin_before_yield = 2000;
  // Bytes of a lane that operations pass through, each behind the one before; 0: each begins
  // where the lane does.
  size_t slot_window = 0;
  // The number of looks of a rank that waits for a run of the plan, before it lets another rank
  // have the core.
  int spins_of(const Plan* plan) const {
    return plan != nullptr && plan->spins >= 0 ? plan->spins : spin_before_yield;
  }
  // The least of the collectives in flight; `otherwise` where there is none.
  int least_spins(int otherwise) const;
  // Polls while the GIL is held: about 2 us; hardly any where a peer waits for this core.
  int spins_with_gil(const Plan* plan = nullptr) const {
    return std::min(kSpinsWithGil, spins_of(plan));
  }

  unsigned char* arena = nullptr;
  size_t region_nbytes = 0;
  RegionLayout layout;
  std::vector<int> members;
  // Faults are injected, or messages have checksums. Then no operation runs from the caller's stack.
  bool is_watched = false;
  bool checksums = false;        // of messages, equal on all ranks
  bool is_damaged = false;       // a message did not fit its checksum, here or elsewhere
  bool calls_differ = false;     // `failure` says that ranks made different calls
  bool was_revoked = false;      // a rank has ended it for all, this one or one of another node
  bool guards = false;           // arrays of nonblocking calls against writes of the program
  std::shared_ptr<Chaos> chaos;  // injects faults; null outside of tries
  const MpiApi* off_node = &mpi();  // what carries messages to other nodes
  Handle mpi_comm = 0;
  int mpi_tag = 0;

  static constexpr size_t kRecords = 256;
  std::vector<Record> records, message_records;  // each by its own sequence number
  bool keeps_records = true;  // of collectives

 private:
  friend class Op;
  friend class P2P;
  friend class Refusals;
  friend class Afar;
  friend class StandIns;
  friend class CallTrail;
  friend class FarWaits;
  bool any_asleep() const {
    // The compiler, at least, keeps the order (bell.hpp).
    std::atomic_signal_fence(std::memory_order_seq_cst);
    return asleep_->load(std::memory_order_relaxed) != 0;
  }
  void publish_why();
  void show_why(const std::string& text);
  std::string why_of(int member) const;
  std::string who_says_so(uint64_t seq, bool still_agrees, bool& by_death) const;
  GaveUp who_gave_up_origin() const;  // as one of this group has died
  void wake_peer(int peer);
  void wake_peers(const Plan& plan);
  std::shared_ptr<Op> fresh_op();
  std::shared_ptr<Op> begin(std::shared_ptr<Op> op, uint64_t limit);
  bool advance_first(const std::shared_ptr<Op>& op, uint64_t limit);
  void make_agreement(Op& op);
  void begin_agreement(const std::shared_ptr<Op>& first);
  std::shared_ptr<Op> go_on(const std::shared_ptr<const Plan>& plan, const void* in, void* out,
                            uint64_t seq, size_t done, int lane, const unsigned char* tmp,
                            Store store, uint64_t timed_from, bool shown);
  template <bool kHasMore>
  std::shared_ptr<Op> run_tiny(const std::shared_ptr<const Plan>& plan, const void* in,
                               void* out, int spins);
  // Before a short run of ordinary buffers: tells peers that use the heap. False where the run
  // is none of these.
  bool show_ordinary(const Plan& plan, const void* in, const void* out);
  void note(uint64_t seq, const Plan& plan, uint64_t stream);
  void show_latest(const Record& record, uint64_t mark);
  bool look_for_difference(Op& op);
  std::string differing_call(const Op& op) const;
  std::optional<uint64_t> mark_in_flight(uint64_t seq) const;
  int acquire_lane(const Plan& plan);
  void release_lane(Op& op);
  unsigned char* lane_base(int lane) const;
  RankHeader* header(int member) const {
    return reinterpret_cast<RankHeader*>(arena + static_cast<size_t>(member) * region_nbytes);
  }
  bool has_left(int peer) const;
  bool has_ended(int peer) const;
  CallLine& call_line(int member, uint64_t seq) const;
  Place place_in_heap(const void* data, size_t nbytes) const;
  unsigned char* address_of(int member, Place place) const {
    const Segment& segment = heap_[segment_of(place)];
    return segment.base + static_cast<size_t>(member) * segment.part_nbytes + offset_of(place);
  }
  bool is_place(Place place) const { return place != 0 && segment_of(place) < heap_.size(); }
  static const std::atomic<uint32_t> kNobodySleeps;
  const std::atomic<uint32_t>* asleep_ = &kNobodySleeps;
  std::shared_ptr<Bells> bells_;
  std::vector<int> bell_of_;  // rank -> member of bells_, or -1
  std::shared_ptr<Liveness> liveness_;
  std::vector<int> life_of_;  // rank -> member of liveness_, or -1
  mutable uint32_t said_dead_ = 0;  // 1 + a rank that has died, as others say; 0: none says so
  std::shared_ptr<Relay> relay_;  // what off_node and mpi_comm refer to, or null
  std::shared_ptr<ToldAfar> told_;  // for ranks of other nodes that ask; null where nobody can
  const std::shared_ptr<Kin> kin_;
  std::vector<Segment> heap_;
  std::vector<Mirror> mirrors_;
  bool showing_[kCallLines] = {};  // which call lines belong to operations in flight
  std::vector<Link> links_;
  std::vector<int> member_index_;  // rank -> index in the arena, -1 off node
  std::vector<std::shared_ptr<Op>> active_;
  std::shared_ptr<Op> spare_;
  Lane lanes_[kLanes];
  int learned_ = -1;  // whether slots are streamed, by the last plan that knows; -1: none
  bool lane_refused_ = false;  // an older operation waits for a lane in this pass
  bool native_refused_ = false;  // an older vendor collective has not started in this pass
 public:
  Refusals refusals{*this};
  CallTrails trails{*this};
  FarWaits far_waits{*this};
  std::unique_ptr<class P2P> p2p;
  FlightEntry flight{*this};  // the last one: it refers to the others
};

}  // namespace commrt
