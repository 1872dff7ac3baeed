// SPDX-License-Identifier: Apache-2.0
// Checksums of messages: a value that does not fit its own ends the operation on all ranks.
#include "engine/comm.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

size_t Op::tail_nbytes(size_t nbytes) const {
  return (ends_with_stamp(nbytes) ? sizeof(Stamp) : 0) + (comm->checksums ? sizeof(uint64_t) : 0);
}

// False: the operation has failed, and no rank takes its result for a right one.
bool Op::fits(const unsigned char* value, size_t nbytes, uint64_t sum, int peer) {
  if (checksum(value, nbytes) == sum) return true;
  const std::string why = "a message of " + std::to_string(nbytes) + " bytes from rank " +
                          std::to_string(peer) + " to rank " + std::to_string(comm->rank) +
                          " was damaged on its way: its checksum does not fit";
  by_damage = comm->is_damaged = true;
  comm->end_everywhere(seq, why);
  fail(why);
  return false;
}

}  // namespace commrt
