// SPDX-License-Identifier: Apache-2.0
// A communicator's operations on device memory over memory of peers: stream-ordered, watched, given
// up in time.
//
//   the exchange's stream:  after the caller's, by an event; begun flag = v; the program
//                           (peer_exchange.hpp); ended flag = v; end event
//   the caller's stream:    where the call blocks it, after the end event
//
// All of that is given in the call, so streams may share a hardware queue, and may hold what waits
// for other engines' flags. Waits for peers' flags are never in the caller's stream. Whoever makes
// progress looks at the two flags, without the driver: references go at the end, and an operation
// that has begun and does not end within its time is given up.
//
// A rank that gives up says so in the communicator's shared memory before it lets its streams go:
// what these then publish is worth nothing, and a peer that sees the end of an operation asks first
// whether somebody gave it up.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device_work.hpp"
#include "peer_exchange.hpp"
#include "watched.hpp"

namespace commrt {

class PeerWork;

// What of a call follows from its arguments alone.
struct PeerPlan {
  std::shared_ptr<const StreamProgram> program;
  std::size_t scratch_nbytes = 0, in_nbytes = 0, out_nbytes = 0;
  bool in_place = false;  // the program may have one array for both
  // For the record.
  int64_t elements = 0;
  int code = 0, root = 0, element_type = 0, reduction = 0;
};

struct PeerCall {
  enum class State : int { Running = 0, Done, Failed };

  ~PeerCall();
  bool ended() const { return state.load(std::memory_order_acquire) != 0; }
  bool failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(State::Failed);
  }

  std::shared_ptr<PeerWork> work;
  std::shared_ptr<const PeerPlan> plan;
  std::atomic<int> state{0};
  std::atomic<double> begun_s{0};  // when the host saw that it had begun; 0: not yet
  std::uint64_t seq = 0;
  std::uint32_t value = 0;
  Event end = 0;
  double timeout_s = 0;
  std::string kind, error;  // of a failure; written before the state
  void* keep[2] = {nullptr, nullptr};  // PyObject*: the caller's arrays, until the end
};

class PeerWork : public Watched, public std::enable_shared_from_this<PeerWork> {
 public:
  // Throws DeviceFailure. `first_value` is of flags, and for tests of their wrapping.
  PeerWork(Comm& comm, Engine& engine, std::shared_ptr<PeerExchange> exchange,
           std::uint32_t first_value);
  ~PeerWork() override;

  // Gives the device all that there is to do. With `orders`, the caller's stream waits for it.
  // `keep` are references that become the call's own. Throws DeviceFailure; then the references
  // are still the caller's.
  std::shared_ptr<PeerCall> start(const std::shared_ptr<const PeerPlan>& plan, unsigned char* in,
                                  unsigned char* out, Stream stream, bool orders,
                                  void* const* keep, double timeout_s);
  // Lets a stream wait for the end of a call.
  void wait_on(const PeerCall& call, Stream stream);
  // Throws DeviceFailure where a stream is captured; the capture goes on.
  void refuse_capture(Stream stream);
  bool look() override;
  // Gives up where a call has begun, and has been waited for as long as it may take.
  void give_up_late(const std::shared_ptr<PeerCall>& call, double waited_s);
  // What a thread asks that waits for a call: whether the device still works.
  void ask_device(const std::shared_ptr<PeerCall>& call);
  // Fails all that is under way, and lets the streams go.
  void give_up(const std::string& kind, const std::string& why);
  // Nobody calls any more. Calls nothing of the device.
  void close();
  // After close(): whether all that the device was given has run, without waiting. Throws
  // DeviceFailure.
  bool has_run();
  // Then gives back what the device has of this, which may wait for all that it was given.
  void end();
  void abandon() override;
  void pause(Backoff& backoff);
  // A simulated device learns that this thread has seen what another one saw of a call.
  void see();
  // A simulated device learns that the engine did something.
  void announce();
  void give_event(Event event);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool simulated() const { return device_->api->lock != nullptr; }
  int outstanding() const override { return outstanding_.load(std::memory_order_acquire); }
  PeerExchange& exchange() const { return *exchange_; }

 private:
  using State = PeerCall::State;
  bool has(PlantedInExchange bug) const { return exchange_->has(bug); }
  void check(DeviceStatus status) const;
  template <class... Parameters, class... Arguments>
  void call(DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...), Arguments... arguments) {
    check((device_->api->*entry)(device_, arguments...));
  }
  void issue(const std::shared_ptr<PeerCall>& made, unsigned char* in, unsigned char* out,
             Stream stream, bool orders, void* const* keep);
  void give(PeerCall& made, unsigned char* in, unsigned char* out, unsigned char* scratch,
            bool copies, Stream stream, bool orders);
  Event take_event();
  unsigned char* scratch(std::size_t nbytes);
  bool take_ended();
  bool look_after();
  void finish(const std::shared_ptr<PeerCall>& call);
  std::string who_gave_up(const PeerCall& call);
  void fail(const std::string& kind, const std::string& why, bool device_is_gone);
  std::uint64_t first_lost() const;
  void let_go();

  Comm* comm_;  // guarded by looking_; null once it is gone
  Engine& engine_;
  const std::shared_ptr<PeerExchange> exchange_;
  Device* const device_;

  std::mutex issue_;  // of who starts: the order of commands is that of calls
  Event ready_ = 0;
  std::uint32_t issued_;  // the value of the latest call
  std::vector<std::pair<void*, std::size_t>> scratches_;  // the last one is the largest

  void* flag_memory_ = nullptr;
  std::uint32_t *begun_ = nullptr, *ended_ = nullptr;  // flags: values of calls
  std::uint32_t* activity_ = nullptr;

  std::mutex looking_;  // guards what follows; nobody waits for a peer or the device with it
  std::deque<std::shared_ptr<PeerCall>> calls_;  // under way, in their order
  std::size_t seen_begun_ = 0;                   // the first so many of them have begun
  unsigned idle_ = 0;
  std::deque<std::uint64_t> ended_seqs_;  // of the last two calls that have ended
  bool device_gone_ = false;
  std::atomic<bool> failed_{false}, closed_{false};
  std::string failure_kind_, failure_;
  std::atomic<int> outstanding_{0};
  std::atomic<std::uint32_t> activities_{0};
  std::mutex events_mutex_;
  std::vector<Event> events_;  // for the ends of calls
  bool events_closed_ = false;
};

}  // namespace commrt
