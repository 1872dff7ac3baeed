// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator, with deadlines; it can be aborted.
//
// NCCL's calls for a communicator that blocks put work into streams without a thread of NCCL's own
// for each. They may wait for peers: to join and to end, which threads of ours do, and as a call
// first connects, which `is_stuck` tells a thread that watches. NCCL's calls for one that does not
// block never wait.
//
// All methods are called without the GIL. They return an ncclResult_t, or one of NcclOutcome.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/nccl_api.hpp"

namespace commrt {

enum NcclOutcome : int {
  kNcclTimedOut = -1,     // still in progress at the deadline
  kNcclInterrupted = -2,  // another thread has begun to abort the communicator
  kNcclUnusable = -3,     // failed, aborted or closed before
  kNcclBusy = -4,         // another thread used the communicator until the deadline
  kNcclMissing = -5,      // the library has no such function
};

// The codes of commrt/vocabulary/operations.py.
enum class NcclColl : int {
  Allreduce = 0, Reduce = 1, Bcast = 2, Allgather = 3, ReduceScatter = 4, Alltoall = 5,
  Gather = 6, Scatter = 7, Allgatherv = 11, Alltoallv = 12, Gatherv = 13, Scatterv = 14,
  ReduceScatterv = 15
};

struct NcclMessage {
  bool is_send;
  void* at;
  size_t nbytes;
  int peer;
  int64_t round = 0;  // rounds run one after the other; both ends put a message into the same one
};

// It can share itself, because its owner may go in a thread that must not wait for Python
// (peer_exchange.hpp).
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  enum class State { Live, Failed, Aborted, Closed };
  using Clock = std::chrono::steady_clock;

  // The memory where NCCL writes the handle, and which it may read. It lives as long as NCCL may
  // use it: a job of the library that was given up may still hold these addresses.
  struct Slot {
    NcclHandle comm = nullptr;
    NcclConfig config;
    std::string net_name, comm_name;
  };

  NcclComm(std::shared_ptr<NcclApi> library, std::shared_ptr<Slot> where, bool is_owner)
      : api(std::move(library)), slot(std::move(where)), owned(is_owner) {}
  // Destroys nothing: that would communicate wherever Python drops an object.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Starts to join; `wait` finishes it. `enter(true)` makes the device the current one of a thread
  // that joins, `enter(false)` takes that back; without it, one that blocks joins in the caller's.
  int init(int num_ranks, const NcclUniqueId& id, int own_rank,
           const std::function<void(bool)>& enter = nullptr);
  int adopt();
  // Waits until NCCL has put everything into the streams that it was called for.
  int wait(double timeout_s);
  // One look: Success, InProgress, or the error.
  int poll();
  int split(int color, int key, const std::shared_ptr<Slot>& child, double timeout_s);

  int collective(NcclColl coll, const void* x, void* out, size_t count, int dtype, int op, int root,
                 NcclStream stream, double timeout_s);
  // The same with op = premul_sum by the scalar of `factor`, of the same type.
  int premul(NcclColl coll, const void* x, void* out, size_t count, int dtype, void* factor,
             int root, NcclStream stream, double timeout_s);
  // Blocks of different lengths lie one behind the other. Composed of messages, or of reductions,
  // by premul_sum where there is a factor.
  int counted(NcclColl coll, const char* x, char* out, const std::vector<int64_t>& send_counts,
              const std::vector<int64_t>& recv_counts, size_t itemsize, int dtype, int op,
              void* factor, int root, NcclStream stream, double timeout_s);
  int exchange(std::vector<NcclMessage> messages, NcclStream stream, double timeout_s);

  // For callers that compose several groups with work of their own (nccl_program.cpp). alone()
  // runs `section` alone, once the work before it is in the streams. group(), within a section,
  // runs a group of messages. lose() gives up what was begun and cannot be finished.
  using Section = std::function<int(Clock::time_point deadline)>;
  int alone(double timeout_s, const Section& section);
  int group(const std::vector<NcclMessage>& messages, NcclStream stream,
            Clock::time_point deadline);
  void lose() { give_up(); }

  bool blocks() const { return slot->config.blocking != 0; }
  // True if a thread has been within a call of NCCL for longer than it may.
  bool is_stuck() const;

  int finalize(double timeout_s);
  // Runs in a thread of its own, which is left alone after the time. The result is then
  // InProgress.
  int destroy(double timeout_s);
  int abort(double timeout_s);

  // Never asks about the handle: it may be gone, and NCCL keeps one text for all.
  std::string describe(int code) const { return api->describe(code); }

  // A thread calls this between two looks while it waits for NCCL, because the peers that NCCL
  // waits for may wait for this process. It returns true if the thread need not pause.
  std::function<bool()> meanwhile;

  const std::shared_ptr<NcclApi> api;
  const std::shared_ptr<Slot> slot;
  const bool owned;
  int size = 0, rank = 0, device = -1;
  std::atomic<State> state{State::Live};
  std::atomic<int> error{kNcclSuccess};  // the first failure
  // The shape of a group of messages: how many distances between ranks, and messages per pair.
  int most_distances = 48, most_messages = 1;
  // Reductions in one group: half of the 2048 operations that NCCL's documentation allows.
  int most_reductions = 1024;
  std::atomic<uint64_t> num_groups{0}, num_calls{0};

 private:
  using Deadline = Clock::time_point;
  static Deadline after(double timeout_s);
  // What a thread of ours does for a communicator that blocks.
  struct Job {
    enum State : int { Running, Done, Abandoned };
    std::atomic<int> state{Running};
    int code = kNcclSuccess;
  };
  int in_background(std::function<int()> function);
  int look(int* now_is);
  template <class Issue>
  int run(double timeout_s, Issue&& issue);
  template <class Issue>
  int run_work(double timeout_s, Issue&& issue);
  int settle(Deadline deadline);
  int take(int code, Deadline deadline);  // what to do with what a call returned
  int call(NcclColl coll, const void* x, void* out, size_t count, int dtype, int op, int root,
           NcclStream stream);
  template <class Issue>
  int with_factor(void* factor, int dtype, Issue&& issue);
  template <class Issue>
  int in_group(Deadline deadline, Issue&& issue);
  int send_group(const NcclMessage* messages, size_t count, NcclStream stream, Deadline deadline);
  int run_messages(std::vector<NcclMessage>& messages, NcclStream stream, Deadline deadline);
  int reduce_blocks(const char* x, char* out, const std::vector<int64_t>& counts, size_t itemsize,
                    int dtype, int op, NcclStream stream, Deadline deadline);
  int in_thread(int (*function)(NcclHandle), State then, double timeout_s);
  int fail(int code);
  void give_up();  // what was begun cannot be finished any more

  // Held while NCCL is called for this communicator: it must not be from two threads at once.
  // Waited for by trying: ThreadSanitizer of gcc 12 does not know the locks of timed mutexes.
  std::mutex mutex_;
  std::atomic<bool> aborting_{false};
  bool unsettled_ = false;  // guarded by mutex_, like the rest
  bool finalizing_ = false;
  std::shared_ptr<Job> job_;
  std::shared_ptr<Job> joining_;  // of init(), for ever
  std::atomic<Clock::rep> due_{0};  // the end of the call that a thread is in; 0: in none
  std::shared_ptr<Slot> child_;  // of a split that was left half done
};

}  // namespace commrt
