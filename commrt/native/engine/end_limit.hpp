// SPDX-License-Identifier: Apache-2.0
// Ends this process after a time, whatever its other threads do.
//
// MPI_Finalize and MPI_Abort may wait for hosts that cannot be reached any more, for ever, and no
// Python runs then.
#pragma once

#include <string>

namespace commrt {

// After so many seconds, writes the message to stderr and ends the process with the status.
void limit_end(double seconds, int status, std::string message);

}  // namespace commrt
