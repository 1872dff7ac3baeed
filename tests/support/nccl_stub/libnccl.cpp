// SPDX-License-Identifier: Apache-2.0
// NCCL's functions for communicators, pretended: every wrong use is written down.
#include <algorithm>
#include <chrono>

#include "stub.hpp"

using namespace stub;

namespace {

using Lock = std::unique_lock<std::mutex>;

thread_local int depth = 0;
thread_local std::vector<Group> open_groups;
thread_local int group_error = Success;
thread_local size_t calls_in_group = 0;

void log(const std::string& text) {
  if (world.settings["log"]) world.log.push_back("d" + std::to_string(device) + " " + text);
}

// What the test has asked this call to fail with.
int injected(const std::string& function) {
  const auto found = world.failures.find(function);
  if (found == world.failures.end()) return Success;
  if (found->second.after-- > 0) return Success;
  const int code = found->second.code;
  world.failures.erase(found);
  return code;
}

// A communicator is used by one thread at a time, only while it lives and is not in progress.
class Use {
 public:
  Use(Comm* comm, const char* function, bool needs_ready = true) : comm_(comm), lock_(world.mutex) {
    const auto me = std::this_thread::get_id();
    const std::string what = std::string(function) + " on a communicator ";
    if (comm == nullptr || !world.comms.count(comm)) {
      violation(what + "that does not exist");
      code = InvalidArgument;
      return;
    }
    if (comm->life == Life::Destroyed || comm->life == Life::Aborted) {
      violation(what + "after its end");
      code = InvalidArgument;
      return;
    }
    const std::thread::id none;
    // One that blocks may be aborted while a thread sticks in it.
    const bool may_stick = comm->blocking && what.rfind("ncclCommAbort", 0) == 0;
    if ((comm->inside != none && comm->inside != me && !may_stick) ||
        (comm->grouped != none && comm->grouped != me)) {
      violation(what + "used by another thread at the same time");
    }
    entered_ = comm->inside == none;
    if (entered_) comm->inside = me;
    if (world.settings["yields"]) {  // so that a second thread may come in
      const long yields = world.settings["yields"];
      lock_.unlock();
      for (long i = 0; i < yields; ++i) std::this_thread::yield();
      lock_.lock();
    }
    comm->visits++;
    world.changed.notify_all();
    // So that a second thread does come in.
    world.changed.wait_for(lock_, std::chrono::seconds(20),
                           [&] { return comm->visits >= world.settings["visits"]; });
    if (needs_ready && (comm->life == Life::Joining || comm->polls_left > 0 || comm->hangs ||
                        comm->async == InProgress || !comm->waiting.empty())) {
      violation(what + "before it was ready");
      if (comm->async == Success) comm->async = InvalidArgument;
      code = InvalidArgument;
    } else if (needs_ready && comm->async != Success) {
      code = comm->async;
    }
    if (code == Success) {
      code = injected(function);
      if (code != Success && !comm->blocking) comm->async = code;
    }
  }
  ~Use() {
    if (entered_ && world.comms.count(comm_)) comm_->inside = std::thread::id();
  }
  Lock& lock() { return lock_; }
  int code = Success;

 private:
  Comm* comm_;
  Lock lock_;
  bool entered_ = false;
};

void launch(Comm* comm) {
  for (Group& group : comm->waiting) {
    if (comm->gpu != nullptr) {
      launch_on_device(std::move(group));
      continue;
    }
    world.streams[{comm->device, group.stream}].push_back(std::move(group));
  }
  comm->waiting.clear();
  advance();
}

// What a call that began something returns: right away, or in progress for some polls.
int begin(Comm* comm, const char* what) {
  const std::string hang = std::string("hang_") + what;
  if (world.settings.count(hang) && world.settings[hang] == comm->rank + 1 &&
      world.settings["hang_after"]-- <= 0)
    comm->hangs = true;
  comm->polls_left = comm->blocking ? 0 : static_cast<int>(world.settings["in_progress"]);
  if (comm->polls_left == 0 && !comm->hangs) {
    launch(comm);
    return Success;
  }
  return InProgress;
}

bool check_config(const Config* config) {
  const std::string problem = problem_of(*config, world.version);
  if (!problem.empty()) violation(problem);
  return problem.empty();
}

void step_split(Comm* comm) {
  if (comm->clique->splits[comm->num_splits - 1].arrived < comm->size) return;
  if (comm->child != nullptr) {
    comm->child->life = Life::Ready;
    *comm->child_to = comm->child;
  }
  comm->child_to = nullptr;
}

int state_of(Comm* comm) {
  if (comm->async != Success) return comm->async;
  if (comm->hangs) return InProgress;
  if (comm->life == Life::Joining) {
    if (static_cast<int>(comm->clique->members.size()) < comm->clique->size) return InProgress;
    comm->life = Life::Ready;
  }
  if (comm->child_to != nullptr) {
    step_split(comm);
    if (comm->child_to != nullptr) return InProgress;
  }
  if (comm->life == Life::Finalizing) {
    if (comm->clique->finalized < comm->clique->size || comm->graphs > 0) return InProgress;
    comm->life = Life::Finalized;
  }
  if (comm->polls_left > 0) {
    if (--comm->polls_left > 0) return InProgress;
  }
  if (!comm->waiting.empty()) launch(comm);
  return Success;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int ncclGetVersion(int* version) {
  Lock lock(world.mutex);
  *version = world.version;
  return Success;
}

API const char* ncclGetErrorString(int code) { return text_of(code); }

API const char* ncclGetLastError(Comm*) { return "the stub was told to"; }

API int ncclGetUniqueId(UniqueId* id) {
  Lock lock(world.mutex);
  if (const int code = injected("ncclGetUniqueId")) return code;
  memset(id->internal, 0, sizeof(id->internal));
  const std::string text = "stub-" + std::to_string(world.next_id++);
  memcpy(id->internal, text.c_str(), text.size());
  world.cliques[text] = new Clique;
  return Success;
}

API int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, Config* config) {
  Lock lock(world.mutex);
  *made = nullptr;
  if (const int code = injected("ncclCommInitRankConfig")) return code;
  const auto found = world.cliques.find(id.internal);
  if (found == world.cliques.end()) return violation("an id that nobody made"), InvalidArgument;
  if (!check_config(config)) return InvalidArgument;
  Clique* clique = found->second;
  if (rank < 0 || rank >= size || (clique->size != 0 && clique->size != size) ||
      clique->members.count(rank)) {
    return violation("a wrong or doubled rank or size"), InvalidArgument;
  }
  auto* comm = new Comm;
  comm->clique = clique;
  comm->rank = rank;
  comm->size = clique->size = size;
  comm->device = device;
  comm->gpu = world.current_device != nullptr ? world.current_device() : nullptr;
  comm->blocking = config->blocking != 0;
  clique->members[rank] = comm;
  world.comms.insert(comm);
  world.counters["made"]++;
  *made = comm;
  log("CommInitRankConfig blocking=" + std::to_string(comm->blocking));
  world.changed.notify_all();
  if (comm->blocking) {
    world.changed.wait(lock, [&] {
      return static_cast<int>(clique->members.size()) == clique->size;
    });
    comm->life = Life::Ready;
    return Success;
  }
  begin(comm, "init");
  return InProgress;
}

API int ncclCommGetAsyncError(Comm* comm, int* code) {
  Launches launches;
  Use use(comm, "ncclCommGetAsyncError", false);
  if (use.code != Success) return use.code;
  world.counters["polls"]++;
  *code = state_of(comm);
  return Success;
}

API int ncclCommCount(Comm* comm, int* count) {
  Use use(comm, "ncclCommCount");
  *count = use.code == Success ? comm->size : 0;
  return use.code;
}

API int ncclCommUserRank(Comm* comm, int* rank) {
  Use use(comm, "ncclCommUserRank");
  *rank = use.code == Success ? comm->rank : 0;
  return use.code;
}

API int ncclCommCuDevice(Comm* comm, int* number) {
  Use use(comm, "ncclCommCuDevice");
  *number = use.code == Success ? comm->device : 0;
  return use.code;
}

API int ncclCommSplit(Comm* comm, int color, int key, Comm** made, Config* config) {
  Use use(comm, "ncclCommSplit");
  if (use.code != Success) return use.code;
  if (world.version < 21800) return violation("ncclCommSplit before 2.18"), InvalidUsage;
  if (config != nullptr && !check_config(config)) return InvalidArgument;
  *made = nullptr;
  Clique* clique = comm->clique;
  if (clique->splits.size() == comm->num_splits) clique->splits.emplace_back();
  Split& split = clique->splits[comm->num_splits++];
  split.colors[color].push_back({key, comm->rank});
  comm->child_to = made;
  comm->child = nullptr;
  if (color >= 0) {
    comm->child = new Comm;
    comm->child->device = comm->device;
    comm->child->gpu = comm->gpu;
    comm->child->blocking = comm->blocking;
    world.comms.insert(comm->child);
    world.counters["made"]++;
  }
  if (++split.arrived == clique->size) {  // the last one settles it for all
    for (auto& [one, ranks] : split.colors) {
      if (one < 0) continue;
      std::sort(ranks.begin(), ranks.end());
      auto* below = new Clique;
      below->size = static_cast<int>(ranks.size());
      for (int i = 0; i < below->size; ++i) {
        Comm* child = clique->members[ranks[static_cast<size_t>(i)].second]->child;
        child->clique = below;
        child->rank = i;
        child->size = below->size;
        below->members[i] = child;
      }
    }
  }
  begin(comm, "split");
  return InProgress;
}

API int ncclCommFinalize(Comm* comm) {
  Use use(comm, "ncclCommFinalize");
  if (use.code != Success) return use.code;
  if (comm->life != Life::Ready) return violation("finalized twice"), InvalidArgument;
  comm->life = Life::Finalizing;
  comm->clique->finalized++;
  log("CommFinalize");
  world.changed.notify_all();
  if (comm->blocking) {
    world.changed.wait(use.lock(), [&] {
      const bool have_come = comm->clique->finalized == comm->clique->size && comm->graphs == 0;
      return have_come || comm->life == Life::Aborted;
    });
    if (comm->life == Life::Aborted) return InternalError;
    comm->life = Life::Finalized;
    return Success;
  }
  begin(comm, "finalize");
  return InProgress;
}

namespace {

int end_of(Comm* comm, const char* function, Life then) {
  {
    Lock lock(world.mutex);
    const std::string hang = std::string("hang_") + function;
    if (world.settings[hang]) world.changed.wait(lock, [] { return world.released; });
  }
  const bool aborts = then == Life::Aborted;
  Use use(comm, aborts ? "ncclCommAbort" : "ncclCommDestroy", !aborts);
  if (use.code != Success && !aborts) return use.code;
  if (comm == nullptr || !world.comms.count(comm)) return InvalidArgument;
  if (comm->life == Life::Destroyed || comm->life == Life::Aborted) return InvalidArgument;
  comm->life = then;
  world.counters[aborts ? "aborted" : "destroyed"]++;
  log(aborts ? "CommAbort" : "CommDestroy");
  if (aborts) {
    comm->waiting.clear();
    for (auto& [key, queue] : world.streams) {
      for (auto at = queue.begin(); at != queue.end();) {
        if (at->comm != comm) {
          ++at;
          continue;
        }
        if (at->kernel != nullptr) at->kernel->done.store(true, std::memory_order_release);
        at = queue.erase(at);
      }
    }
  }
  world.changed.notify_all();
  return use.code;
}

}  // namespace

API int ncclCommDestroy(Comm* comm) { return end_of(comm, "destroy", Life::Destroyed); }
API int ncclCommAbort(Comm* comm) { return end_of(comm, "abort", Life::Aborted); }

API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, Comm* comm) {
  Use use(comm, "ncclRedOpCreatePreMulSum");
  if (use.code != Success) return use.code;
  if (residence != 1) return violation("a factor that does not lie on the host"), InvalidArgument;
  double factor = 0;
  if (!read_factor(dtype, scalar, &factor)) {
    return violation("NCCL has no factors of this type"), InvalidArgument;
  }
  *op = comm->next_redop++;
  comm->redops[*op] = {dtype, factor, true};
  world.counters["redops"]++;
  return Success;
}

API int ncclRedOpDestroy(int op, Comm* comm) {
  Use use(comm, "ncclRedOpDestroy");
  if (use.code != Success) return use.code;
  const auto found = comm->redops.find(op);
  if (found == comm->redops.end() || !found->second.alive) {
    return violation("a reduction destroyed twice"), InvalidArgument;
  }
  found->second.alive = false;
  world.counters["redops"]--;
  return Success;
}

namespace {

int finish_group(std::vector<Group> groups, int error) {
  int result = error;
  for (Group& group : groups) {
    Comm* comm = group.comm;
    comm->grouped = std::thread::id();
    if (error != Success) continue;
    comm->waiting.push_back(std::move(group));
    const int code = begin(comm, "group");
    if (code != Success) result = code;
  }
  return result;
}

// Every operation comes through here.
int enqueue(Comm* comm, Op op, void* stream) {
  const std::string function = std::string("nccl") + name_of(op.kind);
  OnDevice on_device;
  Launches launches;
  Use use(comm, function.c_str());
  if (use.code == Success) on_device.enter(comm, function.c_str());
  calls_in_group++;
  int code = use.code;
  if (code == Success && comm->blocking && world.settings["sticks"] == comm->rank + 1) {
    // As one that connects to a peer that never comes.
    world.changed.wait(use.lock(), [&] { return comm->life == Life::Aborted; });
    return InternalError;
  }
  auto wrong = [&](const std::string& text) {
    violation(function + ": " + text);
    code = InvalidArgument;
  };
  if (code == Success) {
    const std::string problem = problem_of(op, comm->rank, comm->size, world.version);
    if (!problem.empty()) wrong(problem);
    if (op.redop >= 5) {
      const auto found = comm->redops.find(op.redop);
      if (found == comm->redops.end() || !found->second.alive || found->second.dtype != op.dtype) {
        wrong("a reduction that does not belong here");
      } else {
        op.scaled = true;
        op.factor = found->second.factor;
      }
    }
    if (!is_message(op.kind)) op.seq = comm->seq++;
    log(std::string(name_of(op.kind)) + " count=" + std::to_string(op.count) + " type=" +
        std::to_string(op.dtype) + " op=" + std::to_string(op.redop) + " peer=" +
        std::to_string(op.peer) + " stream=" + std::to_string(reinterpret_cast<uintptr_t>(stream)));
  }
  if (code != Success) {
    if (depth > 0) group_error = code;
    return code;
  }
  world.counters["calls"]++;
  Group* group = nullptr;
  for (Group& one : open_groups) {
    if (one.comm == comm) group = &one;
  }
  if (group == nullptr) {
    open_groups.push_back({comm, stream, {}});
    group = &open_groups.back();
  } else if (group->stream != stream) {
    violation(function + ": two streams in one group");
  }
  group->ops.push_back(op);
  if (depth > 0) {
    comm->grouped = std::this_thread::get_id();
    return Success;
  }
  std::vector<Group> groups;
  groups.swap(open_groups);
  return finish_group(std::move(groups), Success);
}

}  // namespace

// Whether the calling thread has a group open.
API int stub_depth() { return depth; }

API int ncclGroupStart() {
  Lock lock(world.mutex);
  if (const int code = injected("ncclGroupStart")) return code;
  if (depth++ > 0) violation("a group within a group");
  calls_in_group = 0;
  log("GroupStart");
  return Success;
}

API int ncclGroupEnd() {
  OnDevice on_device;
  Launches launches;
  Lock lock(world.mutex);
  if (depth == 0) return violation("a group ended that was not begun"), InvalidUsage;
  if (--depth > 0) return Success;
  log("GroupEnd");
  int error = group_error;
  group_error = Success;
  if (const int code = injected("ncclGroupEnd")) error = error != Success ? error : code;
  const long limit = world.settings["group_limit"];
  if (limit > 0 && static_cast<long>(calls_in_group) > limit) {
    violation("a group of " + std::to_string(calls_in_group) + " calls");
  }
  if (calls_in_group == 0) violation("an empty group");
  world.counters["groups"]++;
  std::vector<Group> groups;
  groups.swap(open_groups);
  for (const Group& group : groups) on_device.enter(group.comm, "ncclGroupEnd");
  for (const Group& group : groups) {  // to itself only within one group
    int own = 0;
    for (const Op& op : group.ops) {
      if (op.peer != group.comm->rank) continue;
      own += op.kind == Kind::Send ? 1 : op.kind == Kind::Recv ? -1 : 0;
    }
    if (own != 0) {
      violation("a message to itself without its other end in the same group");
      error = InvalidUsage;
    }
  }
  for (const Group& group : groups) {
    if (error != Success && !group.comm->blocking) group.comm->async = error;
  }
  return finish_group(std::move(groups), error);
}

API int ncclAllReduce(const void* x, void* out, size_t count, int dtype, int op, Comm* comm,
                      void* stream) {
  return enqueue(comm, {Kind::AllReduce, x, out, count, dtype, op, 0}, stream);
}
API int ncclReduce(const void* x, void* out, size_t count, int dtype, int op, int root, Comm* comm,
                   void* stream) {
  return enqueue(comm, {Kind::Reduce, x, out, count, dtype, op, root}, stream);
}
API int ncclBroadcast(const void* x, void* out, size_t count, int dtype, int root, Comm* comm,
                      void* stream) {
  return enqueue(comm, {Kind::Broadcast, x, out, count, dtype, 0, root}, stream);
}
API int ncclAllGather(const void* x, void* out, size_t count, int dtype, Comm* comm, void* stream) {
  return enqueue(comm, {Kind::AllGather, x, out, count, dtype, 0, 0}, stream);
}
API int ncclReduceScatter(const void* x, void* out, size_t count, int dtype, int op, Comm* comm,
                          void* stream) {
  return enqueue(comm, {Kind::ReduceScatter, x, out, count, dtype, op, 0}, stream);
}
API int ncclSend(const void* x, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return enqueue(comm, {Kind::Send, x, nullptr, count, dtype, 0, peer}, stream);
}
API int ncclRecv(void* out, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return enqueue(comm, {Kind::Recv, nullptr, out, count, dtype, 0, peer}, stream);
}
#ifndef STUB_WITHOUT_ALLTOALL
API int ncclAlltoAll(const void* x, void* out, size_t count, int dtype, Comm* comm, void* stream) {
  return enqueue(comm, {Kind::AlltoAll, x, out, count, dtype, 0, 0}, stream);
}
API int ncclGather(const void* x, void* out, size_t count, int dtype, int root, Comm* comm,
                   void* stream) {
  return enqueue(comm, {Kind::Gather, x, out, count, dtype, 0, root}, stream);
}
API int ncclScatter(const void* x, void* out, size_t count, int dtype, int root, Comm* comm,
                    void* stream) {
  return enqueue(comm, {Kind::Scatter, x, out, count, dtype, 0, root}, stream);
}
#endif
