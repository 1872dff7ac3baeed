// SPDX-License-Identifier: Apache-2.0
#include "captures.hpp"

#include <algorithm>
#include <map>

namespace cuda_on_host {
namespace {

using CapturePtr = std::shared_ptr<Capture>;

// Those that have not ended; guarded, as all state of captures, by card().tables.
std::vector<CapturePtr>& active() {
  static auto* const all = new std::vector<CapturePtr>;
  return *all;
}

void join(Progress* known, const Progress& other) {
  known->resize(std::max(known->size(), other.size()));
  for (std::size_t i = 0; i < other.size(); ++i) (*known)[i] = std::max((*known)[i], other[i]);
}

std::size_t branch_of(const CapturePtr& capture, const StreamPtr& stream) {
  auto& branches = capture->branches;
  const auto found = std::find(branches.begin(), branches.end(), stream);
  const auto branch = static_cast<std::size_t>(found - branches.begin());
  if (found == branches.end()) {
    branches.push_back(stream);
    capture->known.emplace_back(capture->known.empty() ? 0 : capture->known[0].size());
    capture->graph->num_branches = branches.size();
  }
  return branch;
}

// A command of work counts; records of events and waits for them are edges, but for events outside.
void take(const CapturePtr& capture, const StreamPtr& stream, Command command) {
  const std::size_t branch = branch_of(capture, stream);
  Progress& known = capture->known[branch];
  const bool is_edge = command.what != Command::What::Work && !command.external;
  if (is_edge && command.what == Command::What::Record) {
    command.record->known = known;
  } else if (is_edge) {
    join(&known, command.record->known);
  } else {
    known.resize(std::max(known.size(), branch + 1));
    ++known[branch];
  }
  capture->graph->commands.emplace_back(branch, std::move(command));
}

bool is_joined(const Capture& capture) {
  const Progress& origin = capture.known[0];
  for (std::size_t branch = 1; branch < capture.known.size(); ++branch) {
    const Progress& known = capture.known[branch];
    const std::size_t number = branch < known.size() ? known[branch] : 0;
    if (number > (branch < origin.size() ? origin[branch] : 0)) return false;
  }
  return true;
}

Result lose(const CapturePtr& capture, Result why) {
  capture->invalidated = true;
  return why;
}

bool has_ended(const CapturePtr& capture) {
  return std::find(active().begin(), active().end(), capture) == active().end();
}

}  // namespace

thread_local Mode capture_mode = kGlobal;

Result refuse_beside_captures() {
  if (capture_mode == kRelaxed) return kSuccess;
  std::lock_guard<std::mutex> guard(card().tables);
  Result result = kSuccess;
  for (const CapturePtr& capture : active()) {
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool forbids = is_own ? capture->mode != kRelaxed
                                : capture->mode == kGlobal && capture_mode == kGlobal;
    if (forbids) result = lose(capture, kCaptureUnsupported);
  }
  return result;
}

Result capture_takes(const StreamPtr& stream, Command* command) {
  std::lock_guard<std::mutex> guard(card().tables);
  if (stream == card().legacy) {
    // It would wait for blocking streams that are captured.
    for (const CapturePtr& capture : active())
      for (const StreamPtr& branch : capture->branches)
        if (branch->blocking) return lose(capture, kCaptureImplicit);
    return kNotReady;
  }
  if (!stream->capture) return kNotReady;
  if (stream->capture->invalidated) return kCaptureInvalidated;
  take(stream->capture, stream, std::move(*command));
  return kSuccess;
}

Result end_if_captured(const StreamPtr& stream, Result why) {
  std::lock_guard<std::mutex> guard(card().tables);
  return stream->capture ? lose(stream->capture, why) : kSuccess;
}

Result begin_capture(const StreamPtr& stream, Mode mode) {
  static std::uint64_t next_id = 1;
  std::lock_guard<std::mutex> guard(card().tables);
  if (stream == card().legacy) return kCaptureUnsupported;
  if (stream->capture) return kInvalidValue;
  auto made = std::make_shared<Capture>();
  made->id = next_id++;
  made->origin = stream;
  made->thread = std::this_thread::get_id();
  made->mode = mode;
  branch_of(made, stream);
  active().push_back(made);
  stream->capture = std::move(made);
  return kSuccess;
}

Result end_capture(const StreamPtr& stream, GraphPtr* out) {
  std::lock_guard<std::mutex> guard(card().tables);
  const CapturePtr capture = stream->capture;
  if (!capture) return kInvalidValue;
  if (capture->origin != stream) return lose(capture, kCaptureUnmatched);
  if (capture->mode != kRelaxed && capture->thread != std::this_thread::get_id())
    return lose(capture, kCaptureWrongThread);
  for (const StreamPtr& branch : capture->branches) branch->capture = nullptr;
  active().erase(std::find(active().begin(), active().end(), capture));
  if (capture->invalidated) return kCaptureInvalidated;
  if (!is_joined(*capture)) return kCaptureUnjoined;
  *out = std::move(capture->graph);
  return kSuccess;
}

State state_of(const StreamPtr& stream, std::uint64_t* id) {
  std::lock_guard<std::mutex> guard(card().tables);
  if (!stream->capture) return kNone;
  if (id) *id = stream->capture->id;
  return stream->capture->invalidated ? kInvalidated : kActive;
}

Result record_event(const EventPtr& event, const StreamPtr& stream, bool external) {
  RecordPtr made = Card::new_record();
  Command command = Card::record(made);
  {
    std::lock_guard<std::mutex> guard(card().tables);
    if (external && !stream->capture) return kInvalidValue;
    if (external) command.external = event;
    if (stream->capture && !external) {
      made->capture = stream->capture;
      made->was_captured = true;
    }
  }
  const Result result = card().give(stream, std::move(command));
  if (result == kSuccess && !external) {
    std::lock_guard<std::mutex> guard(card().tables);
    event->latest = std::move(made);
  }
  return result;
}

Result wait_event(const StreamPtr& stream, const EventPtr& event, bool external) {
  Command command;
  {
    std::lock_guard<std::mutex> guard(card().tables);
    const RecordPtr latest = event->latest;
    command = Card::wait(latest);
    if (external) {
      if (!stream->capture) return kInvalidValue;
      command.external = event;
    } else if (!latest) {
      return kSuccess;  // without a record it waits for nothing
    } else {
      const CapturePtr origin = latest->capture.lock();
      const bool goes_on = origin && !has_ended(origin);
      if (latest->was_captured && !goes_on) return kInvalidValue;
      if (stream->capture && stream->capture != origin) {
        if (goes_on) lose(origin, kCaptureMerge);
        return lose(stream->capture, goes_on ? kCaptureMerge : kCaptureIsolation);
      }
      if (goes_on && origin->invalidated) return kCaptureInvalidated;
      if (goes_on && !stream->capture) {
        stream->capture = origin;
        branch_of(origin, stream);
      }
    }
  }
  return card().give(stream, std::move(command));
}

Result query_event(const EventPtr& event) {
  std::lock_guard<std::mutex> guard(card().tables);
  const RecordPtr latest = event->latest;
  if (!latest) return kSuccess;
  const CapturePtr origin = latest->capture.lock();
  if (origin && !has_ended(origin)) return lose(origin, kCapturedEvent);
  return latest->done ? kSuccess : kNotReady;
}

Result launch_graph(const GraphPtr& graph, const StreamPtr& stream) {
  Card& on = card();
  std::lock_guard<std::mutex> guard(on.giving);
  std::vector<StreamPtr> branches{stream};
  {
    // Branches are streams of the launch alone; nothing else names them.
    std::lock_guard<std::mutex> tables(on.tables);
    while (branches.size() < graph->num_branches) {
      branches.push_back(on.add_stream(false));
      on.streams[branches.back()->handle] = branches.back();
    }
  }
  if (graph->ended) on.push(stream, Card::wait(graph->ended));
  // Nothing of a branch runs before the launch does.
  const RecordPtr begun = Card::new_record();
  on.push(stream, Card::record(begun));
  for (std::size_t i = 1; i < branches.size(); ++i) on.push(branches[i], Card::wait(begun));
  std::map<const Record*, RecordPtr> records;
  for (const auto& [branch, captured] : graph->commands) {
    Command command = captured;
    if (captured.what == Command::What::Record) {
      const RecordPtr made = Card::new_record();
      command = Card::record(made);
      if (captured.external) {
        std::lock_guard<std::mutex> tables(on.tables);
        captured.external->latest = made;
      } else {
        records[captured.record.get()] = made;
      }
    } else if (captured.what == Command::What::Wait) {
      RecordPtr latest;
      if (captured.external) {
        std::lock_guard<std::mutex> tables(on.tables);
        latest = captured.external->latest;
      } else {
        latest = records[captured.record.get()];
      }
      command = Card::wait(latest);
    }
    on.push(branches[branch], std::move(command));
  }
  graph->ended = Card::new_record();
  on.push(stream, Card::record(graph->ended));
  for (std::size_t i = 1; i < branches.size(); ++i) on.drop_stream(branches[i]);
  return on.failure();
}

}  // namespace cuda_on_host
