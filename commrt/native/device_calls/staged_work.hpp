// SPDX-License-Identifier: Apache-2.0
// Device work with a part for the host: the device copies to pinned memory, the host's engine sends
// and combines, and the device copies back. Flags let each side wait for the other. Collectives
// (staging.hpp) and messages (staged_messages.hpp) decide when to set them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "device_calls/staged_plan.hpp"
#include "engine/backoff.hpp"
#include "engine/device_work.hpp"
#include "engine/engine.hpp"

namespace commrt {

struct StagerOptions {
  int slots = 4;                             // pieces of a call that are on their way at once
  std::size_t first_nbytes = std::size_t{1} << 20;   // of pinned memory
  std::size_t most_nbytes = std::size_t{256} << 20;  // beyond, calls wait
  std::uint32_t first_value = 0;             // of flags
  bool flags = true;                         // used where streams have them
};

struct StagedCall : DeviceCall {
  // True once the end event is recorded: at the call, except for received messages and where
  // streams have no flags.
  std::atomic<bool> end_issued{false};
  std::uint32_t end_value = 0;
};

class StagedWork : public DeviceWork {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  StagedWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
             const StagerOptions& options);

  bool progress() override;
  void wait_on(const CallPtr& call, Stream stream) override;
  void close() override;
  // Gives back what close() left of a failed one, once nobody uses it any more.
  enum class Rest : int { Later = 0, Released, Never };
  Rest release_rest();
  bool holds_streams() const override { return true; }
  // Throws DeviceFailure where a stream is captured; the capture goes on.
  void refuse_capture(Stream stream) const;
  // Bytes of pinned memory for data.
  std::size_t pinned_nbytes();

 protected:
  using StagedPtr = std::shared_ptr<StagedCall>;

  // Callers of the following hold polling_. This lets the host begin with calls whose copies to
  // the host are there.
  virtual bool open_gates() = 0;
  // Sends back what the host is done with, in the order in which it was given to the device.
  virtual bool let_go() = 0;
  // Called for a call that neither the host nor the device uses any more.
  virtual void give_memory_back(StagedCall& call) = 0;
  virtual std::size_t memory_nbytes() const = 0;
  // Nothing is under way: gives back what this has beside the streams.
  virtual void free_all() = 0;
  // Released once the host is done with all operations of failed calls; Never if MPI still has
  // memory of theirs.
  virtual Rest host_is_done() = 0;
  // False for a planted bug: what streams hold is not waited for.
  virtual bool asks_device() const { return true; }
  // Why a captured stream is refused.
  virtual const char* why_no_graph() const;
  // Lets a stream wait for the end, once the end is given. The caller holds no lock.
  virtual void order_after(const StagedPtr& call, Stream stream);
  const char* too_late() const override { return "an operation on device memory came too late"; }

  // Takes pinned memory: `take(&grow)` says whether there was some, else how much is to be made,
  // which `add(memory, nbytes)` takes. Blocks while there is none, until the time is over.
  template <class Take, class Add>
  void take_memory(Take take, Add add, double timeout_s, bool locks = true);
  // Gives the device and the engine what `give` does; where that fails nothing else works, either.
  template <class Give>
  void give_or_fail(Give give, const char* lacking);
  // Gives up where the device refuses a command of a call that progress knows. Its end flag will
  // not come: it keeps its arrays, as the device may have some of its copies.
  void give_up_call(const StagedPtr& call, const DeviceFailure& failure);
  bool take_ended();
  void finish(const StagedPtr& call);
  // Asks whether an event has happened. The question ends no capture, not even one of this thread.
  DeviceStatus query(Event event) const;

  const StagerOptions options_;
  const bool flags_;
  EventPool own_events_;
  FlagLines lines_;
  Stream d2h_ = 0, h2d_ = 0;
  Event ready_ = 0;
  std::uint32_t *const start_, *const go_, *const end_;

  std::mutex issue_;    // of who starts: the order of commands is that of operations
  std::deque<StagedPtr> ending_;  // whose copy back is on its way; guarded by polling_

  std::atomic<std::uint32_t> opened_;  // gates up to this value are open; the engine reads it

  // Events behind all that the streams of a failed and closed one were given. Guarded by issue_.
  Event last_[2] = {0, 0};
  bool is_released_ = false;

 private:
  void mark_ends();
  void free_rest();
  void wait_for_memory(Backoff& backoff, double deadline, double timeout_s);
};

template <class Take, class Add>
void StagedWork::take_memory(Take take, Add add, double timeout_s, bool locks) {
  double deadline = 0;  // none yet: mostly there is some
  Backoff backoff(engine_, 0);
  for (;;) {
    std::size_t grow = 0;
    bool taken = false;
    if (locks) {
      HostLock own(device_, polling_);
      check(own.status());
      check_failed();
      taken = take(&grow);
    } else {
      taken = take(&grow);
    }
    if (taken) return;
    if (grow != 0) {
      // It may wait for all that the device was given, so nothing is held that progress needs.
      void* more = nullptr;
      call(&DeviceApi::pinned_alloc, grow, &more);
      HostLock own(device_, polling_);
      check(own.status());
      add(more, grow);
      continue;
    }
    if (deadline == 0) deadline = now_s() + timeout_s;
    wait_for_memory(backoff, deadline, timeout_s);
  }
}

template <class Give>
void StagedWork::give_or_fail(Give give, const char* lacking) {
  try {
    give();
  } catch (const DeviceFailure& failure) {
    give_up_as(failure);
    throw;
  } catch (...) {
    give_up("backend", lacking);
    throw;
  }
}

}  // namespace commrt
