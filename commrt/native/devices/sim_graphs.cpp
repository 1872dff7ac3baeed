// SPDX-License-Identifier: Apache-2.0
// Capture of simulated streams, and runs of what was captured: its commands are given again, each
// to a stream of its branch, so they are ordered, and checked, as all others are.
#include <algorithm>

#include "devices/sim_call.hpp"

namespace commrt::sim {

DeviceStatus is_capturing(Device* device, Stream handle, CaptureState* out) {
  COMMRT_ENTER(device, "is_capturing");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  *out = CaptureState::None;
  if (stream->capture && stream->capture->active)
    *out = stream->capture->invalidated ? CaptureState::Invalidated : CaptureState::Active;
  return DeviceStatus::Ok;
}

DeviceStatus capture_id(Device* device, Stream handle, std::uint64_t* out) {
  COMMRT_ENTER(device, "capture_id");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  *out = stream->capture && stream->capture->active ? stream->capture->id : 0;
  return DeviceStatus::Ok;
}

DeviceStatus exchange_capture_mode(Device* device, CaptureMode* mode) {
  COMMRT_ENTER(device, "exchange_capture_mode");
  std::swap(call.host->capture_mode, *mode);
  return call.status;
}

DeviceStatus begin_capture(Device* device, Stream handle, CaptureMode mode) {
  COMMRT_ENTER(device, "begin_capture");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (handle == 0) return call.invalid("the legacy stream cannot be captured");
  if (stream->capture && stream->capture->active) return call.invalid("it is captured already");
  auto capture = std::make_shared<Capture>();
  capture->origin = call.host;
  capture->stream = handle;
  capture->mode = mode;
  capture->recording->branch_of(handle);
  call.device->captures.push_back(capture);
  stream->capture = std::move(capture);
  return DeviceStatus::Ok;
}

DeviceStatus end_capture(Device* device, Stream handle, Graph* out) {
  COMMRT_ENTER(device, "end_capture");
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
  auto& all = call.device->captures;
  all.erase(std::remove(all.begin(), all.end(), capture), all.end());
  if (capture->invalidated)
    return device_fails(DeviceStatus::Capturing, "end_capture(): the capture was lost");
  if (!recording->is_joined()) return device_fails(DeviceStatus::Capturing, kNotJoined);
  *out = call.device->next_graph++;
  call.device->graphs[*out] = {recording, nullptr};
  return DeviceStatus::Ok;
}

namespace {

DeviceStatus external(Device* device, const char* name, Kind kind, Stream handle, Event event) {
  COMMRT_ENTER(device, name);
  if (call.refused()) return call.status;
  const auto state = call.event(event);
  const auto stream = state ? call.stream(handle) : nullptr;
  if (!stream) return call.status;
  if (!stream->capture || !stream->capture->active) return call.invalid(kNotCaptured);
  Command command;
  command.kind = kind;
  command.event = command.external = state;
  return call.world->give(call, stream.get(), std::move(command));
}

}  // namespace

DeviceStatus event_record_external(Device* device, Event event, Stream stream) {
  return external(device, "event_record_external", Kind::Record, stream, event);
}

DeviceStatus stream_wait_external(Device* device, Stream stream, Event event) {
  return external(device, "stream_wait_external", Kind::WaitEvent, stream, event);
}

DeviceStatus graph_launch(Device* device, Graph handle, Stream on) {
  COMMRT_ENTER(device, "graph_launch");
  if (call.refused()) return call.status;
  const auto stream = call.stream(on);
  if (!stream) return call.status;
  const auto found = call.device->graphs.find(handle);
  if (found == call.device->graphs.end())
    return call.invalid("the device has no graph " + std::to_string(handle));
  if (stream->capture && stream->capture->active)
    return device_fails(DeviceStatus::Unsupported, kGraphInGraph);
  const auto give = [&](StreamState* to, Command command) {
    if (command.record && command.kind == Kind::Record) {
      command.record->actor = to->actor;
      command.record->number = call.world->commands + 1;
    }
    if (call.status == DeviceStatus::Ok)
      call.status = call.world->give(call, to, std::move(command));
  };
  GraphState& graph = found->second;
  const auto& recording = *graph.recording;
  std::vector<std::shared_ptr<StreamState>> branches{stream};
  while (branches.size() < recording.num_branches()) {
    const Stream own = add_stream(call.device, call.device->next_stream++, false);
    branches.push_back(call.device->streams[own]);
  }
  Command edge;
  edge.event = std::make_shared<EventState>();
  if (graph.ended) {
    edge.kind = Kind::WaitEvent;
    edge.record = graph.ended;
    give(stream.get(), edge);
  }
  GraphRun<Command, Record> run;
  for (const auto& one : recording.entries)
    give(branches[one.branch].get(), run.of(one.command));
  edge.kind = Kind::Record;
  edge.record = graph.ended = std::make_shared<Record>();
  give(stream.get(), edge);
  for (std::size_t i = 1; i < branches.size(); ++i) {
    branches[i]->destroyed = true;
    call.world->notice_end(branches[i].get());
  }
  return call.status;
}

DeviceStatus graph_destroy(Device* device, Graph handle) {
  COMMRT_ENTER(device, "graph_destroy");
  if (call.refused()) return call.status;
  if (!call.device->graphs.erase(handle))
    return call.invalid("the device has no graph " + std::to_string(handle));
  return DeviceStatus::Ok;
}

}  // namespace commrt::sim
