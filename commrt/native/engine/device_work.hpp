// SPDX-License-Identifier: Apache-2.0
// The base class of a communicator's calls on a device. The thread that makes progress looks at
// them. Each call ends or fails once, and its failure ends the communicator.
//
//   StagedWork (device_calls/):  the host has a part in each call, and flags let it go on:
//                                collectives and messages (staging/), MPI's (library_calls/)
//   WatchedWork (device_calls/): the device ends calls by itself: those over memory of peers
//                                (peer_memory/), NCCL's (library_calls/)
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "devices/device.hpp"
#include "devices/device_error.hpp"
#include "devices/device_stores.hpp"

namespace commrt {

class Backoff;
class Comm;
class DeviceWork;
class Engine;
class Op;

// Added to a flag on failure, to let go calls too whose commands are still to be given.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;
// Looks without a change between two questions that take longer.
constexpr unsigned kIdleLooks = 256;

// A call that could not be made for another reason than the device; `kind` as DeviceCall's.
struct CallFailure : std::runtime_error {
  CallFailure(std::string kind_, const std::string& text)
      : std::runtime_error(text), kind(std::move(kind_)) {}
  std::string kind;
};

// One started call on device memory.
struct DeviceCall {
  enum class State : int { Running = 0, Done, Failed };

  virtual ~DeviceCall();
  bool ended() const { return state.load(std::memory_order_acquire) != 0; }
  bool failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(State::Failed);
  }
  // Called once; `kind_` and `why` are what its request says.
  void fail(const std::string& kind_, const std::string& why);
  void succeed();
  // Recorded in a graph, it runs as that is launched, and its state does not change.
  virtual bool is_captured() const { return false; }
  // The event that says, as it is asked, whether the device still works; 0: none yet.
  virtual Event asked() const { return end; }
  // The host's operation, of messages.
  virtual const Op* messages() const { return nullptr; }

  std::shared_ptr<DeviceWork> work;
  std::atomic<int> state{0};
  std::uint64_t seq = 0;  // on the communicator; of its first operation there
  bool orders = false;    // its caller's stream waits for its end, and nobody need ask for it
  bool may_be_refused = false;  // other ranks make it as well, in the order of operations
  std::atomic<bool> is_waited{false};  // a stream was told to wait for it later
  Event end = 0;
  double timeout_s = 0;
  std::string kind, error;  // of a failure; written before the state
  void* keep[2] = {nullptr, nullptr};  // PyObject*: the caller's arrays, until the end
};

// One communicator's work of a kind on one device.
class DeviceWork : public DeviceUser, public std::enable_shared_from_this<DeviceWork> {
 public:
  using CallPtr = std::shared_ptr<DeviceCall>;

  // `keeps` is alive as long as the device is needed, `events` as long as calls are.
  DeviceWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
             EventPool& events);
  virtual ~DeviceWork();

  // Takes one look; true if anything has changed. One thread at a time may look. Takes no lock
  // that anybody holds while it waits for a peer or the device.
  virtual bool progress() = 0;
  // Lets a stream wait for the end of a call. Throws DeviceFailure where one of them is in a
  // capture that the other one has no part in; the capture goes on.
  virtual void wait_on(const CallPtr& call, Stream stream) = 0;
  // False: a call may be given to the device at once. Asked with the GIL held.
  virtual bool may_have_to_wait() const { return false; }
  // Waits until the next call may be given to the device; false where that is not so by `until_s`
  // or a signal comes. Throws CallFailure where it never will be, or not by `deadline_s`.
  virtual bool may_start(double /*until_s*/, double /*deadline_s*/) { return true; }
  // Gives the device what of a call can be given by now.
  virtual void advance(const CallPtr&) {}
  // Gives it all: nobody will ask for the call again.
  virtual void let_be(const CallPtr&) {}
  // A call has been waited for: gives up where it takes longer than it may.
  virtual void give_up_late(const CallPtr&, double) {}
  // Gives everything back, where nothing is under way. Idempotent.
  virtual void close() = 0;
  // True if streams wait for this process, and go on only when it makes progress.
  virtual bool holds_streams() const { return false; }
  // True if a thread may stick in a library that it calls.
  virtual bool may_stick() const { return false; }
  // Called ten times a second: gives up where one sticks for longer than its call may take.
  virtual void free_who_sticks() {}

  // Asks whether the device still works. For a thread that waits for a call.
  void ask_device(const CallPtr& call);
  // The same where nobody waits: by a thread that may be stopped.
  void ask_for_oldest();
  // Fails all that is under way and lets the streams go. `seq` is the operation that cannot be
  // done; without it, the first one under way.
  void give_up(const std::string& kind, const std::string& why,
               std::optional<std::uint64_t> seq = std::nullopt);
  // The communicator goes away: nothing of it may be touched any more.
  void abandon();
  // Waits for something to change, at most until then; Deadlock on a simulated device that sees
  // there is nothing. True if the time is to be looked at.
  bool pause(Backoff& backoff, double until_s = std::numeric_limits<double>::infinity());
  // A simulated device learns that the engine did something.
  void announce();
  // True if a call has ended, as the asking thread sees it.
  bool has_ended(const DeviceCall& call);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool simulated() const { return device_->api->lock != nullptr; }
  // True if it was closed, and nothing of it is under way any more.
  bool is_over() const { return closed_.load(std::memory_order_acquire) && outstanding() == 0; }
  // Calls whose end the host has not seen.
  int outstanding() const { return outstanding_.load(std::memory_order_acquire); }
  EventPool& events() const { return events_; }

 protected:
  // Throws where all that is under way has failed.
  void check_failed() const;
  // Throws where a stream is captured; the capture goes on. `why` no graph can have the call.
  void refuse_capture_of(Stream stream, const char* why) const;
  // Makes progress until that is so. Holds no lock that progress takes. False where it is not so by
  // `until_s`, or a signal comes before.
  bool progress_until(const std::function<bool()>& is_so,
                      double until_s = std::numeric_limits<double>::infinity());
  // The caller holds polling_. References that the call keeps become its own, and it counts as
  // under way.
  void take_up(DeviceCall& call, void* const* keep);
  // Holds polling_. The host has seen the end: its references are free. Another rank may have
  // refused the call, which fails by that.
  void drop(DeviceCall& call);
  // Holds polling_.
  void fail(const std::string& kind, const std::string& why, bool device_is_gone,
            std::optional<std::uint64_t> seq = std::nullopt);
  void fail_as(const DeviceFailure& failure);
  // Gives up and goes on throwing. For a thread whose call meets a failure.
  void give_up_as(const DeviceFailure& failure,
                  std::optional<std::uint64_t> seq = std::nullopt);

  // Holds polling_. The call whose end is awaited longest, or null.
  virtual CallPtr oldest() const = 0;
  // Holds polling_. Marks calls, and lets their streams go.
  virtual void let_all_go(const std::string& kind, const std::string& why) = 0;
  // Holds polling_. Sees what has ended, which is then nothing to give up.
  virtual void see_ended() {}
  // Holds polling_ and the engine's lock. The first operation that peers must not count on.
  virtual std::uint64_t first_lost(std::uint64_t next) const { return next; }
  // The words of the communicator's later calls about one that took too long.
  virtual const char* too_late() const = 0;

  Comm* comm_;  // guarded by polling_; null once it is gone
  Engine& engine_;
  const std::shared_ptr<void> keeps_;
  EventPool& events_;
  std::uint32_t* activity_ = nullptr;  // a flag

  std::mutex polling_;  // held to look; its holder does not wait for a peer or the device
  unsigned idle_ = 0;
  bool device_gone_ = false;
  std::atomic<bool> failed_{false}, closed_{false};
  std::string failure_kind_, failure_;

 private:
  void fail_if_refused(DeviceCall& call);

  std::atomic<int> outstanding_{0};
  std::atomic<std::uint32_t> activities_{0};
};

}  // namespace commrt
