// SPDX-License-Identifier: Apache-2.0
// Files of last operations, written without memory and locks.
#include "engine/flight_files.hpp"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/bell.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/rank_states.hpp"

namespace commrt {

namespace {

constexpr size_t kMostComms = 1024;
// Of all communicators together, as many as a reader takes; each has at least kLeastEntries of each
// kind.
constexpr uint64_t kMostEntries = 20000, kLeastEntries = 16;

std::array<std::atomic<const FlightEntry::Facts*>, kMostComms> all_facts;
std::atomic<int> num_writers{0};  // whoever takes facts away waits for them
std::atomic<bool> is_writing{false};

void wait_for_writers() {
  while (num_writers.load() != 0) sched_yield();
}

// JSON into a file, by one writer at a time.
class Json {
 public:
  explicit Json(int file) : file_(file) {}

  void put(char one) {
    if (used_ == sizeof buffer_) flush();
    buffer_[used_++] = one;
  }
  void text(const char* raw) {
    for (; *raw != 0; ++raw) put(*raw);
  }
  void quoted(const char* raw) {
    put('"');
    for (; *raw != 0; ++raw) {
      const auto code = static_cast<unsigned char>(*raw);
      if (*raw == '"' || *raw == '\\') {
        put('\\');
        put(*raw);
      } else if (code < 0x20 || code == 0x7f) {
        constexpr char digits[] = "0123456789abcdef";
        text("\\u00");
        put(digits[code >> 4]);
        put(digits[code & 15]);
      } else {
        put(*raw);
      }
    }
    put('"');
  }
  void number(uint64_t value) {
    char digits[20];
    int count = 0;
    do {
      digits[count++] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value != 0);
    while (count != 0) put(digits[--count]);
  }
  void number(int64_t value) {
    if (value < 0) put('-');
    number(value < 0 ? uint64_t{0} - static_cast<uint64_t>(value) : static_cast<uint64_t>(value));
  }
  void number(int value) { number(static_cast<int64_t>(value)); }
  // With three digits behind the point.
  void milliseconds(double seconds) {
    const double us = std::min(std::max(seconds, 0.0), 1e9) * 1e6;
    const auto whole = static_cast<uint64_t>(us);
    number(whole / 1000);
    put('.');
    for (uint64_t place = 100; place != 0; place /= 10) put(static_cast<char>('0' + whole / place % 10));
  }
  template <class T>
  void field(const char* name, T value) {
    name_of(name);
    number(value);
  }
  void field(const char* name, const char* value) {
    name_of(name);
    quoted(value);
  }
  void name_of(const char* name) {
    if (buffer_before() != '{') text(", ");
    quoted(name);
    text(": ");
  }
  bool flush() {
    for (size_t done = 0; done < used_;) {
      const ssize_t wrote = ::write(file_, buffer_ + done, used_ - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) failed_ = true;
      if (failed_) break;
      done += static_cast<size_t>(wrote);
    }
    if (used_ != 0) last_ = buffer_[used_ - 1];
    used_ = 0;
    return !failed_;
  }

 private:
  char buffer_before() const { return used_ != 0 ? buffer_[used_ - 1] : last_; }
  const int file_;
  size_t used_ = 0;
  char last_ = 0;
  bool failed_ = false;
  static char buffer_[1 << 15];
};
char Json::buffer_[1 << 15];

// The moment of a writing, on both clocks.
struct Now {
  const Moment moment;
  const int64_t wall = wall_ns();
};

bool is_message(const Record& record) { return record.coll == kSendCode || record.coll == kRecvCode; }

void entry(Json& json, const FlightEntry::Facts& facts, const Record& record, uint64_t number,
           const Now& now) {
  const bool message = is_message(record);
  const char* const type = name_of_type(static_cast<DType>(record.dtype));
  const double age_s = now.moment.seconds_since(record.start_ticks);
  const int64_t begun_ns = now.wall - static_cast<int64_t>(1e9 * age_s);
  const bool knows_end = record.end_ticks != 0;
  const double took_s = knows_end ? age_s - now.moment.seconds_since(record.end_ticks) : 0;
  json.text(number == 0 ? "\n  {" : ",\n  {");
  json.field("record_id", number);
  json.field("pg_id", facts.id);
  json.name_of("process_group");
  json.put('[');
  json.quoted(facts.key.c_str());
  json.text(", \"\"]");
  json.field("collective_seq_id", record.seq + 1);
  json.field("p2p_seq_id", message ? record.seq + 1 : 0);
  json.field("op_id", record.seq + 1);
  json.name_of("profiling_name");
  json.text("\"commrt:");
  json.text(name_of_operation(record.coll));
  json.put('"');
  json.field("time_created_ns", begun_ns);
  for (const char* name : {"input_sizes", "output_sizes"}) {
    json.name_of(name);
    json.text("[[");
    json.number(record.count);
    json.text("]]");
  }
  for (const char* name : {"input_dtypes", "output_dtypes"}) {
    json.name_of(name);
    json.put('[');
    json.quoted(type);
    json.put(']');
  }
  const auto state = static_cast<OpState>(record.state);
  json.field("state", state == OpState::Done     ? "completed"
                      : state == OpState::Failed ? "failed"
                                                 : "started");
  json.field("time_discovered_started_ns", begun_ns);
  json.name_of("time_discovered_completed_ns");
  if (knows_end) {
    json.number(begun_ns + static_cast<int64_t>(1e9 * took_s));
  } else {
    json.text("null");
  }
  json.name_of("duration_ms");
  if (knows_end) {
    json.milliseconds(took_s);
  } else {
    json.text("null");
  }
  json.name_of("retired");
  json.text(state == OpState::Running ? "false" : "true");
  json.field("timeout_ms", 0);
  json.name_of("is_p2p");
  json.text(message ? "true" : "false");
  json.text(", \"frames\": []");
  // Beside the words of torch:
  const char* const reduction = call_reduces(record.coll) ? name_of_reduction(record.redop) : nullptr;
  json.field("reduction", reduction != nullptr ? reduction : "");
  json.field("root", call_has_root(record.coll) ? static_cast<int>(record.root) : -1);
  json.field("peer", record.peer);
  json.field("tag", record.tag);
  json.put('}');
}

// The last records of a ring, the oldest first, at most so many.
uint64_t entries(Json& json, const FlightEntry::Facts& facts, const std::vector<Record>& ring,
                 uint64_t most, uint64_t number, const Now& now) {
  uint64_t end = 0;
  for (const Record& record : ring) {
    if (record.start_ticks != 0) end = std::max(end, record.seq + 1);
  }
  const uint64_t kept = std::min<uint64_t>({end, ring.size(), most});
  for (uint64_t seq = end - kept; seq != end; ++seq) {
    const Record record = ring[seq % ring.size()];
    if (record.start_ticks == 0 || record.seq != seq) continue;
    entry(json, facts, record, number++, now);
  }
  return number;
}

void states(Json& json, const FlightEntry::Facts& facts, bool& first) {
  for (int rank = 0; rank < facts.comm->size; ++rank) {
    const RankState state = facts.comm->state_of(rank);
    if (state.does == RankDoes::Unknown) continue;
    json.text(first ? "\n  {" : ",\n  {");
    first = false;
    json.field("pg_id", facts.id);
    json.name_of("process_group");
    json.put('[');
    json.quoted(facts.key.c_str());
    json.text(", \"\"]");
    json.field("rank", rank);
    // This rank writes, whatever else it does.
    json.field("state", rank == facts.comm->rank ? "writing" : word_for(state.does));
    json.field("started", state.started);
    json.field("last", state.started != 0 ? name_of_operation(state.code) : "");
    json.name_of("age_ms");
    json.milliseconds(state.age_s);
    if (state.waits) {
      json.field("waits_in", name_of_operation(state.wait.code));
      json.field("waits_seq", state.wait.seq);
      json.field("waits_on", state.wait.on);
      json.field("waits_peer", state.wait.peer);
      json.name_of("waits_ms");
      json.milliseconds(state.wait.for_s);
    }
    json.put('}');
  }
}

bool fill(int to, const flight::File& file, const char* reason, const char* message) {
  Json json(to);
  const Now now;
  json.text("{\"format\": \"commrt-flight/1\", \"version\": \"2.10\", ");
  json.text(file.facts.c_str());
  json.field("written_ns", now.wall);
  json.field("reason", reason);
  json.field("message", message);
  json.text(",\n \"pg_config\": {");
  uint64_t num_comms = 0;
  for (const auto& slot : all_facts) {
    const FlightEntry::Facts* const facts = slot.load();
    if (facts == nullptr || facts->world != file.world) continue;
    json.text(num_comms++ == 0 ? "\n  " : ",\n  ");
    json.quoted(facts->key.c_str());
    json.text(": {");
    json.field("name", facts->name.c_str());
    json.field("desc", "");
    json.field("ranks", facts->members.c_str());
    json.field("rank", facts->comm->rank);
    json.put('}');
  }
  json.text("},\n \"pg_status\": {},\n \"rank_states\": [");
  bool first = true;
  for (const auto& slot : all_facts) {
    const FlightEntry::Facts* const facts = slot.load();
    if (facts != nullptr && facts->world == file.world) states(json, *facts, first);
  }
  json.text("],\n \"entries\": [");
  const uint64_t most = std::max(kLeastEntries, kMostEntries / 2 / std::max<uint64_t>(num_comms, 1));
  uint64_t number = 0;
  for (const auto& slot : all_facts) {
    const FlightEntry::Facts* const facts = slot.load();
    if (facts == nullptr || facts->world != file.world) continue;
    number = entries(json, *facts, facts->comm->records, most, number, now);
    number = entries(json, *facts, facts->comm->message_records, most, number, now);
  }
  json.text("]}\n");
  return json.flush();
}

bool write_in_turn(const flight::File& file, const char* reason, const char* message) {
  char beside[4096];
  const size_t length = file.path.size();
  constexpr char kPart[] = ".part";
  if (length + sizeof kPart > sizeof beside) {
    errno = ENAMETOOLONG;
    return false;
  }
  std::memcpy(beside, file.path.c_str(), length);
  std::memcpy(beside + length, kPart, sizeof kPart);
  unlink(beside);
  const int to = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (to < 0) return false;
  num_writers.fetch_add(1);
  const bool filled = fill(to, file, reason, message);
  num_writers.fetch_sub(1);
  const int why = errno;
  if (close(to) == 0 && filled && rename(beside, file.path.c_str()) == 0) return true;
  const int later = errno;
  unlink(beside);
  errno = filled ? later : why;
  return false;
}

}  // namespace

FlightEntry::FlightEntry(const Comm& comm) : comm_(comm) {}

void FlightEntry::describe(uint64_t world, uint64_t id, const std::string& key,
                           const std::string& members) {
  if (slot_ != nullptr) return;
  auto* const facts = new Facts{&comm_, world, id, key, comm_.name, members};
  for (auto& slot : all_facts) {
    const Facts* none = nullptr;
    if (!slot.compare_exchange_strong(none, facts)) continue;
    slot_ = &slot;
    return;
  }
  delete facts;
}

FlightEntry::~FlightEntry() { close(); }

void FlightEntry::close() {
  if (slot_ == nullptr) return;
  const Facts* const facts = std::exchange(slot_, nullptr)->exchange(nullptr);
  // In a forked process the thread that wrote may not exist.
  if (!Engine::forked.load(std::memory_order_relaxed)) wait_for_writers();
  delete facts;
}

namespace flight {

namespace {

constexpr size_t kMostFiles = 64;
std::array<std::atomic<const File*>, kMostFiles> kept;
std::atomic<pid_t> owner{0};

// When a file was written last; whoever is asked soon after that writes no other.
std::atomic<uint64_t> written_ns{0};
constexpr uint64_t kPause_ns = 1'000'000'000;

std::mutex askable_mutex;
// Of this process: whoever rings one's question wakes a thread that writes.
std::vector<std::shared_ptr<Bells>>& askable() {
  static auto* const all = new std::vector<std::shared_ptr<Bells>>;  // threads outlive static objects
  return *all;
}

constexpr int kSignals[] = {SIGTERM, SIGUSR1, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

const char* name_of_signal(int number) {
  switch (number) {
    case SIGTERM: return "SIGTERM";
    case SIGUSR1: return "SIGUSR1";
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

void handle(int number) {
  const int before = errno;
  // A forked process has the handler, and nothing of its own to write.
  const bool is_own = owner.load() == getpid();
  bool free = false;
  if (is_own && is_writing.compare_exchange_strong(free, true)) {
    const bool crashed = number != SIGTERM && number != SIGUSR1;
    for (const auto& slot : kept) {
      num_writers.fetch_add(1);
      const File* const file = slot.load();
      if (file != nullptr) write_in_turn(*file, crashed ? "crash" : "signal", name_of_signal(number));
      num_writers.fetch_sub(1);
    }
    is_writing.store(false);
  }
  if (number != SIGUSR1 || !is_own) {
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, nullptr);
    raise(number);  // it comes once this handler has returned
  }
  errno = before;
}

}  // namespace

bool write(const File& file, Engine* engine, const char* reason, const char* message) {
  bool free = false;
  while (!is_writing.compare_exchange_strong(free, true)) {
    free = false;
    sched_yield();
  }
  // Whoever has the lock may be in a library that does not come back.
  constexpr double kPatience_s = 1.0;
  std::unique_lock<std::mutex> lock;
  if (engine != nullptr) {
    lock = std::unique_lock<std::mutex>(engine->mutex, std::defer_lock);
    const double deadline = now_s() + kPatience_s;
    while (!lock.try_lock() && now_s() < deadline) sched_yield();
  }
  const bool done = write_in_turn(file, reason, message);
  const int why = errno;
  written_ns.store(steady_ns());
  is_writing.store(false);
  errno = why;
  return done;
}

void keep(const File& file) {
  forget(file.world);
  auto* const one = new File(file);
  for (auto& slot : kept) {
    const File* none = nullptr;
    if (slot.compare_exchange_strong(none, one)) return;
  }
  delete one;
}

void forget(uint64_t world) {
  for (auto& slot : kept) {
    const File* const file = slot.load();
    if (file == nullptr || file->world != world) continue;
    const File* was = file;
    if (!slot.compare_exchange_strong(was, nullptr)) continue;
    wait_for_writers();
    delete file;
  }
}

namespace {

void write_asked(uint32_t by) {
  for (bool free = false; !is_writing.compare_exchange_strong(free, true); free = false) {
    nap(1e-4);
  }
  // A dump of its own is worth more than one that others ask for, and one question is like another.
  if (written_ns.load() == 0 || steady_ns() - written_ns.load() > kPause_ns) {
    const std::string message = "rank " + std::to_string(by) + " of the job asked for it";
    for (const auto& slot : kept) {
      num_writers.fetch_add(1);
      const File* const file = slot.load();
      if (file != nullptr) write_in_turn(*file, "asked", message.c_str());
      num_writers.fetch_sub(1);
    }
    written_ns.store(steady_ns());
  }
  is_writing.store(false);
}

}  // namespace

void write_when_asked(std::shared_ptr<Bells> bells) {
  const std::lock_guard<std::mutex> lock(askable_mutex);
  auto& all = askable();
  if (bells == nullptr) {
    if (!all.empty()) return;
    bells = Bells::of_threads("dumps", 1, 0);
  }
  if (std::find(all.begin(), all.end(), bells) != all.end()) return;
  all.push_back(bells);
  std::thread([bells = std::move(bells)] {
    // The program's handlers run in its own threads.
    sigset_t every;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, nullptr);
    for (uint32_t told = 0;;) {
      const uint32_t by = bells->wait_for_question(told);
      write_asked(by);
      bells->answer_beside(told);
    }
  }).detach();
}

void ask_here(uint32_t by) {
  const std::lock_guard<std::mutex> lock(askable_mutex);
  if (askable().empty()) return;
  const auto& bells = askable().front();
  bells->ask_beside(bells->own, by);
}

void finish() {
  const double deadline = now_s() + 1.0;
  while (is_writing.load() && now_s() < deadline) nap(1e-3);
}

void write_at_signals() {
  if (owner.exchange(getpid()) == getpid()) return;
  for (const int number : kSignals) {
    struct sigaction now = {};
    if (sigaction(number, nullptr, &now) != 0) continue;
    if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) continue;
    struct sigaction ours = {};
    ours.sa_handler = handle;
    ours.sa_flags = SA_RESTART | SA_ONSTACK;
    // One file at a time: other signals wait until it is written.
    for (const int other : {SIGTERM, SIGUSR1, SIGINT}) sigaddset(&ours.sa_mask, other);
    sigaction(number, &ours, nullptr);
  }
}

}  // namespace flight

}  // namespace commrt
