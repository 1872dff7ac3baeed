// SPDX-License-Identifier: Apache-2.0
// Capture of the streams of a device of threads, and runs of what was captured: each stream that
// joined a capture is a thread of its own in a run.
#include "devices/thread_call.hpp"

namespace commrt::threaded {

using Kind = Command::Kind;

DeviceStatus is_capturing(Device* device, Stream handle, CaptureState* out) {
  Call call(device, "is_capturing");
  *out = CaptureState::None;
  const auto stream = call.status == DeviceStatus::Ok ? call.stream(handle) : nullptr;
  if (stream && stream->capture && stream->capture->active)
    *out = stream->capture->invalidated ? CaptureState::Invalidated : CaptureState::Active;
  return call.status;
}

DeviceStatus capture_id(Device* device, Stream handle, std::uint64_t* out) {
  Call call(device, "capture_id");
  *out = 0;
  const auto stream = call.status == DeviceStatus::Ok ? call.stream(handle) : nullptr;
  if (stream && stream->capture && stream->capture->active) *out = stream->capture->id;
  return call.status;
}

DeviceStatus begin_capture(Device* device, Stream handle, CaptureMode) {
  Call call(device, "begin_capture");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (handle == 0) return call.invalid("the legacy stream cannot be captured");
  if (stream->capture && stream->capture->active) return call.invalid("it is captured already");
  stream->capture = std::make_shared<Capture>();
  stream->capture->stream = handle;
  stream->capture->recording->branch_of(handle);
  return DeviceStatus::Ok;
}

DeviceStatus end_capture(Device* device, Stream handle, Graph* out) {
  Call call(device, "end_capture");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  const auto capture = stream->capture;
  if (!capture || !capture->active) return call.invalid("the stream is not captured");
  if (capture->stream != handle) {
    capture->invalidated = true;
    return call.invalid("the capture began with stream " + std::to_string(capture->stream) +
                        "; it is lost");
  }
  capture->active = false;
  const std::shared_ptr<const Recording<Command>> recording = std::move(capture->recording);
  if (capture->invalidated)
    return device_fails(DeviceStatus::Capturing, "end_capture(): the capture was lost");
  if (!recording->is_joined()) return device_fails(DeviceStatus::Capturing, kNotJoined);
  *out = call.device->next_graph++;
  call.device->graphs[*out] = {recording, nullptr};
  return DeviceStatus::Ok;
}

namespace {

DeviceStatus external(Device* device, const char* name, Kind kind, Stream handle, Event event) {
  Call call(device, name);
  if (call.refused()) return call.status;
  const auto state = call.event(event);
  const auto stream = state ? call.stream(handle) : nullptr;
  if (!stream) return call.status;
  if (!stream->capture || !stream->capture->active) return call.invalid(kNotCaptured);
  Command command;
  command.kind = kind;
  command.external = state;
  call.give(stream, std::move(command));
  return call.status;
}

}  // namespace

DeviceStatus event_record_external(Device* device, Event event, Stream stream) {
  return external(device, "event_record_external", Kind::Record, stream, event);
}

DeviceStatus stream_wait_external(Device* device, Stream stream, Event event) {
  return external(device, "stream_wait_external", Kind::WaitEvent, stream, event);
}

DeviceStatus graph_launch(Device* device, Graph handle, Stream on) {
  Call call(device, "graph_launch");
  if (call.refused()) return call.status;
  const auto stream = call.stream(on);
  if (!stream) return call.status;
  const auto found = call.device->graphs.find(handle);
  if (found == call.device->graphs.end())
    return call.invalid("the device has no graph " + std::to_string(handle));
  if (stream->capture && stream->capture->active)
    return device_fails(DeviceStatus::Unsupported, kGraphInGraph);
  join_ended(call.device);
  GraphState& graph = found->second;
  const auto& recording = *graph.recording;
  std::vector<std::shared_ptr<StreamState>> branches{stream};
  while (branches.size() < recording.num_branches()) {
    const Stream own = add_stream(call.device, call.device->next_stream++, false);
    branches.push_back(call.device->streams[own]);
  }
  Command edge;
  if (graph.ended) {
    edge.kind = Kind::WaitEvent;
    edge.record = graph.ended;
    call.give(stream, edge);
  }
  GraphRun<Command, Record> run;
  for (const auto& one : recording.entries) {
    Command command = run.of(one.command);
    // An event outside that was never recorded is not waited for.
    if (command.kind == Kind::WaitEvent && !command.record) continue;
    call.give(branches[one.branch], std::move(command));
  }
  edge.kind = Kind::Record;
  edge.record = graph.ended = std::make_shared<Record>();
  call.give(stream, edge);
  for (std::size_t i = 1; i < branches.size(); ++i) {
    close_stream(branches[i]);
    call.device->destroyed.push_back(branches[i]);
    call.device->streams.erase(branches[i]->handle);
  }
  return call.status;
}

DeviceStatus graph_destroy(Device* device, Graph handle) {
  Call call(device, "graph_destroy");
  if (call.refused()) return call.status;
  if (!call.device->graphs.erase(handle))
    return call.invalid("the device has no graph " + std::to_string(handle));
  return DeviceStatus::Ok;
}

}  // namespace commrt::threaded
