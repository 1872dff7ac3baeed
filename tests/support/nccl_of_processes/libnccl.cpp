// SPDX-License-Identifier: Apache-2.0
// NCCL's functions for communicators of ranks that are processes, without a GPU's hardware.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <system_error>
#include <utility>

#include "library.hpp"

using namespace stub;

namespace {

using Lock = std::unique_lock<std::mutex>;
using Groups = std::vector<Group*>;

thread_local int depth = 0;
thread_local Groups open_groups;
thread_local int group_error = Success;

int wrong(const std::string& text, int code = InvalidArgument) {
  world.last_error = text;
  complain(text);
  return code;
}

// What a test has asked this call to fail with.
int injected(const std::string& function) {
  const auto found = world.failures.find(function);
  if (found == world.failures.end() || found->second.after-- > 0) return Success;
  const int code = found->second.code;
  world.failures.erase(found);
  world.last_error = "a test asked " + function + " to fail";
  return code;
}

// A communicator is used by one thread at a time, only while it lives and is not in progress.
class Use {
 public:
  enum class For { Call, Look, Abort };  // an abort may come beside a call that hangs

  Use(Comm* comm, const char* function, For what_for = For::Call)
      : comm_(comm), lock_(world.mutex) {
    const auto me = std::this_thread::get_id();
    const std::thread::id none;
    const std::string what = std::string(function) + " on a communicator ";
    if (comm == nullptr || world.comms.count(comm) == 0) {
      code = wrong(what + "that does not exist");
      comm_ = nullptr;
      return;
    }
    if (comm->life == Life::Destroyed || comm->life == Life::Aborted) {
      code = wrong(what + "after its end");
      return;
    }
    if (what_for == For::Abort) return;
    if ((comm->inside != none && comm->inside != me) ||
        (comm->grouped != none && comm->grouped != me)) {
      wrong(what + "used by another thread at the same time");
    }
    entered_ = comm->inside == none;
    if (entered_) comm->inside = me;
    if (what_for == For::Look) return;
    if (comm->async != Success) {
      code = comm->async;
    } else if (comm->life == Life::Joining || comm->polls_left > 0 || !comm->waiting.empty()) {
      code = comm->async = wrong(what + "before it was ready");
    } else if ((code = injected(function)) != Success && !comm->blocking) {
      comm->async = code;
    }
  }
  ~Use() {
    if (entered_) comm_->inside = std::thread::id();
  }
  Lock& lock() { return lock_; }
  int code = Success;

 private:
  Comm* comm_;
  Lock lock_;
  bool entered_ = false;
};

// No two threads may call NCCL for one device at a time; there is one device in a process.
class OnDevice {
 public:
  explicit OnDevice(const char* function) {
    const Lock lock(world.mutex);
    const std::thread::id none, me = std::this_thread::get_id();
    if (world.calling != none && world.calling != me) {
      wrong(std::string(function) + " while another thread calls NCCL for the same device");
    }
    entered_ = world.calling == none;
    if (entered_) world.calling = me;
  }
  ~OnDevice() {
    const Lock lock(world.mutex);
    if (entered_) world.calling = std::thread::id();
  }

 private:
  bool entered_ = false;
};

// --- what is under way ---

void ready_to_launch(Comm* comm, Groups* ready) {
  ready->insert(ready->end(), comm->waiting.begin(), comm->waiting.end());
  comm->waiting.clear();
}

// What a call that began something returns: right away, or in progress for some polls.
int begin(Comm* comm, Groups* ready) {
  comm->polls_left = comm->blocking ? 0 : static_cast<int>(world.settings["polls"]);
  if (comm->polls_left > 0) return InProgress;
  ready_to_launch(comm, ready);
  return Success;
}

// As the real one, once for the process.
const std::string& host() {
  static const std::string name = [] {
    const char* said = getenv("NCCL_HOSTID");
    char own[64] = "";
    gethostname(own, sizeof own - 1);
    return std::string(said != nullptr ? said : own).substr(0, sizeof Seat::host - 1);
  }();
  return name;
}

// Ranks that share a GPU are refused, but for the versions that may be told to take them.
int check_cards(const Comm& comm) {
  const char* said = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (world.version >= 23000 && said != nullptr && strcmp(said, "1") == 0) return Success;
  const Seat& own = comm.place->seat(comm.rank);
  for (int other = 0; other < comm.size; ++other) {
    const Seat& seat = comm.place->seat(other);
    if (other == comm.rank || seat.bus != own.bus || strcmp(seat.host, own.host) != 0) continue;
    std::ostringstream text;
    text << "Duplicate GPU detected : rank " << comm.rank << " and rank " << other
         << " both on CUDA device " << std::hex << own.bus;
    world.last_error = text.str();
    return InvalidUsage;
  }
  return Success;
}

// Takes a seat at the place of that name; the communicator is not ready before all have.
int join(Comm* comm, const std::string& name) {
  try {
    comm->place = Place::open(name, comm->size);
  } catch (const std::system_error& error) {
    world.last_error = error.what();
    return SystemError;
  }
  if (comm->place == nullptr) return wrong("ranks differ in the size of a communicator");
  Seat& seat = comm->place->seat(comm->rank);
  if (seat.is_taken.exchange(1) != 0) {
    return wrong("rank " + std::to_string(comm->rank) + " joined twice");
  }
  memcpy(seat.host, host().c_str(), host().size() + 1);
  seat.bus = comm->bus;
  comm->place->entrance().joined.fetch_add(1);
  comm->place->ring_all();
  world.counters["made"]++;
  return Success;
}

bool has_joined(Comm* comm) {
  if (!comm->place->is_complete()) return false;
  comm->place->unlink();
  return true;
}

// Makes the child once all have said their colors.
bool child_is_made(Comm* comm) {
  const auto& own = comm->split;
  const auto said = [&](int rank) -> Seat::Split& {
    return comm->place->seat(rank).splits[own.number % 2];
  };
  for (int rank = 0; rank < comm->size; ++rank) {
    if (said(rank).number.load() != own.number) return false;
  }
  if (own.color < 0) return true;
  if (comm->child == nullptr) {
    std::vector<std::pair<int, int>> members;  // key and rank
    for (int rank = 0; rank < comm->size; ++rank) {
      if (said(rank).color.load() == own.color) members.emplace_back(said(rank).key.load(), rank);
    }
    std::sort(members.begin(), members.end());
    auto* const child = comm->child = new Comm;
    child->size = static_cast<int>(members.size());
    child->rank = static_cast<int>(
        std::find(members.begin(), members.end(), std::pair(own.key, comm->rank)) - members.begin());
    child->ordinal = comm->ordinal;
    child->context = comm->context;
    child->bus = comm->bus;
    child->blocking = comm->blocking;
    world.comms.insert(child);
    comm->async = join(child, comm->place->name() + "-" + std::to_string(own.number) + "-" +
                                  std::to_string(own.color));
    if (comm->async != Success) return false;
  }
  if (!has_joined(comm->child)) return false;
  comm->child->life = Life::Ready;
  return true;
}

bool is_finalized(Comm* comm) {
  if (!comm->has_told_end) {
    if (comm->outstanding() != 0) return false;
    comm->has_told_end = true;
    comm->place->entrance().finalized.fetch_add(1);
    comm->place->ring_all();
  }
  return comm->place->entrance().finalized.load() == comm->size;
}

int state_of(Comm* comm, Groups* ready) {
  if (comm->async != Success) return comm->async;
  if (comm->life == Life::Joining) {
    if (!has_joined(comm)) return InProgress;
    comm->life = Life::Ready;
    comm->async = check_cards(*comm);
    if (comm->async != Success) return comm->async;
  }
  if (comm->child_to != nullptr) {
    if (!child_is_made(comm)) return comm->async != Success ? comm->async : InProgress;
    *comm->child_to = comm->child;
    comm->child_to = nullptr;
  }
  if (comm->life == Life::Finalizing) {
    if (!is_finalized(comm)) return InProgress;
    comm->life = Life::Finalized;
  }
  if (comm->polls_left > 0 && --comm->polls_left > 0) return InProgress;
  ready_to_launch(comm, ready);
  return Success;
}

// What a call returns that the communicator begins something by; one that blocks waits for it.
int begun(Comm* comm, Lock& lock) {
  if (!comm->blocking) return InProgress;
  const std::shared_ptr<Place> place = comm->place;
  while (true) {
    const uint32_t seen = place->seat(comm->rank).bell.load();
    Groups none;
    const int code = state_of(comm, &none);
    if (code != InProgress) return code;
    lock.unlock();
    place->wait(comm->rank, seen);
    lock.lock();
    if (comm->life == Life::Aborted) return InternalError;
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int ncclGetVersion(int* version) {
  *version = world.version;
  return Success;
}

API const char* ncclGetErrorString(int code) { return text_of(code); }

API const char* ncclGetLastError(Comm*) {
  thread_local std::string said;
  const Lock lock(world.mutex);
  said = world.last_error;
  return said.c_str();
}

API int ncclGetUniqueId(UniqueId* id) {
  const Lock lock(world.mutex);
  if (const int code = injected("ncclGetUniqueId")) return code;
  std::random_device random;
  std::ostringstream name;
  name << "nccl-" << getpid() << std::hex << "-" << random() << random();
  memset(id->internal, 0, sizeof id->internal);
  memcpy(id->internal, name.str().c_str(), name.str().size());
  return Success;
}

API int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, Config* config) {
  Lock lock(world.mutex);
  *made = nullptr;
  if (const int code = injected("ncclCommInitRankConfig")) return code;
  const std::string problem = problem_of(*config, world.version);
  if (!problem.empty()) return wrong(problem);
  if (rank < 0 || rank >= size) return wrong("rank " + std::to_string(rank));
  Card card;
  if (const int code = current_card(&card)) return code;
  auto* const comm = new Comm;
  comm->rank = rank;
  comm->size = size;
  comm->ordinal = card.ordinal;
  comm->context = card.context;
  comm->bus = card.bus;
  comm->blocking = config->blocking != 0;
  if (const int code = join(comm, id.internal)) return code;
  world.comms.insert(comm);
  *made = comm;
  return begun(comm, lock);
}

API int ncclCommGetAsyncError(Comm* comm, int* code) {
  Groups ready;
  {
    Use use(comm, "ncclCommGetAsyncError", Use::For::Look);
    if (use.code != Success) return use.code;
    *code = state_of(comm, &ready);
  }
  if (const int failed = launch(ready)) *code = failed;
  return Success;
}

API int ncclCommCount(Comm* comm, int* count) {
  const Use use(comm, "ncclCommCount");
  *count = use.code == Success ? comm->size : 0;
  return use.code;
}

API int ncclCommUserRank(Comm* comm, int* rank) {
  const Use use(comm, "ncclCommUserRank");
  *rank = use.code == Success ? comm->rank : 0;
  return use.code;
}

API int ncclCommCuDevice(Comm* comm, int* number) {
  const Use use(comm, "ncclCommCuDevice");
  *number = use.code == Success ? comm->ordinal : 0;
  return use.code;
}

API int ncclCommSplit(Comm* comm, int color, int key, Comm** made, Config* config) {
  Use use(comm, "ncclCommSplit");
  if (use.code != Success) return use.code;
  const std::string problem = config == nullptr ? "" : problem_of(*config, world.version);
  if (!problem.empty()) return wrong(problem);
  *made = nullptr;
  const uint64_t number = ++comm->split.number;
  comm->split.color = color;
  comm->split.key = key;
  comm->child = nullptr;
  comm->child_to = made;
  Seat::Split& said = comm->place->seat(comm->rank).splits[number % 2];
  said.color.store(color);
  said.key.store(key);
  said.number.store(number);
  comm->place->ring_all();
  return begun(comm, use.lock());
}

API int ncclCommFinalize(Comm* comm) {
  Use use(comm, "ncclCommFinalize");
  if (use.code != Success) return use.code;
  if (comm->life != Life::Ready) return wrong("a communicator finalized twice");
  comm->life = Life::Finalizing;
  return begun(comm, use.lock());
}

namespace {

int end_of(Comm* comm, Life then) {
  const bool aborts = then == Life::Aborted;
  Comm* child = nullptr;
  {
    Use use(comm, aborts ? "ncclCommAbort" : "ncclCommDestroy",
            aborts ? Use::For::Abort : Use::For::Call);
    if (use.code != Success) return use.code;
    comm->life = then;
    world.counters[aborts ? "aborted" : "destroyed"]++;
    for (Group* group : comm->waiting) delete group;
    comm->waiting.clear();
    if (comm->child_to != nullptr) child = comm->child;
    comm->child_to = nullptr;
  }
  {
    Lock own(comm->mutex);
    const auto is_idle = [&] { return comm->next_ticket == comm->turn && !comm->is_running; };
    if (!aborts) comm->changed.wait(own, is_idle);
    comm->has_ended.store(true);
    comm->changed.notify_all();
    comm->place->ring(comm->rank);
    comm->changed.wait(own, [&] { return !comm->is_running; });
    comm->place->unlink();  // of one that not all have joined
    comm->place.reset();
  }
  return child == nullptr ? Success : end_of(child, then);
}

}  // namespace

API int ncclCommDestroy(Comm* comm) { return end_of(comm, Life::Destroyed); }
API int ncclCommAbort(Comm* comm) { return end_of(comm, Life::Aborted); }

API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, Comm* comm) {
  const Use use(comm, "ncclRedOpCreatePreMulSum");
  if (use.code != Success) return use.code;
  if (residence != 1) return wrong("a factor that does not lie on the host");
  double factor = 0;
  if (!read_factor(dtype, scalar, &factor)) return wrong("NCCL has no factors of this type");
  *op = comm->next_reduction++;
  comm->reductions[*op] = {dtype, factor, true};
  return Success;
}

API int ncclRedOpDestroy(int op, Comm* comm) {
  const Use use(comm, "ncclRedOpDestroy");
  if (use.code != Success) return use.code;
  const auto found = comm->reductions.find(op);
  if (found == comm->reductions.end() || !found->second.alive) {
    return wrong("a reduction destroyed twice");
  }
  found->second.alive = false;
  return Success;
}

namespace {

// Holds the lock of all.
int finish(const Groups& groups, int error, Groups* ready) {
  int result = error;
  for (Group* group : groups) {
    Comm* const comm = group->comm;
    comm->grouped = std::thread::id();
    if (error != Success) {
      if (!comm->blocking) comm->async = error;
      delete group;
      continue;
    }
    comm->waiting.push_back(group);
    const int code = begin(comm, ready);
    if (code != Success) result = code;
  }
  return result;
}

Group* group_of(Comm* comm, void* stream) {
  for (Group* group : open_groups) {
    if (group->comm == comm) return group;
  }
  open_groups.push_back(new Group{comm, stream, {}});
  return open_groups.back();
}

// The communicator's own reduction, by its number.
std::string find_reduction(Comm* comm, Op* op) {
  constexpr int kFirstOwn = 5;
  if (op->redop < kFirstOwn) return "";
  const auto found = comm->reductions.find(op->redop);
  if (found == comm->reductions.end() || !found->second.alive || found->second.dtype != op->dtype) {
    return "a reduction that does not belong here";
  }
  op->scaled = true;
  op->factor = found->second.factor;
  return "";
}

// Every operation comes through here.
int enqueue(Comm* comm, Op op, void* stream) {
  const std::string function = std::string("nccl") + name_of(op.kind);
  const OnDevice on_device(function.c_str());
  Groups ready;
  int code = Success;
  {
    const Use use(comm, function.c_str());
    code = use.code;
    if (code == Success) {
      std::string problem = problem_of(op, comm->rank, comm->size, world.version);
      if (problem.empty()) problem = find_reduction(comm, &op);
      if (!problem.empty()) code = wrong(function + ": " + problem);
    }
    if (code != Success) {
      if (depth > 0) group_error = code;
      return code;
    }
    world.counters["calls"]++;
    Group* const group = group_of(comm, stream);
    if (group->stream != stream) wrong(function + ": two streams in one group");
    group->ops.push_back(op);
    if (depth > 0) {
      comm->grouped = std::this_thread::get_id();
      return Success;
    }
    code = finish(std::exchange(open_groups, {}), Success, &ready);
  }
  const int failed = launch(ready);
  return failed != Success ? failed : code;
}

}  // namespace

API int ncclGroupStart() {
  const Lock lock(world.mutex);
  if (const int code = injected("ncclGroupStart")) return code;
  if (depth++ > 0) wrong("a group within a group");
  return Success;
}

API int ncclGroupEnd() {
  const OnDevice on_device("ncclGroupEnd");
  Groups ready;
  int code = Success;
  {
    const Lock lock(world.mutex);
    if (depth == 0) return wrong("a group ended that was not begun", InvalidUsage);
    if (--depth > 0) return Success;
    code = std::exchange(group_error, Success);
    if (const int failed = injected("ncclGroupEnd")) code = code != Success ? code : failed;
    world.counters["groups"]++;
    for (const Group* group : open_groups) {  // to itself only within one group
      int own = 0;
      for (const Op& op : group->ops) {
        if (op.peer == group->comm->rank) own += op.kind == Kind::Send ? 1 : op.kind == Kind::Recv ? -1 : 0;
      }
      if (own == 0) continue;
      code = wrong("a message to itself without its other end in the same group", InvalidUsage);
    }
    code = finish(std::exchange(open_groups, {}), code, &ready);
  }
  const int failed = launch(ready);
  return failed != Success ? failed : code;
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
