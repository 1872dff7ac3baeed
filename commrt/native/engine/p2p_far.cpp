// SPDX-License-Identifier: Apache-2.0
// Messages between nodes: packets that MPI is sending, and memory that a relay takes and fills.
#include "engine/p2p.hpp"

#include <iterator>
#include <utility>

#include "engine/comm.hpp"

namespace commrt {

// Forgets packets that MPI has sent. A long send is over with the last of its packets: MPI may need
// this rank for them, and a program that has its send behind it may not come back for long.
bool P2P::reap(int peer) {
  Channel& c = channels_[peer];
  bool any = false;
  for (auto it = c.mpi_sending.begin(); it != c.mpi_sending.end();) {
    MpiStatus status;
    int flag = 0;
    const int rc = comm_.off_node->test(&it->request, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Test", rc);
    if (!flag) {
      ++it;
      continue;
    }
    const auto op = std::move(it->op);
    it = c.mpi_sending.erase(it);
    any = true;
    if (op == nullptr) continue;
    P2PTask& task = *op->p2p;
    if (--task.leaving == 0 && task.moved == task.nbytes && !op->finished()) complete(op);
  }
  return any;
}

// A long message between nodes need not be cut and copied where a relay carries it: its memory
// is told to the relay as it is matched. 0: it comes in packets.
uint64_t P2P::expect_direct(const std::shared_ptr<Op>& op, int source, uint64_t nbytes) {
  const Link& link = comm_.link(source);
  const bool relayed = link.kind == LinkKind::Mpi && comm_.off_node->is_relay;
  if (!relayed || nbytes <= kPacketBytes) return 0;
  uint64_t where = 0;
  Direct one{{}, op};
  // An error is the peer's: the next packet to or from it says so, too.
  if (comm_.off_node->expect(op->p2p->recv_buffer, nbytes, link.mpi_rank, comm_.mpi_comm, &where,
                             &one.request) != 0) {
    return 0;
  }
  channels_[source].direct.push_back(std::move(one));
  return where;
}

// False: it goes in packets, as its peer has asked for that, or is lost.
bool P2P::send_direct(const std::shared_ptr<Op>& op, uint64_t where) {
  const P2PTask& task = *op->p2p;
  Direct one{{}, op};
  if (comm_.off_node->deliver(task.send_buffer, task.nbytes, comm_.link(task.peer).mpi_rank, where,
                              comm_.mpi_comm, &one.request) != 0) {
    return false;
  }
  channels_[task.peer].direct.push_back(std::move(one));
  return true;
}

// Ends what has left, or come.
bool P2P::settle_direct(int peer) {
  auto& all = channels_[peer].direct;
  bool any = false;
  for (auto it = all.begin(); it != all.end();) {
    MpiStatus status;
    int flag = 0;
    const int rc = comm_.off_node->test(&it->request, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Test", rc);
    if (!flag) {
      ++it;
      continue;
    }
    const auto op = std::move(it->op);
    it = all.erase(it);
    P2PTask& task = *op->p2p;
    task.moved = task.is_send ? task.nbytes : task.expected;
    if (task.is_send) {
      complete(op);
    } else {
      receiving_.erase(task.id);
      complete_received(op);
    }
    any = true;
  }
  return any;
}

}  // namespace commrt
