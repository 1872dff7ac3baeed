// SPDX-License-Identifier: Apache-2.0
// Runs a stream program and sends its messages by NCCL. Each round is one group of NCCL calls,
// commrt's own kernels run between the groups, and all of it is in one stream.
#pragma once

#include "device_calls/stream_program.hpp"
#include "nccl/nccl_comm.hpp"

namespace commrt {

// A call of the device failed; `failed` says how, last_error() why.
constexpr int kNcclDeviceFailed = -6;

// Gives it all to the stream and returns: an ncclResult_t, an NcclOutcome, or kNcclDeviceFailed.
// A failure or a deadline after the first group loses the communicator: peers wait for the rest.
int run_on_nccl(NcclComm& comm, const StreamProgram& program, Device* device,
                unsigned char* const* bases, Stream stream, double timeout_s,
                DeviceStatus* failed);

}  // namespace commrt
