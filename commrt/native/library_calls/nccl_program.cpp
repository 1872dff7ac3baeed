// SPDX-License-Identifier: Apache-2.0
#include "library_calls/nccl_program.hpp"

#include <algorithm>

namespace commrt {

int run_on_nccl(NcclComm& comm, const StreamProgram& program, Device* device,
                unsigned char* const* bases, Stream stream, double timeout_s,
                DeviceStatus* failed) {
  *failed = DeviceStatus::Ok;
  const auto handle = reinterpret_cast<NcclStream>(static_cast<std::uintptr_t>(stream));
  return comm.alone(timeout_s, [&](NcclComm::Clock::time_point deadline) {
    std::vector<NcclMessage> group;
    bool is_begun = false;
    auto groups_left = std::count_if(
        program.commands.begin(), program.commands.end(),
        [](const StreamCommand& one) { return one.step == StreamStep::EndGroup; });
    for (const StreamCommand& one : program.commands) {
      const bool is_send = one.step == StreamStep::Send;
      if (is_send || one.step == StreamStep::Recv) {
        unsigned char* at = is_send ? bases[one.src_base] + one.src_offset
                                    : bases[one.dst_base] + one.dst_offset;
        group.push_back({is_send, at, static_cast<size_t>(one.nbytes),
                         static_cast<int>(one.peer)});
        continue;
      }
      if (one.step == StreamStep::EndGroup) {
        const int code = comm.group(group, handle, deadline);
        is_begun = true;
        --groups_left;
        group.clear();
        if (code != kNcclSuccess) {
          // Peers wait for the rounds that will not come.
          if (code < 0 && groups_left > 0) comm.lose();
          return code;
        }
        continue;
      }
      *failed = program.work(device, one, bases, stream);
      if (*failed != DeviceStatus::Ok) {
        if (is_begun || groups_left > 0) comm.lose();
        return kNcclDeviceFailed;
      }
    }
    return static_cast<int>(kNcclSuccess);
  });
}

}  // namespace commrt
