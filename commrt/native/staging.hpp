// SPDX-License-Identifier: Apache-2.0
// Collectives on device memory, through pinned memory and the host engine.
//
// A call gives the device all its commands at once, on two streams of the communicator's own:
//
//   d2h:  after the caller's stream; for each piece: copy to the host, start flag = s
//   h2d:  for each piece: after that copy; wait until go flag >= s; copy back. Then the end
//         event, and end flag = e
//
// and the host engine one operation for each piece, behind a gate that opens at s. Whoever makes
// progress looks at flags in memory: it opens gates, and sets the go flag once an operation is
// done. It calls no driver and no Python, so it needs nothing that a blocked stream might hold.
//
// Nothing is enqueued later, because streams may share a hardware queue: behind a stream that
// waits for a flag a later copy would wait for ever. Values of flags count on, and waits are
// cyclic, so no flag is ever reset. Both streams work in order, so one flag of each kind serves a
// whole communicator, pieces are let go in order, and pinned memory is a ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.hpp"
#include "pinned_ring.hpp"

namespace commrt {

class Comm;
class Engine;
class Op;
class Plan;
class Stager;

// Bugs that tests plant in the protocol, to see that they are found.
enum class Planted : int {
  None = 0,
  Ungated,          // the host works before the flag of the copy to it
  NoGo,             // the copy back does not wait for the host
  EarlyRecycling,   // memory is used again once the host is done
  NoEndWait,        // wait() does not wait for the end event
  NoReady,          // the copy does not wait for the caller's stream
  StartEarly,       // the start flag is written before the copy
  EndEarly,         // the end event is recorded before the copy back
  GoEarly,          // the go flag is stored before the host is done
  GoAll,            // the first piece lets all go
  GoOffByOne,       // the copy back waits for the piece before
  EndFlagEarly,     // the end flag is written before the last copy back
  StartOtherStream, // the start flag is written by the other stream
  EndOtherStream,   // the end event is recorded in the stream of the first copies
  ReadyAfter,       // the stream waits for an event that is recorded later
  NotDrained,       // a piece is copied over one that has not gone back
  NotCopied,        // nothing but flags orders the copy back after the copy to the host
  FlagsKept,        // a failure does not release the streams
  WrongSlot,        // a piece goes back from the first one's place
  LateCopy,         // the copy back is given late, and the caller's stream waits for a flag
  ValuesAgain,      // flags do not count on from call to call
  RecycledAtCall,   // memory is used again by the next call
  RingUnlocked,     // memory is taken without the lock under which it comes back
  ReadyLate,        // the caller's stream is recorded after the first copy
};
constexpr int kNumPlanted = 24;
extern const char* const kPlantedNames[kNumPlanted];

// A call of the device that failed.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(DeviceStatus status_, const std::string& text)
      : std::runtime_error(text), status(status_) {}
  DeviceStatus status;
};

// What of the call follows from its arguments alone.
struct StagedPlan {
  std::shared_ptr<const Plan> piece, last;  // what the host runs; the last may be shorter
  std::int64_t pieces = 1;
  std::size_t in_nbytes = 0, out_nbytes = 0;            // of a piece
  std::size_t last_in_nbytes = 0, last_out_nbytes = 0;  // of the last one
  bool shared = false;  // in and out are the same pinned memory

  std::size_t slot_nbytes() const {
    const std::size_t in = align(in_nbytes), out = align(out_nbytes);
    return shared ? (in > out ? in : out) : in + out;
  }
  std::size_t out_offset() const { return shared ? 0 : align(in_nbytes); }

 private:
  static std::size_t align(std::size_t nbytes) { return (nbytes + 63) / 64 * 64; }
};

struct StagedCall {
  enum class State : int { Running = 0, Done, Failed };

  ~StagedCall();
  bool ended() const { return state.load(std::memory_order_acquire) != 0; }
  bool failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(State::Failed);
  }

  std::shared_ptr<Stager> stager;
  std::shared_ptr<const StagedPlan> plan;
  std::atomic<int> state{0};
  // Whether the end event is recorded: at once, but where streams have no flags.
  std::atomic<bool> end_given{false};
  std::uint64_t seq = 0;  // of its first piece
  Event end = 0;
  std::uint32_t end_value = 0;
  PinnedRing::Part memory;
  double timeout_s = 0;
  std::string kind, error;  // of a failure; written before the state
  void* keep[2] = {nullptr, nullptr};  // PyObject*: the caller's arrays, until the end flag
};

struct StagerOptions {
  int slots = 4;                             // pieces of a call that are on their way at once
  std::size_t first_nbytes = std::size_t{1} << 20;   // of pinned memory
  std::size_t most_nbytes = std::size_t{256} << 20;  // beyond, calls wait
  std::uint32_t first_value = 0;             // of flags
};

// One communicator's work on one device.
class Stager : public std::enable_shared_from_this<Stager> {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  Stager(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
         const StagerOptions& options);
  ~Stager();

  // Gives the device and the engine all that there is to do. With `orders`, the caller's stream
  // goes on only when it is done. `keep` are references that become the call's own. Throws
  // DeviceFailure; then the references are still the caller's.
  std::shared_ptr<StagedCall> start(const std::shared_ptr<const StagedPlan>& plan,
                                    const unsigned char* in, unsigned char* out, Stream stream,
                                    bool orders, void* const* keep, double timeout_s);
  // Lets a stream wait for the end of a call; blocks only where streams have no flags.
  void wait_on(const std::shared_ptr<StagedCall>& call, Stream stream);
  // Throws DeviceFailure where a stream is captured; the capture goes on.
  void refuse_capture(Stream stream);
  // Looks at flags; true if anything went on. Of several threads one at a time.
  bool progress();
  // What a thread asks that waits for a call: whether the device still works.
  void ask_device(const std::shared_ptr<StagedCall>& call);
  // Fails all that is under way and lets the streams go.
  void give_up(const std::string& kind, const std::string& why);
  // Gives everything back, where nothing is under way. Idempotent.
  void close();
  // The communicator goes away: nothing of it may be touched any more.
  void abandon();
  // Waits for something to change; Deadlock on a simulated device that sees there is nothing.
  void pause(class Backoff& backoff);
  // A simulated device learns that the engine did something.
  void announce();

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool simulated() const { return device_->api->lock != nullptr; }
  int outstanding() const { return outstanding_.load(std::memory_order_acquire); }
  std::size_t pinned_nbytes();
  Device* device() const { return device_; }
  void give_event(Event event);
  std::size_t num_events() {
    const std::lock_guard<std::mutex> own(events_mutex_);
    return events_.size();
  }
  Planted planted = Planted::None;

 private:
  struct Piece {
    std::shared_ptr<StagedCall> call;
    std::shared_ptr<Op> op;
    unsigned char* in;
    std::size_t in_nbytes;
    unsigned char* out;
    std::size_t out_nbytes;
    unsigned char* target;  // of the copy back
    std::uint32_t value;
    bool last;
    Event copied;           // where there are no flags
    double opened_s = 0;
  };

  bool has(Planted bug) const { return planted == bug; }
  void check(DeviceStatus status) const;
  template <class... Parameters, class... Arguments>
  void call(DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...), Arguments... arguments) {
    check((device_->api->*entry)(device_, arguments...));
  }
  void issue(const std::shared_ptr<StagedCall>& made,
             const std::shared_ptr<const StagedPlan>& plan, const unsigned char* in,
             unsigned char* out, Stream stream, void* const* keep, double timeout_s);
  PinnedRing::Part take_memory(std::size_t nbytes, double timeout_s);
  Event take_event();
  void enqueue(StagedCall& call, std::vector<Piece>& pieces, const unsigned char* in,
               Stream stream, std::int64_t slots);
  void copy_to_host(std::vector<Piece>& pieces, std::size_t i, const unsigned char* in,
                    std::size_t slots);
  void copy_back(std::vector<Piece>& pieces, std::size_t i, std::size_t slots);
  void submit(std::vector<Piece>& pieces, Stream stream);
  bool open_gates();
  bool let_go();
  bool take_ended();
  bool look_after(Piece& piece);
  void give_copy_back(Piece& piece);
  void finish(const std::shared_ptr<StagedCall>& call);
  void fail(const std::string& kind, const std::string& why, bool device_is_gone);

  Comm* comm_;
  Engine& engine_;
  Device* const device_;
  const std::shared_ptr<void> keeps_;
  const StagerOptions options_;
  const bool flags_;

  std::mutex issue_;  // of who starts: the order of commands is that of operations
  Stream d2h_ = 0, h2d_ = 0;
  Event ready_ = 0;
  std::vector<Event> copied_, drained_;  // by slot
  std::atomic<std::uint32_t> issued_;    // the latest value of the start flag
  std::uint32_t ends_;                   // of the end flag
  std::uint32_t *start_ = nullptr, *go_ = nullptr, *end_ = nullptr, *activity_ = nullptr;
  void* flag_memory_ = nullptr;

  std::mutex polling_;  // guards what follows; nobody waits for a peer or the device with it
  PinnedRing ring_;
  std::deque<Piece> pieces_;  // the host's part of which is not done
  std::size_t open_ = 0;      // of these, the first so many have open gates
  std::deque<std::shared_ptr<StagedCall>> ending_;
  unsigned idle_ = 0;
  bool device_gone_ = false;
  std::atomic<bool> failed_{false}, closed_{false};
  std::string failure_kind_, failure_;

  std::atomic<std::uint32_t> opened_;  // gates up to this value are open; the engine reads it
  std::atomic<std::uint32_t> activities_{0};
  std::atomic<int> outstanding_{0};

  std::mutex events_mutex_;
  std::vector<Event> events_;  // for the ends of calls
};

}  // namespace commrt
