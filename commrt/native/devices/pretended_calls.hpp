// SPDX-License-Identifier: Apache-2.0
// Calls that work the same on simulated devices and on devices of threads: streams, events, flags,
// launches, captures and graphs.
//
// Each device has a `Call`, which every call begins with, and a `Side`, which says its types and
// enters calls. A method of the Call does what differs between the two in a shared call:
//
//   give(stream, command)            a stream gets a command; the status
//   give_foreign(stream, kernel)     likewise, of another library's kernel
//   made_ready(command)              false with a status: a launch cannot be given
//   knows_operands(command)          the memory of a command was checked
//   waits_for_unrecorded()           whether one may wait for an event without a record
//   begun(capture, mode)             a capture has begun
//   ended(capture)                   a capture has ended
//   end_stream(stream)               nobody gives the stream a command any more
//   has_ended(stream)                whether that was called
//   words_for_device()               the device in a message
//   refuses_sharing()                whether memory can neither be shared nor opened now
//   exported(address)                memory that another process may open
//   open(base), close(base)          false where it is open already, or is not
//   guard_memory()                   whoever has it, finds the same memory until it goes
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "devices/device_error.hpp"
#include "devices/pretended_commands.hpp"
#include "kernels/kernels.hpp"

namespace commrt::pretended {

// The part of a Call that looks things up and refuses. `Self` is the Call itself.
template <class Self, class OnDevice>
struct CallBase {
  CallBase(OnDevice* device_, const char* name_) : device(device_), name(name_) {}

  DeviceStatus invalid(const std::string& why) {
    return device_fails(DeviceStatus::Invalid, std::string(name) + "(): " + why);
  }
  auto stream(Stream handle) {
    const auto found = device->streams.find(handle);
    if (found != device->streams.end() && !self().has_ended(*found->second)) return found->second;
    status = invalid(self().words_for_device() + " has no stream " + std::to_string(handle));
    return decltype(found->second)();
  }
  auto event(Event handle) {
    const auto found = device->events.find(handle);
    if (found != device->events.end()) return found->second;
    status = invalid(self().words_for_device() + " has no event " + std::to_string(handle));
    return decltype(found->second)();
  }
  // Fails the call, and the capture with it, if a stream is captured: the host or the stream would
  // wait for something that never comes.
  template <class Capture>
  bool breaks(const std::shared_ptr<Capture>& capture, const std::string& what) {
    if (!capture || !capture->active) return false;
    capture->invalidated = true;
    status = device_fails(DeviceStatus::Capturing,
                          std::string(name) + "() " + what + "; the capture is lost");
    return true;
  }
  // Memory that kernels and flags may be in.
  bool on_device(const void* ptr, std::size_t nbytes) {
    bool known = false;
    if (self().operand(ptr, nbytes, &known) && !known && nbytes)
      status = invalid(hex(ptr) + " is pageable memory, which the device cannot reach");
    return status == DeviceStatus::Ok;
  }

  OnDevice* device;
  const char* name;
  DeviceStatus status = DeviceStatus::Ok;

 private:
  Self& self() { return static_cast<Self&>(*this); }
};

// Memory that another process may open; of kind Unknown where there is none.
struct Exported {
  MemoryKind kind = MemoryKind::Unknown;
  std::uint64_t base = 0;
  std::uint64_t id = 0;  // no other memory has it, where the device counts its memory
  bool is_own = false;
};

template <class StreamState>
bool is_captured(const StreamState& stream) {
  return stream.capture && stream.capture->active;
}

template <class Side>
struct Calls {
  using Command = typename Side::Command;
  using Record = typename Side::Record;
  using EventState = typename Side::EventState;
  using StreamPtr = std::shared_ptr<typename Side::StreamState>;

  // --- streams and events ---

  static DeviceStatus stream_create(Device* device, int, bool blocking, Stream* out) {
    return Side::enter(device, "stream_create", [&](auto& call) {
      if (call.refused()) return call.status;
      *out = add_stream(call.device, call.device->next_stream++, blocking);
      return call.status;
    });
  }

  static DeviceStatus stream_destroy(Device* device, Stream handle) {
    return on_stream(device, "stream_destroy", handle, [&](auto& call, const StreamPtr& stream) {
      if (handle == 0) return call.invalid("the legacy stream cannot be destroyed");
      call.end_stream(stream);
      return call.status;
    });
  }

  static DeviceStatus event_create(Device* device, Event* out) {
    return add_event(device, "event_create", false, out);
  }
  static DeviceStatus timed_event_create(Device* device, Event* out) {
    return add_event(device, "timed_event_create", true, out);
  }

  static DeviceStatus event_destroy(Device* device, Event handle) {
    return Side::enter(device, "event_destroy", [&](auto& call) {
      if (call.refused()) return call.status;
      if (call.event(handle)) call.device->events.erase(handle);
      return call.status;
    });
  }

  static DeviceStatus event_record(Device* device, Event handle, Stream on) {
    return Side::enter(device, "event_record", [&](auto& call) {
      if (call.refused()) return call.status;
      const auto event = call.event(handle);
      const auto stream = event ? call.stream(on) : nullptr;
      if (!stream) return call.status;
      auto record = Side::new_record(*event);
      if (is_captured(*stream)) {
        record->captured = true;
        record->capture = stream->capture;
      }
      Command command;
      command.kind = Kind::Record;
      command.record = record;
      command.event = event;
      call.status = call.give(stream, std::move(command));
      if (call.status == DeviceStatus::Ok) event->latest = std::move(record);
      return call.status;
    });
  }

  static DeviceStatus stream_wait_event(Device* device, Stream waits, Event handle) {
    return Side::enter(device, "stream_wait_event", [&](auto& call) {
      if (call.refused()) return call.status;
      const auto event = call.event(handle);
      const auto stream = event ? call.stream(waits) : nullptr;
      if (!stream) return call.status;
      const auto record = event->latest;
      if (!record) {
        if (call.waits_for_unrecorded()) return call.status;
        return call.invalid("event " + std::to_string(handle) +
                            " was never recorded: CUDA would wait for nothing, silently");
      }
      const auto origin = record->capture.lock();
      const bool from_capture = origin && origin->active;
      if (from_capture && !is_captured(*stream)) stream->capture = origin;
      if (!(from_capture && stream->capture == origin) &&
          call.breaks(stream->capture, "of a stream that is captured for an event that is not of "
                                       "the capture"))
        return call.status;
      if (!from_capture && record->captured)
        return call.invalid("event " + std::to_string(handle) +
                            " was recorded in a capture that has ended: it happens in no stream");
      Command command;
      command.kind = Kind::WaitEvent;
      command.record = record;
      command.event = event;
      return call.give(stream, std::move(command));
    });
  }

  // --- flags ---

  static DeviceStatus write_value32(Device* device, Stream stream, std::uint32_t* flag,
                                    std::uint32_t value) {
    return flag_command(device, "write_value32", Kind::Write, stream, flag, value);
  }
  static DeviceStatus wait_value32_geq(Device* device, Stream stream, std::uint32_t* flag,
                                       std::uint32_t value) {
    return flag_command(device, "wait_value32_geq", Kind::Wait, stream, flag, value);
  }

  // --- launches ---

  static DeviceStatus launch_reduce(Device* device, RedOp op, DType dtype, void* dst,
                                    const void* src, std::size_t count, Stream stream) {
    if (!combine_for(dtype, op))
      return device_fails(DeviceStatus::Unsupported,
                          "launch_reduce(): the reduction is not defined for the type");
    Command command = elementwise(Kind::Reduce, dtype, dst, src, count);
    command.op = op;
    return launch(device, "launch_reduce", std::move(command), stream);
  }

  static DeviceStatus launch_copy(Device* device, void* dst, const void* src, std::size_t nbytes,
                                  Stream stream) {
    return launch(device, "launch_copy", elementwise(Kind::KernelCopy, DType::U8, dst, src, nbytes),
                  stream);
  }

  static DeviceStatus launch_scaled_sum(Device* device, DType dtype, void* dst, const void* src,
                                        std::size_t count, unsigned which, Scale factor,
                                        Stream stream) {
    if (const char* why = why_no_scaled_sum(dtype, which))
      return device_fails(DeviceStatus::Unsupported, why);
    Command command = elementwise(Kind::ScaledSum, dtype, dst, src, count);
    command.value = which;
    command.factor = factor;
    return launch(device, "launch_scaled_sum", std::move(command), stream);
  }

  static DeviceStatus launch_divide(Device* device, DType dtype, void* dst, std::size_t count,
                                    std::int64_t divisor, Stream stream) {
    if (const char* why = why_no_divide(dtype, divisor))
      return device_fails(DeviceStatus::Unsupported, why);
    Command command = elementwise(Kind::Divide, dtype, dst, dst, count);
    command.factor.integer = divisor;
    return launch(device, "launch_divide", std::move(command), stream);
  }

  static DeviceStatus launch_boxes(Device* device, const BoxLaunch& boxes, Stream stream) {
    if (const char* why = why_no_launch(boxes))
      return device_fails(DeviceStatus::Unsupported, std::string("launch_boxes(): ") + why);
    Command command;
    command.kind = Kind::Boxes;
    command.dst = boxes.buffer;
    command.src = boxes.buffer;
    command.nbytes = boxes.buffer_nbytes;
    command.boxes = std::make_shared<const BoxLaunch>(boxes);
    return launch(device, "launch_boxes", std::move(command), stream);
  }

  static DeviceStatus launch_host(Device* device, Stream handle, HostFunction function,
                                  void* argument) {
    return on_stream(device, "launch_host", handle, [&](auto& call, const StreamPtr& stream) {
      Command command;
      command.kind = Kind::HostFunction;
      command.function = function;
      command.argument = argument;
      return call.give(stream, std::move(command));
    });
  }

  static DeviceStatus launch_foreign(Device* device, const ForeignKernel& kernel, Stream handle) {
    return on_stream(device, "launch_foreign", handle, [&](auto& call, const StreamPtr& stream) {
      for (const ForeignRange& range : kernel.ranges)
        if (!call.on_device(range.at, range.nbytes)) return call.status;
      return call.give_foreign(stream, std::make_shared<const ForeignKernel>(kernel));
    });
  }

  // --- memory of other processes: each device stands for one ---

  static DeviceStatus ipc_export(Device* device, const void* ptr, IpcHandle* out,
                                 std::size_t* offset) {
    return Side::enter(device, "ipc_export", [&](auto& call) {
      if (call.refuses_sharing()) return call.status;
      [[maybe_unused]] const auto guard = call.guard_memory();
      const auto address = reinterpret_cast<std::uint64_t>(ptr);
      const Exported found = call.exported(address);
      if (found.kind != MemoryKind::Device || !found.is_own)
        return call.invalid(hex(ptr) + " is not memory that " + call.words_for_device() +
                            " allocated by alloc()");
      const Ticket ticket{Side::kTicket, found.id, found.base};
      *out = {};
      std::memcpy(out->bytes, &ticket, sizeof(ticket));
      *offset = address - found.base;
      return call.status;
    });
  }

  static DeviceStatus ipc_open(Device* device, const IpcHandle* handle, void** base) {
    return Side::enter(device, "ipc_open", [&](auto& call) {
      if (call.refuses_sharing()) return call.status;
      Ticket ticket;
      std::memcpy(&ticket, handle->bytes, sizeof(ticket));
      if (ticket.kind != Side::kTicket)
        return call.invalid("the handle is not one of ipc_export(): pass one that the owner of "
                            "the memory exported");
      [[maybe_unused]] const auto guard = call.guard_memory();
      const Exported found = call.exported(ticket.base);
      const bool is_there = found.kind == MemoryKind::Device && found.base == ticket.base;
      if (!is_there || found.id != ticket.id)
        return call.invalid("the memory of the handle was freed: let its owner keep it until all "
                            "peers have closed it");
      if (found.is_own)
        return call.invalid("the handle is of this process itself: use the memory's own address");
      if (!call.open(found.base))
        return call.invalid("the handle is open already: a process opens it once");
      *base = reinterpret_cast<void*>(found.base);
      return call.status;
    });
  }

  static DeviceStatus ipc_close(Device* device, void* base) {
    return Side::enter(device, "ipc_close", [&](auto& call) {
      if (call.refuses_sharing()) return call.status;
      [[maybe_unused]] const auto guard = call.guard_memory();
      if (!call.close(reinterpret_cast<std::uint64_t>(base)))
        return call.invalid(hex(base) + " is not open: pass an address of ipc_open(), once");
      return call.status;
    });
  }

  // --- captures and graphs: a launch gives the commands again, each to a stream of its branch ---

  static DeviceStatus is_capturing(Device* device, Stream handle, CaptureState* out) {
    *out = CaptureState::None;
    return on_stream(device, "is_capturing", handle, [&](auto& call, const StreamPtr& stream) {
      if (is_captured(*stream))
        *out = stream->capture->invalidated ? CaptureState::Invalidated : CaptureState::Active;
      return call.status;
    });
  }

  static DeviceStatus capture_id(Device* device, Stream handle, std::uint64_t* out) {
    *out = 0;
    return on_stream(device, "capture_id", handle, [&](auto& call, const StreamPtr& stream) {
      if (is_captured(*stream)) *out = stream->capture->id;
      return call.status;
    });
  }

  static DeviceStatus begin_capture(Device* device, Stream handle, CaptureMode mode) {
    return on_stream(device, "begin_capture", handle, [&](auto& call, const StreamPtr& stream) {
      if (handle == 0) return call.invalid("the legacy stream cannot be captured");
      if (is_captured(*stream)) return call.invalid("it is captured already");
      stream->capture = std::make_shared<Capture<Command>>();
      stream->capture->stream = handle;
      stream->capture->recording->branch_of(handle);
      call.begun(stream->capture, mode);
      return call.status;
    });
  }

  static DeviceStatus end_capture(Device* device, Stream handle, Graph* out) {
    return on_stream(device, "end_capture", handle, [&](auto& call, const StreamPtr& stream) {
      const auto capture = stream->capture;
      if (!is_captured(*stream))
        return call.invalid("the stream is not captured: call begin_capture() first");
      if (capture->stream != handle) {
        capture->invalidated = true;
        return call.invalid("the capture began with stream " + std::to_string(capture->stream) +
                            " and must end there; it is lost");
      }
      capture->active = false;
      const std::shared_ptr<const Recording<Command>> recording = std::move(capture->recording);
      call.ended(capture);
      if (capture->invalidated)
        return device_fails(DeviceStatus::Capturing,
                            "end_capture(): the capture was lost by an earlier call that a "
                            "capture does not allow: look for that call's error");
      if (!recording->is_joined()) return device_fails(DeviceStatus::Capturing, kNotJoined);
      *out = call.device->next_graph++;
      call.device->graphs[*out] = {recording, nullptr};
      return call.status;
    });
  }

  static DeviceStatus event_record_external(Device* device, Event event, Stream stream) {
    return external(device, "event_record_external", Kind::Record, stream, event);
  }
  static DeviceStatus stream_wait_external(Device* device, Stream stream, Event event) {
    return external(device, "stream_wait_external", Kind::WaitEvent, stream, event);
  }

  static DeviceStatus graph_launch(Device* device, Graph handle, Stream on) {
    return on_stream(device, "graph_launch", on, [&](auto& call, const StreamPtr& stream) {
      const auto found = call.device->graphs.find(handle);
      if (found == call.device->graphs.end())
        return call.invalid("the device has no graph " + std::to_string(handle));
      if (is_captured(*stream)) return device_fails(DeviceStatus::Unsupported, kGraphInGraph);
      const auto give = [&](const StreamPtr& to, Command command) {
        if (call.status == DeviceStatus::Ok) call.status = call.give(to, std::move(command));
      };
      auto& graph = found->second;
      const auto& recording = *graph.recording;
      std::vector<StreamPtr> branches{stream};
      while (branches.size() < recording.num_branches()) {
        const Stream own = add_stream(call.device, call.device->next_stream++, false);
        branches.push_back(call.device->streams[own]);
      }
      Command edge;  // launches of a graph come one after the other
      edge.event = std::make_shared<EventState>();
      if (graph.ended) {
        edge.kind = Kind::WaitEvent;
        edge.record = graph.ended;
        give(stream, edge);
      }
      GraphRun<Command, Record> run;
      for (const auto& one : recording.entries) give(branches[one.branch], run.of(one.command));
      edge.kind = Kind::Record;
      edge.record = graph.ended = std::make_shared<Record>();
      give(stream, edge);
      for (std::size_t i = 1; i < branches.size(); ++i) call.end_stream(branches[i]);
      return call.status;
    });
  }

  static DeviceStatus graph_destroy(Device* device, Graph handle) {
    return Side::enter(device, "graph_destroy", [&](auto& call) {
      if (call.refused()) return call.status;
      if (!call.device->graphs.erase(handle))
        return call.invalid("the device has no graph " + std::to_string(handle));
      return call.status;
    });
  }

  // Puts these calls, and what needs no device, into a device's table.
  static constexpr void put_into(DeviceApi& api) {
    api.stream_create = stream_create;
    api.stream_destroy = stream_destroy;
    api.event_create = event_create;
    api.timed_event_create = timed_event_create;
    api.event_destroy = event_destroy;
    api.event_record = event_record;
    api.stream_wait_event = stream_wait_event;
    api.write_value32 = write_value32;
    api.wait_value32_geq = wait_value32_geq;
    api.launch_reduce = launch_reduce;
    api.launch_copy = launch_copy;
    api.launch_scaled_sum = launch_scaled_sum;
    api.launch_divide = launch_divide;
    api.launch_boxes = launch_boxes;
    api.launch_host = launch_host;
    api.launch_foreign = launch_foreign;
    api.is_capturing = is_capturing;
    api.capture_id = capture_id;
    api.begin_capture = begin_capture;
    api.end_capture = end_capture;
    api.event_record_external = event_record_external;
    api.stream_wait_external = stream_wait_external;
    api.graph_launch = graph_launch;
    api.graph_destroy = graph_destroy;
    api.ipc_export = ipc_export;
    api.ipc_open = ipc_open;
    api.ipc_close = ipc_close;
    api.last_error = last_device_error;
    api.make_current = make_current_here;
  }

 private:
  // A handle as it lies in an IpcHandle.
  struct Ticket {
    std::uint64_t kind, id, base;
  };

  // A call about one stream, of a device that works.
  template <class Body>
  static DeviceStatus on_stream(Device* device, const char* name, Stream handle, Body body) {
    return Side::enter(device, name, [&](auto& call) {
      if (call.refused()) return call.status;
      const auto stream = call.stream(handle);
      return stream ? body(call, stream) : call.status;
    });
  }

  static DeviceStatus add_event(Device* device, const char* name, bool is_timed, Event* out) {
    return Side::enter(device, name, [&](auto& call) {
      if (call.refused()) return call.status;
      auto made = std::make_shared<EventState>();
      made->is_timed = is_timed;
      *out = call.device->next_event++;
      call.device->events[*out] = std::move(made);
      return call.status;
    });
  }

  static DeviceStatus flag_command(Device* device, const char* name, Kind kind, Stream handle,
                                   std::uint32_t* flag, std::uint32_t value) {
    return Side::enter(device, name, [&](auto& call) {
      if (call.refused()) return call.status;
      if (!device->memory_flags) return device_fails(DeviceStatus::Unsupported, kNoFlags);
      const auto stream = call.stream(handle);
      if (!stream) return call.status;
      if (reinterpret_cast<std::uint64_t>(flag) % sizeof(*flag))
        return call.invalid("the flag at " + hex(flag) + " is not aligned to 4 bytes");
      if (!call.on_device(flag, sizeof(*flag))) return call.status;
      Command command;
      command.kind = kind;
      command.dst = flag;
      command.nbytes = sizeof(*flag);
      command.value = value;
      call.knows_operands(command);
      return call.give(stream, std::move(command));
    });
  }

  static Command elementwise(Kind kind, DType dtype, void* dst, const void* src,
                             std::size_t count) {
    Command command;
    command.kind = kind;
    command.dtype = dtype;
    command.dst = dst;
    command.src = src;
    command.nbytes = count * item_size(dtype);
    return command;
  }

  static DeviceStatus launch(Device* device, const char* name, Command command, Stream handle) {
    return on_stream(device, name, handle, [&](auto& call, const StreamPtr& stream) {
      if (!call.on_device(command.dst, command.nbytes) ||
          !call.on_device(command.src, command.nbytes))
        return call.status;
      if (command.boxes && !call.on_device(command.boxes->table, command.boxes->table_nbytes))
        return call.status;
      if (!call.made_ready(command)) return call.status;
      call.knows_operands(command);
      return call.give(stream, std::move(command));
    });
  }

  static DeviceStatus external(Device* device, const char* name, Kind kind, Stream handle,
                               Event event) {
    return Side::enter(device, name, [&](auto& call) {
      if (call.refused()) return call.status;
      const auto state = call.event(event);
      const auto stream = state ? call.stream(handle) : nullptr;
      if (!stream) return call.status;
      if (!is_captured(*stream)) return call.invalid(kNotCaptured);
      Command command;
      command.kind = kind;
      command.event = command.external = state;
      return call.give(stream, std::move(command));
    });
  }
};

}  // namespace commrt::pretended
