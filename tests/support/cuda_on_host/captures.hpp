// SPDX-License-Identifier: Apache-2.0
// Captures of streams, and the graphs that they become.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "streams.hpp"

namespace cuda_on_host {

enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum State : int { kNone = 0, kActive = 1, kInvalidated = 2 };

// What was captured: commands in their order, each of a branch. Branch 0 is the stream that the
// capture began with.
struct Graph {
  std::vector<std::pair<std::size_t, Command>> commands;
  std::size_t num_branches = 1;
  RecordPtr ended;  // the latest launch of it; null: none
};
using GraphPtr = std::shared_ptr<Graph>;

struct Capture {
  std::uint64_t id = 0;
  StreamPtr origin;
  std::thread::id thread;
  Mode mode = kGlobal;
  bool invalidated = false;
  GraphPtr graph = std::make_shared<Graph>();
  std::vector<StreamPtr> branches;
  std::vector<Progress> known;  // of each branch: what comes before its next command
};

// Of the thread, as cuThreadExchangeStreamCaptureMode() sets it.
extern thread_local Mode capture_mode;

// A call that may not be made while a stream is captured, by this thread or in global mode. It ends
// these captures, and says so. An H200 did so for cuMemAlloc and cuEventQuery.
Result refuse_beside_captures();

// Records a command where its stream is captured. kNotReady: it is not.
Result capture_takes(const StreamPtr& stream, Command* command);
// Ends the capture of a stream, if there is one, and says why.
Result end_if_captured(const StreamPtr& stream, Result why);

Result begin_capture(const StreamPtr& stream, Mode mode);
Result end_capture(const StreamPtr& stream, GraphPtr* out);
State state_of(const StreamPtr& stream, std::uint64_t* id);

Result record_event(const EventPtr& event, const StreamPtr& stream, bool external);
Result wait_event(const StreamPtr& stream, const EventPtr& event, bool external);
// NotReady, or what is wrong.
Result query_event(const EventPtr& event);

// Runs behind what the stream was given, and behind the launch before.
Result launch_graph(const GraphPtr& graph, const StreamPtr& stream);

}  // namespace cuda_on_host
