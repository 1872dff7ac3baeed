// SPDX-License-Identifier: Apache-2.0
// Messages among neighbours by NCCL: what leaves is packed, all messages of a phase are grouped, and
// what came is unpacked, all in one stream.
#include "library_calls/nccl_work.hpp"

namespace commrt {

int NcclWork::run_phases(const NcclPlan& plan, const std::vector<unsigned char*>& arrays,
                         Stream on, Stream other, double timeout_s) {
  const auto at = [&](int array, std::size_t offset) {
    return arrays[static_cast<std::size_t>(array)] + offset;
  };
  for (const NcclPhase& phase : plan.phases) {
    const auto pack = [&] {
      for (const StagedLaunch& one : phase.packs) launch(one, arrays, on);
    };
    const auto unpack = [&] {
      const Stream unpacks_on = has(NcclPlanted::UnpackOther) ? other : on;
      for (const StagedLaunch& one : phase.unpacks) launch(one, arrays, unpacks_on);
    };
    if (!has(NcclPlanted::PackLate)) pack();
    if (has(NcclPlanted::UnpackEarly)) unpack();
    for (const NcclPhase::Copy& one : phase.copies) {
      call(&DeviceApi::memcpy_async, at(one.to, one.to_at),
           static_cast<const void*>(at(one.from, one.from_at)), one.nbytes, on);
    }
    std::vector<NcclMessage> messages;
    messages.reserve(phase.messages.size());
    for (const NcclPart& one : phase.messages)
      messages.push_back({one.is_send, at(one.array, one.at), one.nbytes, one.peer});
    if (!messages.empty()) {
      const int code =
          native_->exchange(std::move(messages), reinterpret_cast<NcclStream>(on), timeout_s);
      if (code != kNcclSuccess) return code;
    }
    if (has(NcclPlanted::PackLate)) pack();
    if (!has(NcclPlanted::UnpackEarly)) unpack();
  }
  return kNcclSuccess;
}

void NcclWork::launch(const StagedLaunch& what, const std::vector<unsigned char*>& arrays,
                      Stream on) {
  BoxLaunch now = what.launch;
  now.buffer = arrays[static_cast<std::size_t>(what.buffer)];
  for (std::size_t i = 0; i < what.arrays.size(); ++i)
    now.arrays[i] = arrays[static_cast<std::size_t>(what.arrays[i])];
  check(device_->api->launch_boxes(device_, now, on));
}

}  // namespace commrt
