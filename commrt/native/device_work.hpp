// SPDX-License-Identifier: Apache-2.0
// What a communicator has under way on a device: the ground that collectives (staging.hpp) and
// messages (staged_messages.hpp) on device memory stand on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.hpp"
#include "pinned_pool.hpp"
#include "pinned_ring.hpp"
#include "staged_plan.hpp"

namespace commrt {

class Backoff;
class Comm;
class DeviceWork;
class Engine;
class Op;

// A call of the device that failed.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(DeviceStatus status_, const std::string& text)
      : std::runtime_error(text), status(status_) {}
  DeviceStatus status;
};

struct StagedCall {
  enum class State : int { Running = 0, Done, Failed };

  ~StagedCall();
  bool ended() const { return state.load(std::memory_order_acquire) != 0; }
  bool failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(State::Failed);
  }
  // Once; `kind_` and `why` are what its request says.
  void fail(const std::string& kind_, const std::string& why);
  void succeed();

  std::shared_ptr<DeviceWork> work;
  std::atomic<int> state{0};
  // Whether the end event is recorded: at once, but where streams have no flags.
  std::atomic<bool> end_given{false};
  std::uint64_t seq = 0;  // of its first piece
  Event end = 0;
  std::uint32_t end_value = 0;
  double timeout_s = 0;
  std::string kind, error;  // of a failure; written before the state
  void* keep[2] = {nullptr, nullptr};  // PyObject*: the caller's arrays, until the end flag

  // Of collectives.
  std::shared_ptr<const StagedPlan> plan;
  std::vector<unsigned char*> arrays;                // on the device, by their numbers
  std::vector<std::vector<std::uint64_t>> tables;    // of addresses on the host, by piece
  PinnedRing::Part memory;
  // Of messages.
  std::shared_ptr<Op> messages;
  std::vector<StagedCopy> in, out;     // of `arrays` and the block
  PinnedPool::Block block;
  Event copied = 0;                    // all that leaves is on the host
  std::uint32_t start_value = 0, go_value = 0;
  double opened_s = 0;
  bool asked = true;                   // somebody will ask what became of it
  bool given = false;                  // what comes back is given to the device
};

// One communicator's work of a kind on one device.
class DeviceWork : public std::enable_shared_from_this<DeviceWork> {
 public:
  DeviceWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps);
  virtual ~DeviceWork();

  // Looks at flags; true if anything went on. Of several threads one at a time.
  virtual bool progress() = 0;
  // Lets a stream wait for the end of a call; blocks only where streams have no flags.
  virtual void wait_on(const std::shared_ptr<StagedCall>& call, Stream stream) = 0;
  // Gives the device what of a call can be given by now.
  virtual void advance(const std::shared_ptr<StagedCall>& call) = 0;
  // Gives it all: nobody will ask for the call again.
  virtual void let_be(const std::shared_ptr<StagedCall>& call) = 0;
  // Gives everything back, where nothing is under way. Idempotent.
  virtual void close() = 0;

  // Throws DeviceFailure where a stream is captured; the capture goes on.
  void refuse_capture(Stream stream);
  // What a thread asks that waits for a call: whether the device still works.
  void ask_device(const std::shared_ptr<StagedCall>& call);
  // Fails all that is under way and lets the streams go.
  void give_up(const std::string& kind, const std::string& why);
  // The communicator goes away: nothing of it may be touched any more.
  void abandon();
  // Waits for something to change; Deadlock on a simulated device that sees there is nothing.
  void pause(Backoff& backoff);
  // A simulated device learns that the engine did something.
  void announce();
  // Whether a call has ended, as the thread sees it that asks.
  bool has_ended(const StagedCall& call);
  // Whether the device still works, asked where nobody waits: by a thread that may be stopped.
  void ask_for_oldest();

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool simulated() const { return device_->api->lock != nullptr; }
  int outstanding() const { return outstanding_.load(std::memory_order_acquire); }
  Device* device() const { return device_; }
  void give_event(Event event);
  std::size_t num_events();

 protected:
  void check(DeviceStatus status) const;
  template <class... Parameters, class... Arguments>
  void call(DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...), Arguments... arguments) {
    check((device_->api->*entry)(device_, arguments...));
  }
  Event take_event();
  void destroy_events();
  // Lines of pinned memory for flags, the last of which tells of activity.
  void make_flags(std::size_t count, std::uint32_t value, std::uint32_t** const* flags);
  void free_flags();
  // Throws where all that is under way has failed.
  void check_failed() const;
  // Waits for room in pinned memory until `deadline`: throws where that is over.
  void wait_for_memory(Backoff& backoff, double deadline, double timeout_s, std::size_t most);
  // The host is done with a call: its references are free.
  void drop(StagedCall& call);
  // Holds polling_. The call whose end is awaited longest, or null.
  virtual std::shared_ptr<StagedCall> oldest() const = 0;
  // Holds polling_. Marks calls, and lets their streams go.
  virtual void let_all_go(const std::string& kind, const std::string& why) = 0;
  void fail(const std::string& kind, const std::string& why, bool device_is_gone);
  void fail_as(const DeviceFailure& failure);

  Comm* comm_;
  Engine& engine_;
  Device* const device_;
  const std::shared_ptr<void> keeps_;
  const bool flags_;

  std::mutex issue_;    // of who starts: the order of commands is that of operations
  std::mutex polling_;  // of who looks; nobody waits for a peer or the device with it
  unsigned idle_ = 0;
  bool device_gone_ = false;
  std::atomic<bool> failed_{false}, closed_{false};
  std::string failure_kind_, failure_;
  std::atomic<int> outstanding_{0};

 private:
  std::uint32_t* activity_ = nullptr;
  void* flag_memory_ = nullptr;
  std::atomic<std::uint32_t> activities_{0};
  std::mutex events_mutex_;
  std::vector<Event> events_;  // for the ends of calls
  bool events_closed_ = false;
};

// What the engine says became of an operation that failed, as errors are called.
const char* failure_kind(const Op& op);

}  // namespace commrt
