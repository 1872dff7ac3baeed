// SPDX-License-Identifier: Apache-2.0
// The record of a stream capture, for devices without hardware. It lists the captured commands in
// order, each with its stream, and tells whether all streams joined again before the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "devices/device.hpp"
#include "devices/foreign_kernel.hpp"

namespace commrt {

// Counts, for each stream of a capture, how many of its commands come before something.
class Progress {
 public:
  void join(const Progress& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (std::size_t i = 0; i < other.counts_.size(); ++i)
      counts_[i] = std::max(counts_[i], other.counts_[i]);
  }
  void set(std::size_t branch, std::size_t count) {
    if (counts_.size() <= branch) counts_.resize(branch + 1);
    counts_[branch] = count;
  }
  std::size_t of(std::size_t branch) const {
    return branch < counts_.size() ? counts_[branch] : 0;
  }

 private:
  std::vector<std::size_t> counts_;
};

// A command has its kind; the record that it makes or waits for; `external`, the event outside that
// it does so with instead; and `foreign`, a kernel of another library. All of them shared pointers.
template <class Command>
class Recording {
 public:
  struct Entry {
    std::size_t branch;  // 0 is the stream that the capture began with
    Command command;
  };

  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() {
    std::map<const ForeignKernel*, bool> seen;
    for (const Entry& one : entries) {
      const ForeignKernel* kernel = one.command.foreign.get();
      if (kernel != nullptr && !seen[kernel]) kernel->drop(kernel->argument);
      seen[kernel] = true;
    }
  }

  // The number of a stream, which gets one when it is first asked for.
  std::size_t branch_of(std::uint64_t stream) {
    const auto found = branches_.emplace(stream, branches_.size());
    if (found.second) known_.emplace_back();
    return found.first->second;
  }
  void take(std::uint64_t stream, Command command) {
    using Kind = decltype(command.kind);
    const std::size_t branch = branch_of(stream);
    Progress& known = known_[branch];
    // Records and waits within the capture are edges of the graph, all else are nodes.
    if (command.kind == Kind::Record && !command.external) {
      command.record->known = known;
    } else if (command.kind == Kind::WaitEvent && !command.external) {
      known.join(command.record->known);
    } else {
      known.set(branch, known.of(branch) + 1);
    }
    entries.push_back({branch, std::move(command)});
  }
  std::size_t num_branches() const { return known_.size(); }
  // True if the first stream comes after all nodes of the others.
  bool is_joined() const {
    for (std::size_t branch = 1; branch < known_.size(); ++branch)
      if (known_[0].of(branch) < known_[branch].of(branch)) return false;
    return true;
  }

  std::vector<Entry> entries;

 private:
  std::map<std::uint64_t, std::size_t> branches_;
  std::vector<Progress> known_;  // of each branch: what comes before its next command
};

// One launch of a graph: its commands, with records and kernels of its own.
template <class Command, class Record>
class GraphRun {
 public:
  Command of(const Command& captured) {
    using Kind = decltype(captured.kind);
    Command command = captured;
    if (command.foreign) command.foreign = kernel_for(command.foreign);
    if (command.kind == Kind::Record) {
      command.record = std::make_shared<Record>();
      (captured.external ? captured.external->latest : records_[captured.record.get()]) =
          command.record;
    }
    if (command.kind == Kind::WaitEvent)
      command.record =
          captured.external ? captured.external->latest : records_[captured.record.get()];
    return command;
  }

 private:
  using Kernel = std::shared_ptr<const ForeignKernel>;
  Kernel kernel_for(const Kernel& captured) {
    Kernel& made = kernels_[captured.get()];
    if (made == nullptr)
      made = std::make_shared<const ForeignKernel>(captured->again(captured->argument));
    return made;
  }

  std::map<const ForeignKernel*, Kernel> kernels_;
  std::map<const Record*, std::shared_ptr<Record>> records_;
};

// No other capture of the process has it; never 0.
inline std::uint64_t next_capture_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}

// A capture of streams, also once it has ended.
template <class Command>
struct Capture {
  std::uint64_t id = next_capture_id();
  Stream stream = 0;             // the one that it began with
  const void* origin = nullptr;  // the host thread that began it, where the device looks at that
  CaptureMode mode = CaptureMode::Global;
  bool active = true;
  bool invalidated = false;
  // Goes to the graph at the end, as streams remember their captures for longer.
  std::shared_ptr<Recording<Command>> recording = std::make_shared<Recording<Command>>();
};

// A graph that a capture has become.
template <class Command, class Record>
struct CapturedGraph {
  std::shared_ptr<const Recording<Command>> recording;
  std::shared_ptr<Record> ended;  // the latest launch; null: none
};

inline constexpr char kNotCaptured[] =
    "external records and waits are for streams that are captured: outside use event_record() "
    "and stream_wait_event()";
inline constexpr char kNotJoined[] =
    "end_capture(): a stream that joined the capture by an event has commands that the captured "
    "stream does not wait for: record an event behind them, and let it wait for that";
inline constexpr char kGraphInGraph[] =
    "graph_launch() into a stream that is captured: graphs within graphs are not built here";

}  // namespace commrt
