// SPDX-License-Identifier: Apache-2.0
// Drives every communicator of a process: progress, waiting, the optional thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/bell.hpp"
#include "engine/comm.hpp"

namespace commrt {

// Lets the core's other half run while a loop looks at memory.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// The ways in which a wait ends.
enum class WaitResult { Done, TimedOut, Interrupted };

double now_s();
constexpr double kNever = std::numeric_limits<double>::infinity();

class DeviceWork;
struct Device;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine();
  ~Engine();
  void add(Comm* comm);
  void remove(Comm* comm);
  // This process takes no part in later operations of any communicator.
  void leave();
  // Ends communicators where others wait for this rank's stand-ins (stand_ins.hpp).
  void end_stand_ins();
  // True if a communicator with this address exists, so that progress may be made on it.
  bool has(const Comm* comm);

  // One pass over all operations in flight, a slice of each; true if anything advanced.
  // Takes the lock.
  bool step();
  // The same for callers that hold the lock. One that waits needs no slices.
  bool step_locked(uint64_t limit);

  // Progress thread: runs while operations are in flight, parks when there are none.
  void start_thread();
  void stop_thread();
  bool has_thread() const { return has_thread_.load(std::memory_order_acquire); }
  // True while the thread sleeps until there is something to do.
  bool is_parked() const { return is_parked_.load(std::memory_order_acquire); }
  // Instead of that thread, where a rank has no core for it: the thread that receives from other
  // nodes goes on with operations as their messages come (TcpPoller).
  void go_on_by_arrivals() { by_arrivals_.store(true, std::memory_order_release); }
  // True if operations go on while the program does something else.
  bool goes_on_alone() const { return has_thread() || goes_on_by_arrivals(); }
  struct Pass {
    bool has_advanced = false;
    bool is_busy = false;  // operations are still in flight
  };
  // Goes on with them on all engines of this process that do so.
  static Pass go_on_everywhere();
  // Called after something was started, or left in flight, that its caller does not wait for.
  // `has_more`: it could go on now.
  void wake(bool has_more = false);
  // True if one slice may have left something of an operation that could go on.
  static bool may_have_more(const Op& op);
  // Calls `wake` as a scope ends that has looked for messages, if operations are in flight.
  class HandsOver {
   public:
    explicit HandsOver(Engine& engine) : engine_(engine) {}
    ~HandsOver() { engine_.hand_over_rest(); }
    HandsOver(const HandsOver&) = delete;
    HandsOver& operator=(const HandsOver&) = delete;

   private:
    Engine& engine_;
  };
  bool idle();

  // Tells the ranks of the node, on each communicator, what this one waits for; null: nothing.
  void tell_wait_locked(const ToldWait* wait);

  // -- threads that sleep (backoff.hpp) --
  // Adds the bells of a world's ranks on this node. By the first ones threads sleep: worlds of the
  // same ranks, or of some of them, use them, too.
  void add_bells(const std::shared_ptr<Bells>& bells);
  // Those in use; by the first ones threads sleep.
  std::vector<std::shared_ptr<Bells>> all_bells();
  std::shared_ptr<Bells> bell();
  // Wakes the threads that sleep here: something has changed for them.
  void ring() {
    Bells& bells = *ringing_.load(std::memory_order_acquire);
    if (bells.is_asleep(bells.own)) bells.ring(bells.own);
  }
  // The same for all engines of this process, by a thread that knows none of them.
  static void ring_all();
  // Counts the threads for which ring_all() is worth while.
  static void lie_down();
  static void rise();
  // Null unless this process has exactly one engine.
  static Engine* only_one();
  // The next pass looks at what passes look at now and then only.
  void look_closely() { closely_.store(true, std::memory_order_relaxed); }
  // The time after which a thread that sleeps has to look, because nobody may ring.
  double longest_sleep_s();

  // The number of looks of a waiting thread between two yields: the least of what is in flight, at
  // most `own`. For callers that hold the lock.
  int spins_locked(int own) const;
  // True if the caller need not make progress: gloo runs all that is in flight, or the thread
  // does.
  bool only_gloo_locked() const;

  // Ended operations keep their buffers until someone who may drop them calls this.
  void discard(std::shared_ptr<Op>&& op) {
    ended_.push_back(std::move(op));
    has_ended_.store(true, std::memory_order_relaxed);
  }
  std::vector<std::shared_ptr<Op>> take_ended();
  // References that wait for someone with the GIL, of work on device memory.
  void discard_objects(void* (&objects)[2]);
  std::vector<void*> take_objects();

  // Work on device memory (device_work.hpp). Its progress is made without the lock.
  void add_device_work(std::shared_ptr<DeviceWork> work);
  void remove_device_work(const DeviceWork* work);
  bool step_device_work(bool advanced);
  bool has_device_work() const { return num_device_work_.load(std::memory_order_acquire) != 0; }
  bool is_device_busy();
  // Starts a thread that asks now and then whether the devices still work. It needs a thread of
  // its own: the driver may hold the question back until a call ends, which only progress lets go.
  void start_watch();
  // Fails what is under way there and waits for this process, so that no stream goes on waiting.
  void release_streams(const std::string& why);

  // The MPI library is given memory of a device. From here on, that device is current for each
  // thread that makes progress: any of MPI's calls may go on with what it was given. False if MPI
  // has another device. As many calls of leave_mpi() end it.
  bool share_with_mpi(Device* device, std::shared_ptr<void> keeps);
  void leave_mpi();
  // Guarded by the lock; null: none.
  Device* mpi_device() const { return mpi_device_; }

  // A hint, without the lock.
  bool has_ended() const { return has_ended_.load(std::memory_order_relaxed); }

  // Values that want Python (user_reduction.hpp). A hint, without the lock.
  bool wants_python() const { return wants_python_.load(std::memory_order_acquire); }
  void want_python() { wants_python_.store(true, std::memory_order_release); }
  // An operation with such a value, marked as Running; null if there is none.
  std::shared_ptr<Op> take_wanted_locked();

  // When to look at open buckets that have a time limit (fusion.cpp). Written with the GIL. A
  // thread that waits without the GIL asks is_timed_due().
  std::atomic<double> timed_due_s{kNever};
  bool is_timed_due() const {
    const double due = timed_due_s.load(std::memory_order_relaxed);
    return due != kNever && now_s() >= due;
  }

  std::mutex mutex;
  // Set in the child after fork: the shared memory and MPI belong to the parent.
  static std::atomic<bool> forked;

 private:
  bool goes_on_by_arrivals() const;
  void hand_over_rest();
  bool busy_locked() const;
  void thread_main();
  void watch_main();

  std::vector<Comm*> comms_;
  std::vector<std::shared_ptr<Op>> ended_;
  std::atomic<bool> has_ended_{false};
  std::mutex device_work_mutex_;  // the innermost one
  std::vector<std::shared_ptr<DeviceWork>> device_work_;
  std::atomic<int> num_device_work_{0};
  std::vector<void*> objects_;
  std::atomic<bool> closely_{false};
  std::mutex bells_mutex_;
  std::vector<std::shared_ptr<Bells>> kept_bells_;  // that threads may sleep by; never fewer
  std::vector<std::weak_ptr<Bells>> other_bells_;
  std::atomic<Bells*> ringing_{nullptr};  // the last one of kept_bells_
  Device* mpi_device_ = nullptr;  // this and the next two are guarded by `mutex`
  std::shared_ptr<void> mpi_device_keeps_;
  int mpi_device_users_ = 0;
  std::atomic<bool> wants_python_{false};
  std::atomic<bool> by_arrivals_{false};
  std::thread thread_;
  std::atomic<bool> has_thread_{false};
  // On the heap: in a forked process it is left alone, as the thread that waits on it does
  // not exist there.
  std::unique_ptr<std::condition_variable> parked_ = std::make_unique<std::condition_variable>();
  std::thread watch_;
  // The watch thread sleeps on it. It is on the heap, as parked_ is.
  std::unique_ptr<std::condition_variable> watching_ = std::make_unique<std::condition_variable>();
  std::mutex watch_mutex_;
  bool watch_stopping_ = false;
  bool stopping_ = false;
  bool has_advanced_ = false;  // the last pass; another one may, too
  std::atomic<bool> is_parked_{false};
};

}  // namespace commrt
