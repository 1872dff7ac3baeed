// SPDX-License-Identifier: Apache-2.0
// Runs a communicator's operations over memory of peers (peer_exchange.hpp), in stream order and
// with deadlines.
//
//   the exchange's stream:  after the caller's, by an event; begun flag = v; the program
//                           (peer_exchange.hpp); ended flag = v; end event
//   the caller's stream:    where the call blocks it, after the end event
//
// The call enqueues all of that. So streams may share a hardware queue, and may hold commands that
// wait for other engines' flags. Waits for peers' flags are never in the caller's stream.
//
// A rank that gives up says so in the communicator's shared memory before it releases its streams,
// as these then publish wrong data. A peer that sees the end of an operation first checks whether a
// rank gave it up.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "device_calls/watched_work.hpp"
#include "peer_memory/peer_exchange.hpp"

namespace commrt {

// The plan of a call, a program: it depends on the arguments alone.
struct PeerPlan : WatchedPlan, std::enable_shared_from_this<PeerPlan> {
  // Bytes of memory that it takes.
  std::size_t memory_nbytes() const { return sizeof *this + more_nbytes(); }
};

struct PeerCall : WatchedCall {
  std::shared_ptr<const PeerPlan> plan;
};

class PeerWork : public WatchedWork {
 public:
  // Throws DeviceFailure. `first_value` is of flags, and for tests of their wrapping.
  PeerWork(Comm& comm, Engine& engine, std::shared_ptr<PeerExchange> exchange,
           std::uint32_t first_value);

  // Gives the device all that there is to do. With `orders`, the caller's stream waits for it.
  // `keep` are references that become the call's own. Throws DeviceFailure; then the references
  // are still the caller's.
  CallPtr start(const std::shared_ptr<const PeerPlan>& plan, unsigned char* in, unsigned char* out,
                Stream stream, bool orders, void* const* keep, double timeout_s);
  void wait_on(const CallPtr& call, Stream stream) override;
  // Ends it when no more calls come. Does not call the device.
  void close() override;
  // After close(): true if all that the device was given has run. Does not wait. Throws
  // DeviceFailure.
  bool has_run();
  // Then gives back what the device has of this, which may wait for all that it was given.
  void end();

  PeerExchange& exchange() const { return *exchange_; }

 private:
  bool has(PlantedInExchange bug) const { return exchange_->has(bug); }
  void refuse_capture(Stream stream) const;
  void issue(const std::shared_ptr<PeerCall>& made, unsigned char* in, unsigned char* out,
             Stream stream, bool orders, void* const* keep);
  void give(PeerCall& made, unsigned char* in, unsigned char* out, unsigned char* scratch,
            bool copies, Stream stream, bool orders);
  GaveUp who_gave_up(const WatchedCall& call) override;
  std::uint64_t first_lost(std::uint64_t next) const override;
  void see_end(const WatchedCall& call) override;
  bool look_at_failed() override;
  void let_streams_go() override;
  const char* too_late() const override {
    return "an operation over memory of peers came too late";
  }

  const std::shared_ptr<PeerExchange> exchange_;
  EventPool own_events_;
  FlagLines lines_;

  std::mutex issue_;  // of who starts: the order of commands is that of calls
  Event ready_ = 0;
  std::uint32_t issued_;  // the value of the latest call
  std::atomic<bool> half_given_{false};  // a call whose commands the device did not all take
  Scratch scratch_;       // programs run one behind the other, and share it

  std::deque<std::uint64_t> ended_seqs_;  // of the last two calls that ended; by polling_
};

}  // namespace commrt
