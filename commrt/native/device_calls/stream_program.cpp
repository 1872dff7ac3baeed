// SPDX-License-Identifier: Apache-2.0
// Commands of a stream's program: what is allowed, and the launches they are.
#include "device_calls/stream_program.hpp"

#include <algorithm>

#include "devices/scaled_launch.hpp"

namespace commrt {

const char* const kStreamStepNames[kNumStreamSteps] = {
    "copy", "reduce",    "scale", "divide",  "send",   "recv",
    "end_group", "begin", "publish", "await", "release"};

std::size_t StreamProgram::memory_nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  return sizeof *this + of(commands) + of(extents) + of(sent) + of(received);
}

const char* StreamProgram::problem() {
  extents.assign(static_cast<std::size_t>(kFirstPeerBase + size), 0);
  sent.assign(static_cast<std::size_t>(size), 0);
  received.assign(static_cast<std::size_t>(size), 0);
  parts = 0;
  const auto touches = [this](std::int64_t base, std::int64_t offset, std::int64_t nbytes) {
    if (base < 0 || base >= static_cast<std::int64_t>(extents.size()) || offset < 0) return false;
    auto& extent = extents[static_cast<std::size_t>(base)];
    extent = std::max(extent, static_cast<std::size_t>(offset + nbytes));
    return true;
  };
  bool in_group = false;
  for (const StreamCommand& one : commands) {
    const auto number = static_cast<std::int64_t>(one.step);
    if (number < 0 || number >= kNumStreamSteps) return "no such step";
    if (one.nbytes < 0) return "a negative length";
    const bool is_message = one.step == StreamStep::Send || one.step == StreamStep::Recv;
    const bool has_dst = one.step <= StreamStep::Divide || one.step == StreamStep::Recv;
    const bool has_src = one.step <= StreamStep::Scale || one.step == StreamStep::Send;
    if (in_group && !is_message && one.step != StreamStep::EndGroup)
      return "work inside a group of messages";
    in_group = is_message;
    if (has_dst && !touches(one.dst_base, one.dst_offset, one.nbytes)) return "no such target";
    if (has_src && !touches(one.src_base, one.src_offset, one.nbytes)) return "no such source";
    const bool has_op = one.step == StreamStep::Reduce;
    if (has_op && (one.peer < 0 || one.peer >= kNumRedOps ||
                   combine_for(dtype, static_cast<RedOp>(one.peer)) == nullptr))
      return "the reduction is not defined for the type";
    if (one.step == StreamStep::Scale && why_no_scaled_sum(dtype, kWithoutDst)) return "no factor";
    if (one.step == StreamStep::Divide && why_no_divide(dtype, divisor)) return "no quotient";
    const bool has_peer = is_message || one.step >= StreamStep::Publish;
    if (has_peer && (one.peer < 0 || one.peer >= size)) return "no such peer";
    const auto peer = static_cast<std::size_t>(one.peer);
    if (one.step == StreamStep::Begin) ++parts;
    if (one.step == StreamStep::Publish && one.number != ++sent[peer])
      return "messages are not published one after the other";
    if (one.step == StreamStep::Await) {
      if (one.number <= received[peer]) return "messages are not awaited one after the other";
      received[peer] = one.number;
    }
  }
  return in_group ? "a group does not end" : nullptr;
}

DeviceStatus StreamProgram::work(Device* device, const StreamCommand& one,
                                 unsigned char* const* bases, Stream stream) const {
  const auto nbytes = static_cast<std::size_t>(one.nbytes);
  unsigned char* dst = bases[one.dst_base] + one.dst_offset;
  const unsigned char* src = bases[one.src_base] + one.src_offset;
  const DeviceApi& api = *device->api;
  switch (one.step) {
    case StreamStep::Copy:
      // in[i] to out[i] of an operation that works in place
      if (dst == src) return DeviceStatus::Ok;
      return api.launch_copy(device, dst, src, nbytes, stream);
    case StreamStep::Reduce:
      return api.launch_reduce(device, static_cast<RedOp>(one.peer), dtype, dst, src,
                               nbytes / itemsize, stream);
    case StreamStep::Scale:
      return api.launch_scaled_sum(device, dtype, dst, src, nbytes / itemsize,
                                   kScaleSrc | kWithoutDst, factor, stream);
    case StreamStep::Divide:
      return api.launch_divide(device, dtype, dst, nbytes / itemsize, divisor, stream);
    default: return DeviceStatus::Ok;
  }
}

}  // namespace commrt
