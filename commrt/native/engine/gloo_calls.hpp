// SPDX-License-Identifier: Apache-2.0
// Starts gloo's own collectives and asks for their end, through groups that Python made with torch.
//
// gloo matches the collectives of a group by their order. So every communicator has a group of its
// own, and gives it operations in the order in which they start. The engine queues them under its
// lock and without the GIL (ask); a thread with the GIL starts them (start_everything), as it sends
// the frames of a relay. gloo's own threads run the operation, whatever the program does.
// gloo does not announce its end: a waiting thread waits within gloo (wait), other threads ask
// (look_everything).
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct _object;  // Python's

namespace commrt {

class Plan;

// A plan's facts about its operation. The objects are own_object()'s (user_reduction.hpp).
struct GlooPlan {
  std::shared_ptr<class GlooGroup> group;
  std::shared_ptr<_object> method;  // of torch's group
  // Turns the addresses of what is sent and of the result into the method's arguments. It only
  // computes, and changes nothing, so it can be called again.
  std::shared_ptr<_object> arguments;
  // Set if ranks that pass different arguments would end their processes in gloo. They first
  // compare a digest of the arguments by this plan, an allreduce of two int64 by max.
  std::shared_ptr<const Plan> agreement;
  int64_t digest = 0;
  // The arguments for the last addresses, as programs use buffers again. Guarded by the GIL.
  mutable const void* last_in = nullptr;
  mutable const void* last_out = nullptr;
  mutable std::shared_ptr<_object> last;
};

// One operation.
struct GlooCall {
  enum class State : int { Asked, Running, Done, Failed };
  std::shared_ptr<const Plan> plan;
  const void* in = nullptr;
  void* out = nullptr;
  std::atomic<State> state{State::Asked};
  std::string error;  // release: `state`
  double failed_s = 0;  // when it was known; release: `state`
  std::shared_ptr<_object> work, arguments;  // guarded by the GIL

  State now() const { return state.load(std::memory_order_acquire); }
};

// The operations of one group of torch's, in their order.
class GlooGroup : public std::enable_shared_from_this<GlooGroup> {
 public:
  GlooGroup();
  ~GlooGroup();
  GlooGroup(const GlooGroup&) = delete;
  GlooGroup& operator=(const GlooGroup&) = delete;

  // Needs neither the GIL nor the engine's lock.
  void ask(std::shared_ptr<GlooCall> call);
  // True if gloo runs any operation of this process, as far as is known. A hint.
  static bool is_running();
  // True if an operation of this group has not ended, as far as is known.
  bool is_busy();

  // All of these need the GIL, and let others have it meanwhile.
  // Gives gloo what was asked for, of all groups.
  static void start_everything();
  // Finds out what has ended, of all groups.
  static void look_everything();
  // The longest that most waits take.
  static constexpr double kSlice_s = 0.05;
  // Waits in gloo until the operation has ended, at most for so long.
  static void wait(const std::shared_ptr<GlooCall>& call, double seconds);

 private:
  void start_asked();
  void start(const std::shared_ptr<GlooCall>& call);
  void end(GlooCall& call, GlooCall::State state, const std::string& error);
  void look();

  std::mutex mutex_;
  std::deque<std::shared_ptr<GlooCall>> asked_;
  std::vector<std::shared_ptr<GlooCall>> running_;
  bool is_starting_ = false;  // a thread gives gloo what there is, in order
};

}  // namespace commrt
