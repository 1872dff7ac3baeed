// SPDX-License-Identifier: Apache-2.0
// Checksums of messages: a value that does not fit its own ends the operation on all ranks.
#include "engine/comm.hpp"
#include "engine/p2p.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

size_t Op::tail_nbytes(size_t nbytes) const {
  return (ends_with_stamp(nbytes) ? sizeof(Stamp) : 0) + (comm->checksums ? sizeof(uint64_t) : 0);
}

namespace {

std::string words_of_damage(uint64_t nbytes, int from, int to) {
  return "a message of " + std::to_string(nbytes) + " bytes from rank " + std::to_string(from) +
         " to rank " + std::to_string(to) + " was damaged on its way: its checksum does not fit";
}

}  // namespace

// False: the operation has failed, and no rank takes its result for a right one.
bool Op::fits(const unsigned char* value, size_t nbytes, uint64_t sum, int peer) {
  if (checksum(value, nbytes) == sum) return true;
  const std::string why = words_of_damage(nbytes, peer, comm->rank);
  by_damage = comm->is_damaged = true;
  comm->end_everywhere(seq, why);
  fail(why);
  return false;
}

// Returns the header by which a peer hears first of a message with a tag.
PacketHeader P2P::announcement(PacketKind kind, const P2PTask& task) const {
  uint64_t sum = 0;
  if (comm_.checksums) sum = task.has_sum ? task.sum : checksum(task.send_buffer, task.nbytes);
  return {kind, task.type, task.tag, task.nbytes, task.id, 0, sum};
}

// Ends a receive whose message is here: by an error where it does not fit its checksum.
void P2P::complete_received(const std::shared_ptr<Op>& op) {
  const P2PTask& task = *op->p2p;
  if (!comm_.checksums || checksum(task.recv_buffer, task.expected) == task.sum) {
    complete(op);
    return;
  }
  const std::string why = words_of_damage(task.expected, task.source, comm_.rank) + ", tag " +
                          std::to_string(task.tag);
  op->by_damage = comm_.is_damaged = true;
  complete(op, why);
  comm_.end_everywhere(comm_.next_seq, why);
}

}  // namespace commrt
