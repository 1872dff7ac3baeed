// SPDX-License-Identifier: Apache-2.0
// Device work that needs no part of the host: the host only watches whether it ended, came too
// late, or failed. Two flags show that for all calls, without asking the driver, as calls begin
// and end in the order in which they were started:
//
//   begun flag = v; what the call does; ended flag = v; end event
//
// A call drops its references when it ends. A call that has begun and misses its deadline fails,
// and its communicator with it, which releases its streams. Where streams cannot write flags, the
// host asks events.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "device_calls/stream_program.hpp"
#include "engine/device_work.hpp"
#include "engine/liveness.hpp"

namespace commrt {

// The plan of a call: it depends on the arguments alone.
struct WatchedPlan {
  // A schedule's rounds, where it runs one; their scratch memory; whether they work in place, and
  // what they write: else an input that lies there is copied first.
  std::shared_ptr<const StreamProgram> program;
  std::size_t scratch_nbytes = 0, in_nbytes = 0, out_nbytes = 0;
  bool in_place = false;
  // These go into the record of the call.
  std::int64_t elements = 0;
  int code = 0, root = 0, element_type = 0, reduction = 0;
  std::shared_ptr<const std::string> words;  // how another rank makes it (device_refusals.hpp)
  // These and the above but elements are equal on all ranks: a number of what else the ranks agree
  // on where there is no root, and the length, 0 where each rank has its own.
  int facts = 0;
  std::uint64_t length = 0;

  // Bytes of memory that it takes beside its own fields.
  std::size_t more_nbytes() const { return program == nullptr ? 0 : program->memory_nbytes(); }

  // True if the output lies where the input is still to be read.
  bool overlaps(const unsigned char* in, const unsigned char* out) const {
    if (in_nbytes == 0 || (in_place && in == out)) return false;
    return in < out + out_nbytes && out < in + in_nbytes;
  }
};

struct WatchedCall : DeviceCall {
  ~WatchedCall() override;

  std::atomic<double> begun_s{0};  // when the host saw that it had begun; 0: not yet
  std::uint32_t value = 0;         // of the flags
  Event begun = 0;                 // where streams write no flags
};

class WatchedWork : public DeviceWork {
 public:
  using DeviceWork::DeviceWork;
  bool progress() override;
  void give_up_late(const CallPtr& call, double waited_s) override;
  bool may_have_to_wait() const override;
  // Where this rank has refused a call, its peers are to hear of that first: a library would take
  // the next call for theirs of the refused one. That may end the communicator.
  bool may_start(double until_s, double deadline_s) override;

 protected:
  using WatchedPtr = std::shared_ptr<WatchedCall>;

  // The call becomes the communicator's next operation. Throws CallFailure where the ranks' calls
  // differ, or a fault on purpose is due.
  void count(WatchedCall& call, const WatchedPlan& plan, Stream stream, bool orders);
  // The device was given the whole call. References that the call keeps become its own.
  void watch(const WatchedPtr& call, void* const* keep);

  // Callers of the following hold polling_.
  // Looks whether other ranks make other calls. True: this rank's have failed by that.
  bool look_for_difference();
  bool take_ended();
  bool look_after();
  // Callers of the following hold the engine's lock. A call in words; and one writes it down where
  // other ranks see it, and returns how theirs differ; empty: that is not known.
  std::string title(const std::string& operation, const WatchedCall& call) const;
  std::string left_trail(const WatchedCall& call, const WatchedPlan& plan);
  // Says of a rank that gave up this operation or an earlier one; empty: none.
  virtual GaveUp who_gave_up(const WatchedCall& call);
  CallPtr oldest() const override;
  void let_all_go(const std::string& kind, const std::string& why) override;
  void see_ended() override { take_ended(); }
  std::uint64_t first_lost(std::uint64_t next) const override;
  // The device has done a call, which is still the first one.
  virtual void see_end(const WatchedCall&) {}
  // Called when nothing has changed for a while. Looks for other failures; true if there is one.
  virtual bool look_further() { return false; }
  virtual bool look_at_failed() { return false; }
  // Lets streams go that hold failed calls.
  virtual void let_streams_go() = 0;

  // Flags; null where streams write none.
  std::uint32_t *begun_ = nullptr, *ended_ = nullptr;
  std::deque<WatchedPtr> calls_;  // under way, in their order
  std::size_t seen_begun_ = 0;    // the first so many of them have begun
};

}  // namespace commrt
