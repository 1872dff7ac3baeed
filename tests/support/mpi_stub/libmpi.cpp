// SPDX-License-Identifier: Apache-2.0
// A pretended MPI library for ranks that are threads: its own collectives, nonblocking, on memory
// of devices without hardware, which is the host's. It has no thread: all happens in calls.
//
// It is as ill-natured as MPI may be: inputs are read when a rank calls, and looked at again when
// it is told of the end; outputs are written only then. What MPI would not like is written down.
//
// A communicator's handle is its number, its size and the rank that calls.
#include <complex>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Handle = std::uintptr_t;
using Bytes = std::vector<unsigned char>;

constexpr int kSuccess = 0, kTruncate = 15, kOther = 16;
constexpr Handle kByte = 0x100, kTypes = 0x101, kOps = 0x200;
unsigned char in_place_mark;
const void* const kInPlace = &in_place_mark;

enum Kind { Allreduce, Reduce, Bcast, Allgather, ReduceScatterBlock, Alltoall, Gather, Scatter,
            Barrier, Scan, Exscan, Allgatherv, Alltoallv, Gatherv, Scatterv, ReduceScatter };

int rank_of(Handle comm) { return static_cast<int>(comm & 0xff); }
int size_of(Handle comm) { return static_cast<int>(comm >> 8 & 0xff); }
std::uint64_t number_of(Handle comm) { return comm >> 16; }

// Lengths in bytes, places from the start of the buffer.
struct Layout {
  std::vector<std::size_t> nbytes, at;
  std::size_t total() const {
    std::size_t most = 0;
    for (std::size_t i = 0; i < nbytes.size(); ++i)
      if (nbytes[i] != 0 && at[i] + nbytes[i] > most) most = at[i] + nbytes[i];
    return most;
  }
};

struct Part {  // one rank's
  const unsigned char* in = nullptr;
  unsigned char* out = nullptr;
  bool in_place = false;
  Layout sent, received;
  Bytes given;
};

struct Call {
  Kind kind;
  int size, root;
  Handle type, op;
  std::map<int, Part> parts;
  bool differs = false;
};

struct Request {
  std::shared_ptr<Call> call;
  int rank = 0;
  long looks = 0;
};

struct Failure {
  int code;
  long after;
};

std::mutex lock;
std::map<std::pair<std::uint64_t, std::uint64_t>, std::shared_ptr<Call>> calls;
std::map<Handle, std::uint64_t> issued;
std::map<std::uint64_t, Request> requests;
std::uint64_t next_request;
std::map<std::string, long> settings, counters;
std::map<std::string, Failure> failures;
std::string violations, text;
void* (*current_device)() = nullptr;

void violate(const std::string& what) { violations += what + "\n"; }

// Whether the call is to fail; counts it, and looks at what it is called with.
int enter(const std::string& name) {
  ++counters[name];
  if (settings["needs_current"] != 0 && (current_device == nullptr || current_device() == nullptr))
    violate(name + " in a thread without a current device");
  const auto found = failures.find(name);
  if (found == failures.end() || found->second.after-- != 0) return kSuccess;
  const int code = found->second.code;
  failures.erase(found);
  return code;
}

// --- arithmetic ---

template <class T>
void combine_as(unsigned char* into, const unsigned char* from, std::size_t nbytes, int op);

template <class T>
T combined(T a, T b, int op) {
  switch (op) {
    case 0: return static_cast<T>(a + b);
    case 1: return static_cast<T>(a * b);
    default: break;
  }
  if constexpr (!std::is_same_v<T, std::complex<float>> && !std::is_same_v<T, std::complex<double>>) {
    switch (op) {
      case 2: return b < a ? b : a;
      case 3: return a < b ? b : a;
      case 5: return static_cast<T>(a && b);
      case 6: return static_cast<T>(a || b);
      case 7: return static_cast<T>(!a != !b);
      default: break;
    }
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case 8: return static_cast<T>(a & b);
      case 9: return static_cast<T>(a | b);
      case 10: return static_cast<T>(a ^ b);
      default: break;
    }
  }
  violate("no such reduction");
  return a;
}

template <class T>
void combine_as(unsigned char* into, const unsigned char* from, std::size_t nbytes, int op) {
  for (std::size_t at = 0; at + sizeof(T) <= nbytes; at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, into + at, sizeof(T));
    std::memcpy(&b, from + at, sizeof(T));
    a = combined(a, b, op);
    std::memcpy(into + at, &a, sizeof(T));
  }
}

struct Type {
  std::size_t nbytes;
  void (*combine)(unsigned char*, const unsigned char*, std::size_t, int);
};

// In the order of commrt's codes.
const Type kKnown[] = {
#define TYPE(T) {sizeof(T), combine_as<T>}
    TYPE(bool), TYPE(std::int8_t), TYPE(std::int16_t), TYPE(std::int32_t), TYPE(std::int64_t),
    TYPE(std::uint8_t), TYPE(std::uint16_t), TYPE(std::uint32_t), TYPE(std::uint64_t),
    TYPE(float), TYPE(double), TYPE(std::complex<float>), TYPE(std::complex<double>)};
constexpr Handle kNumKnown = sizeof(kKnown) / sizeof(kKnown[0]);

const Type* type_of(Handle type) {
  static const Type byte{1, nullptr};
  if (type == kByte) return &byte;
  if (type < kTypes || type >= kTypes + kNumKnown) return nullptr;
  return &kKnown[type - kTypes];
}

// --- what a call brings ---

Bytes folded(const Call& call, int first, int last) {
  Bytes value = call.parts.at(first).given;
  for (int rank = first + 1; rank <= last; ++rank)
    type_of(call.type)->combine(value.data(), call.parts.at(rank).given.data(), value.size(),
                                static_cast<int>(call.op - kOps));
  return value;
}

void put(const Part& part, std::size_t to, const Bytes& from, std::size_t at, std::size_t nbytes) {
  if (nbytes != 0) std::memcpy(part.out + to, from.data() + at, nbytes);
}

// A block of what one rank gave, to where this rank wants it.
void take(const Call& call, Part& mine, int giver, int block) {
  const Part& theirs = call.parts.at(giver);
  const auto from = static_cast<std::size_t>(block);
  const auto to = mine.received.at.size() == 1 ? 0 : static_cast<std::size_t>(giver);
  if (theirs.sent.nbytes[from] != mine.received.nbytes[to]) {
    return violate("a rank gives a block of another length than its receiver wants");
  }
  put(mine, mine.received.at[to], theirs.given, theirs.sent.at[from], mine.received.nbytes[to]);
}

void deliver(Call& call, int rank) {
  Part& mine = call.parts.at(rank);
  const int last = call.size - 1;
  switch (call.kind) {
    case Barrier: return;
    case Allreduce: put(mine, 0, folded(call, 0, last), 0, mine.given.size()); return;
    case Reduce:
      if (rank == call.root) put(mine, 0, folded(call, 0, last), 0, mine.given.size());
      return;
    case Scan: put(mine, 0, folded(call, 0, rank), 0, mine.given.size()); return;
    case Exscan:
      if (rank != 0) put(mine, 0, folded(call, 0, rank - 1), 0, mine.given.size());
      return;
    case ReduceScatterBlock:
    case ReduceScatter: {
      const auto own = static_cast<std::size_t>(rank);
      put(mine, 0, folded(call, 0, last), mine.sent.at[own], mine.sent.nbytes[own]);
      return;
    }
    case Bcast:
      if (rank != call.root) {
        const Bytes& given = call.parts.at(call.root).given;
        put(mine, 0, given, 0, given.size());
      }
      return;
    case Scatter:
    case Scatterv: take(call, mine, call.root, rank); return;
    case Gather:
    case Gatherv:
      if (rank != call.root) return;
      break;
    default: break;
  }
  const bool exchanges = call.kind == Alltoall || call.kind == Alltoallv;
  for (int giver = 0; giver < call.size; ++giver) take(call, mine, giver, exchanges ? rank : 0);
}

// True if a rank needs no part that is not there.
bool has_what_it_needs(const Call& call, int rank) {
  const auto has = [&](int first, int last) {
    for (int other = first; other <= last; ++other)
      if (call.parts.count(other) == 0) return false;
    return true;
  };
  switch (call.kind) {
    case Bcast:
    case Scatter:
    case Scatterv: return has(call.root, call.root);
    case Reduce:
    case Gather:
    case Gatherv: return rank != call.root || has(0, call.size - 1);
    case Scan: return has(0, rank);
    case Exscan: return has(0, rank - 1);
    default: return has(0, call.size - 1);
  }
}

// --- starting ---

Layout blocks(const Type& type, int count, int num) {
  Layout made;
  for (int i = 0; i < num; ++i) {
    made.nbytes.push_back(type.nbytes * static_cast<std::size_t>(count));
    made.at.push_back(made.nbytes.back() * static_cast<std::size_t>(i));
  }
  return made;
}

Layout blocks(const Type& type, const int* counts, const int* at, int num) {
  Layout made;
  std::size_t next = 0;
  for (int i = 0; i < num; ++i) {
    made.nbytes.push_back(type.nbytes * static_cast<std::size_t>(counts[i]));
    made.at.push_back(at == nullptr ? next : type.nbytes * static_cast<std::size_t>(at[i]));
    next += made.nbytes.back();
  }
  return made;
}

bool gives(const Call& call, int rank) {
  const bool from_root = call.kind == Bcast || call.kind == Scatter || call.kind == Scatterv;
  return !from_root || rank == call.root;
}

int start(const char* name, Kind kind, Handle comm, const void* in, void* out, Handle type,
          Handle op, int root, void* request, Layout (*sent)(const Type&, int, const void*),
          Layout (*received)(const Type&, int, const void*), const void* lengths) {
  const std::lock_guard<std::mutex> own(lock);
  const int code = enter(name);
  if (code != kSuccess) return code;
  const Type* const known = type_of(type);
  if (known == nullptr) {
    violate(std::string(name) + ": a type that nobody gave");
    return kOther;
  }
  const int rank = rank_of(comm), size = size_of(comm);
  const std::uint64_t seq = issued[comm]++;
  auto& call = calls[{number_of(comm), seq}];
  if (call == nullptr) {
    call = std::make_shared<Call>(Call{kind, size, root, type, op, {}, false});
  }
  if (call->kind != kind || call->root != root || call->type != type || call->op != op) {
    call->differs = true;
  }
  Part part;
  part.in_place = in == kInPlace;
  part.in = static_cast<const unsigned char*>(part.in_place ? out : in);
  part.out = static_cast<unsigned char*>(out);
  part.sent = sent(*known, size, lengths);
  part.received = received(*known, size, lengths);
  const std::size_t gives_nbytes = part.in == nullptr ? 0 : part.sent.total();
  const std::size_t takes_nbytes = kind == ReduceScatter && !part.sent.nbytes.empty()
                                       ? part.sent.nbytes[static_cast<std::size_t>(rank)]
                                       : part.received.total();
  if (!part.in_place && kind != Bcast && gives_nbytes != 0 && part.out != nullptr &&
      takes_nbytes != 0 && part.in < part.out + takes_nbytes && part.out < part.in + gives_nbytes) {
    violate(std::string(name) + " with buffers that overlap");
  }
  if (gives(*call, rank)) {
    part.given.resize(part.sent.total());
    if (!part.given.empty()) std::memcpy(part.given.data(), part.in, part.given.size());
  }
  for (const auto& [other, theirs] : call->parts) {
    if (kind < Allgatherv && theirs.sent.total() != part.sent.total() && kind != Scatter &&
        kind != Gather) {
      call->differs = true;
    }
  }
  call->parts[rank] = std::move(part);
  const std::uint64_t number = ++next_request;
  requests[number] = {call, rank, 0};
  std::memcpy(request, &number, sizeof(number));
  if (static_cast<int>(call->parts.size()) == size) calls.erase({number_of(comm), seq});
  return kSuccess;
}

struct Lengths {
  int count = 0;
  const int *send_counts = nullptr, *send_at = nullptr, *recv_counts = nullptr, *recv_at = nullptr;
};

Layout none(const Type&, int, const void*) { return {}; }
Layout one(const Type& type, int, const void* lengths) {
  return blocks(type, static_cast<const Lengths*>(lengths)->count, 1);
}
Layout each(const Type& type, int size, const void* lengths) {
  return blocks(type, static_cast<const Lengths*>(lengths)->count, size);
}
Layout sent_of(const Type& type, int size, const void* lengths) {
  const auto& given = *static_cast<const Lengths*>(lengths);
  if (given.send_counts == nullptr) return {};
  return blocks(type, given.send_counts, given.send_at, size);
}
Layout received_of(const Type& type, int size, const void* lengths) {
  const auto& given = *static_cast<const Lengths*>(lengths);
  if (given.recv_counts == nullptr) return {};
  return blocks(type, given.recv_counts, given.recv_at, size);
}

}  // namespace

// --- the library ---

EXPORT int MPI_Iallreduce(const void* in, void* out, int count, Handle type, Handle op, Handle comm,
                          void* request) {
  const Lengths lengths{count};
  return start("MPI_Iallreduce", Allreduce, comm, in, out, type, op, 0, request, one, one, &lengths);
}
EXPORT int MPI_Ireduce(const void* in, void* out, int count, Handle type, Handle op, int root,
                       Handle comm, void* request) {
  const Lengths lengths{count};
  if (rank_of(comm) != root && in != kInPlace) out = nullptr;
  return start("MPI_Ireduce", Reduce, comm, in, out, type, op, root, request, one, one, &lengths);
}
EXPORT int MPI_Ibcast(void* data, int count, Handle type, int root, Handle comm, void* request) {
  const Lengths lengths{count};
  return start("MPI_Ibcast", Bcast, comm, data, data, type, 0, root, request, one, one, &lengths);
}
EXPORT int MPI_Iallgather(const void* in, int count, Handle type, void* out, int, Handle,
                          Handle comm, void* request) {
  const Lengths lengths{count};
  return start("MPI_Iallgather", Allgather, comm, in, out, type, 0, 0, request, one, each, &lengths);
}
EXPORT int MPI_Ireduce_scatter_block(const void* in, void* out, int count, Handle type, Handle op,
                                     Handle comm, void* request) {
  const Lengths lengths{count};
  return start("MPI_Ireduce_scatter_block", ReduceScatterBlock, comm, in, out, type, op, 0, request,
               each, one, &lengths);
}
EXPORT int MPI_Ialltoall(const void* in, int count, Handle type, void* out, int, Handle,
                         Handle comm, void* request) {
  const Lengths lengths{count};
  return start("MPI_Ialltoall", Alltoall, comm, in, out, type, 0, 0, request, each, each, &lengths);
}
EXPORT int MPI_Igather(const void* in, int count, Handle type, void* out, int, Handle, int root,
                       Handle comm, void* request) {
  const Lengths lengths{count};
  const bool is_root = rank_of(comm) == root;
  return start("MPI_Igather", Gather, comm, in, is_root ? out : nullptr, type, 0, root, request, one,
               each, &lengths);
}
EXPORT int MPI_Iscatter(const void* in, int count, Handle type, void* out, int, Handle, int root,
                        Handle comm, void* request) {
  const Lengths lengths{count};
  const bool is_root = rank_of(comm) == root;
  return start("MPI_Iscatter", Scatter, comm, is_root ? in : nullptr, out, type, 0, root, request,
               each, one, &lengths);
}
EXPORT int MPI_Ibarrier(Handle comm, void* request) {
  const Lengths lengths;
  return start("MPI_Ibarrier", Barrier, comm, nullptr, nullptr, kByte, 0, 0, request, none, none,
               &lengths);
}
EXPORT int MPI_Iscan(const void* in, void* out, int count, Handle type, Handle op, Handle comm,
                     void* request) {
  const Lengths lengths{count};
  return start("MPI_Iscan", Scan, comm, in, out, type, op, 0, request, one, one, &lengths);
}
EXPORT int MPI_Iexscan(const void* in, void* out, int count, Handle type, Handle op, Handle comm,
                       void* request) {
  const Lengths lengths{count};
  return start("MPI_Iexscan", Exscan, comm, in, out, type, op, 0, request, one, one, &lengths);
}
EXPORT int MPI_Iallgatherv(const void* in, int count, Handle type, void* out, const int* counts,
                           const int* at, Handle, Handle comm, void* request) {
  const Lengths lengths{count, nullptr, nullptr, counts, at};
  return start("MPI_Iallgatherv", Allgatherv, comm, in, out, type, 0, 0, request, one, received_of,
               &lengths);
}
EXPORT int MPI_Ialltoallv(const void* in, const int* send_counts, const int* send_at, Handle type,
                          void* out, const int* recv_counts, const int* recv_at, Handle,
                          Handle comm, void* request) {
  const Lengths lengths{0, send_counts, send_at, recv_counts, recv_at};
  return start("MPI_Ialltoallv", Alltoallv, comm, in, out, type, 0, 0, request, sent_of,
               received_of, &lengths);
}
EXPORT int MPI_Igatherv(const void* in, int count, Handle type, void* out, const int* counts,
                        const int* at, Handle, int root, Handle comm, void* request) {
  const bool is_root = rank_of(comm) == root;
  const Lengths lengths{count, nullptr, nullptr, is_root ? counts : nullptr, at};
  return start("MPI_Igatherv", Gatherv, comm, in, is_root ? out : nullptr, type, 0, root, request,
               one, received_of, &lengths);
}
EXPORT int MPI_Iscatterv(const void* in, const int* counts, const int* at, Handle type, void* out,
                         int count, Handle, int root, Handle comm, void* request) {
  const bool is_root = rank_of(comm) == root;
  const Lengths lengths{count, is_root ? counts : nullptr, at, nullptr, nullptr};
  return start("MPI_Iscatterv", Scatterv, comm, is_root ? in : nullptr, out, type, 0, root, request,
               sent_of, one, &lengths);
}
EXPORT int MPI_Ireduce_scatter(const void* in, void* out, const int* counts, Handle type, Handle op,
                               Handle comm, void* request) {
  const Lengths lengths{0, counts, nullptr, nullptr, nullptr};
  return start("MPI_Ireduce_scatter", ReduceScatter, comm, in, out, type, op, 0, request, sent_of,
               none, &lengths);
}

EXPORT int MPI_Test(void* request, int* flag, void*) {
  const std::lock_guard<std::mutex> own(lock);
  *flag = 0;
  const int code = enter("MPI_Test");
  if (code != kSuccess) return code;
  std::uint64_t number;
  std::memcpy(&number, request, sizeof(number));
  const auto found = requests.find(number);
  if (found == requests.end()) {
    violate("MPI_Test of no request");
    return kOther;
  }
  Request& one = found->second;
  Call& call = *one.call;
  if (call.differs) return kTruncate;
  const bool is_complete = static_cast<int>(call.parts.size()) == call.size ||
                           (settings["eager"] != 0 && has_what_it_needs(call, one.rank));
  const bool is_held = settings["hold"] != 0 || settings["hold " + std::to_string(one.rank)] != 0;
  if (!is_complete || is_held || one.looks++ < settings["looks"]) return kSuccess;
  const Part& mine = call.parts.at(one.rank);
  if (!mine.given.empty() && std::memcmp(mine.given.data(), mine.in, mine.given.size()) != 0) {
    violate("an input was written while MPI had it");
  }
  deliver(call, one.rank);
  ++counters["done"];
  requests.erase(found);
  *flag = 1;
  return kSuccess;
}

EXPORT int MPI_Isend(const void*, int, Handle, int, int, Handle, void*) { return kOther; }
EXPORT int MPI_Irecv(void*, int, Handle, int, int, Handle, void*) { return kOther; }
EXPORT int MPI_Cancel(void*) { return kOther; }
EXPORT int MPI_Test_cancelled(const void*, int* flag) {
  *flag = 0;
  return 0;
}
EXPORT int MPI_Iprobe(int, int, Handle, int* flag, void*) {
  *flag = 0;
  return kSuccess;
}
EXPORT int MPI_Get_count(const void*, Handle, int*) { return kOther; }
EXPORT int MPI_Abort(Handle, int) { return kOther; }
EXPORT int MPI_Error_class(int code, int* which) {
  *which = code;
  return kSuccess;
}
EXPORT int MPI_Error_string(int code, char* to, int* length) {
  const std::string said = "pretended error " + std::to_string(code);
  std::memcpy(to, said.c_str(), said.size() + 1);
  *length = static_cast<int>(said.size());
  return kSuccess;
}

// --- what tests ask of it ---

EXPORT void stub_reset(void* (*current)()) {
  const std::lock_guard<std::mutex> own(lock);
  calls.clear();
  issued.clear();
  requests.clear();
  settings.clear();
  counters.clear();
  failures.clear();
  violations.clear();
  current_device = current;
}
EXPORT void stub_set(const char* name, long value) {
  const std::lock_guard<std::mutex> own(lock);
  settings[name] = value;
}
EXPORT void stub_fail(const char* function, int code, long after) {
  const std::lock_guard<std::mutex> own(lock);
  failures[function] = {code, after};
}
EXPORT long stub_counter(const char* name) {
  const std::lock_guard<std::mutex> own(lock);
  return counters[name];
}
EXPORT long stub_outstanding() {
  const std::lock_guard<std::mutex> own(lock);
  return static_cast<long>(requests.size());
}
EXPORT const char* stub_violations() {
  const std::lock_guard<std::mutex> own(lock);
  text = violations;
  return text.c_str();
}
EXPORT std::uint64_t stub_in_place() { return reinterpret_cast<std::uint64_t>(kInPlace); }
