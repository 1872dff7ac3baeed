// SPDX-License-Identifier: Apache-2.0
// Picks operations, and injects faults into them.
#include "engine/chaos.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <unistd.h>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

namespace {

constexpr const char* kKinds[] = {"none",      "fail",    "delay", "drop",
                                  "duplicate", "corrupt", "kill",  "stop"};

const char* name_of(FaultKind kind) { return kKinds[static_cast<size_t>(kind)]; }

// The finalizer of SplitMix64.
uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

bool is_of_message(FaultKind kind) {
  return kind == FaultKind::Drop || kind == FaultKind::Duplicate || kind == FaultKind::Corrupt;
}

std::string said_late(double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "it starts %g s late", seconds);
  return text;
}

void flip_bit(unsigned char* value, size_t nbytes, uint64_t drawn) {
  const uint64_t bit = drawn % (nbytes * 8);
  value[bit / 8] = static_cast<unsigned char>(value[bit / 8] ^ (1u << (bit % 8)));
}

}  // namespace

std::string called(int code) {
  constexpr int kMessages = 87;  // a multi_sendrecv on a device
  if (code == kSendCode) return "send";
  if (code == kRecvCode) return "recv";
  if (code == kMessages) return "multi_sendrecv";
  const char* const name = name_of_call(code);
  return name != nullptr ? name : "an operation";
}

Chaos::Chaos(uint64_t seed, int rank, std::vector<FaultRule> rules)
    : seed_(mixed(mixed(seed) ^ static_cast<uint64_t>(rank))), rank_(rank) {
  for (FaultRule& rule : rules) rules_.push_back({std::move(rule)});
}

bool Chaos::picks(Counted& counted, size_t index) const {
  const FaultRule& rule = counted.rule;
  const uint64_t seen = ++counted.seen;
  if (rule.most != 0 && counted.fired >= rule.most) return false;
  if (rule.number != 0) return seen == rule.number;
  if (rule.every != 0) return seen % rule.every == 0;
  // Each rule draws for itself, so that it picks the same whatever others are there.
  const uint64_t drawn = mixed(mixed(seed_ ^ mixed(index + 1)) ^ seen);
  return static_cast<double>(drawn >> 11) * 0x1p-53 < rule.chance;
}

std::shared_ptr<Fault> Chaos::next(int code, const std::string& what) {
  std::shared_ptr<Fault> found;
  for (size_t i = 0; i < rules_.size(); ++i) {
    Counted& counted = rules_[i];
    const FaultRule& rule = counted.rule;
    const auto& codes = rule.codes;
    if (!codes.empty() && std::find(codes.begin(), codes.end(), code) == codes.end()) continue;
    // A message is lost or damaged where it is sent.
    if (code == kRecvCode && is_of_message(rule.kind)) continue;
    if (!picks(counted, i) || found != nullptr) continue;
    ++counted.fired;
    found = std::make_shared<Fault>();
    found->kind = rule.kind;
    found->seconds = rule.seconds;
    found->drawn = mixed(seed_ ^ mixed(counted.seen * 31 + i));
    found->rule = rule.text;
    found->what = what;
  }
  if (found != nullptr) ++num_injected_;
  return found;
}

void Chaos::log(const Fault& fault, const std::string& more) const {
  std::string line = "commrt chaos: rank " + std::to_string(rank_) + ": " + name_of(fault.kind) +
                     ": " + fault.what + (more.empty() ? "" : ": " + more) + " (" + fault.rule +
                     ")\n";
  // At once and in one piece: the process may end here.
  const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  static_cast<void>(written);
}

void Chaos::settle(const Fault& fault) const {
  if (!fault.done) log(fault, "not injected, as this rank had no message to send in it");
}

std::string Chaos::why(const Fault& fault) {
  return "COMMRT_CHAOS has injected this failure (" + fault.rule + ")";
}

bool Chaos::strike_process(const Fault& fault) const {
  const bool kills = fault.kind == FaultKind::Kill;
  if (!kills && fault.kind != FaultKind::Stop) return true;
  log(fault);
  ::kill(::getpid(), kills ? SIGKILL : SIGSTOP);
  return false;
}

void Comm::inject(Op& op) {
  const std::string what =
      called(op.plan->coll) + " #" + std::to_string(op.seq) + " on " + name;
  const std::shared_ptr<Fault> fault = chaos->next(op.plan->coll, what);
  if (fault == nullptr || !chaos->strike_process(*fault)) return;
  op.timed_from = 0;  // its time says nothing of its plan
  switch (fault->kind) {
    case FaultKind::Fail: {
      chaos->log(*fault);
      const std::string why = Chaos::why(*fault);
      op.by_mpi = true;
      end_everywhere(op.seq, why);
      op.fail(why);
      return;
    }
    case FaultKind::Delay:
      chaos->log(*fault, said_late(fault->seconds));
      op.gate.until_s = now_s() + fault->seconds;
      return;
    case FaultKind::Drop:
      chaos->log(*fault, "nothing of it leaves this rank");
      op.gate.until_s = std::numeric_limits<double>::infinity();
      return;
    default:
      op.fault = fault;
      op.in_place_ = op.out_place_ = 0;  // as if its arrays were ordinary ones
      if (op.plan->native) op.damage_input();
  }
}

// Flips a bit of a message that is about to leave.
void Op::damage(unsigned char* value, size_t nbytes) {
  if (fault->kind != FaultKind::Corrupt || fault->done || nbytes == 0) return;
  flip_bit(value, nbytes, fault->drawn);
  fault->done = true;
  comm->chaos->log(*fault, "a bit of " + std::to_string(nbytes) + " bytes flips on their way");
}

// A library's collective sends what it likes, so its input is damaged.
void Op::damage_input() {
  const Plan& p = *plan;
  const size_t nbytes = static_cast<size_t>(p.in_elems) * p.itemsize;
  const bool in_place = static_cast<const void*>(in) == static_cast<void*>(out);
  const bool is_there = gate.opened == nullptr && in != nullptr && nbytes != 0;
  const bool sends = !call_has_root(p.coll) || p.root != comm->rank || !in_place;
  if (fault->kind != FaultKind::Corrupt || !is_there || !sends) return;
  if (in_place) {  // the result goes there in any case
    damage(out, nbytes);
    return;
  }
  fault->copy.reset(new unsigned char[nbytes]);
  std::memcpy(fault->copy.get(), in, nbytes);
  damage(fault->copy.get(), nbytes);
  in = fault->copy.get();
}

// Sends a message a second time: it comes in the place of the next one. Only behind the last that
// this rank has for the peer so far, as later ones have their places already.
void Op::repeat_message(int peer, uint64_t id) {
  if (fault->kind != FaultKind::Duplicate || fault->done) return;
  Link& link = comm->link(peer);
  const uint64_t again = id + 1;
  if (link.next_out != again) return;
  if (link.kind == LinkKind::Shared) {
    if (!link.line_free(again)) return;
    publish(link.out_lines[again & (kLines - 1)], again + mark(), true, 0, 0);
    comm->ring(peer);
  } else {
    if (link.mpi_out != again) return;
    const Stamp stamp{again + mark(), 0};
    MpiSend& send = mpi_sends_.emplace_back();
    send.peer = peer;
    send.staging.reset(new unsigned char[sizeof stamp]);
    std::memcpy(send.staging.get(), &stamp, sizeof stamp);
    const int rc = comm->off_node->isend(send.staging.get(), static_cast<int>(sizeof stamp),
                                         comm->off_node->byte_type, link.mpi_rank, comm->mpi_tag,
                                         comm->mpi_comm, &send.request);
    if (rc != 0) {
      static_cast<void>(send.staging.release());
      mpi_sends_.pop_back();
      return;
    }
    ++link.mpi_out;
  }
  ++link.next_out;
  fault->done = true;
  comm->chaos->log(*fault, "its message to rank " + std::to_string(peer) + " goes twice");
}

// True if the message is over, or on its way.
bool P2P::strike(const std::shared_ptr<Op>& op) {
  P2PTask& task = *op->p2p;
  const int code = task.is_send ? kSendCode : kRecvCode;
  const std::string what = called(code) + " #" + std::to_string(op->seq) + " " +
                           whom(*op) + ", on " + comm_.name;
  const std::shared_ptr<Fault> fault = comm_.chaos->next(code, what);
  if (fault == nullptr || !comm_.chaos->strike_process(*fault)) return false;
  switch (fault->kind) {
    case FaultKind::Fail: {
      comm_.chaos->log(*fault);
      const std::string why = Chaos::why(*fault);
      op->by_mpi = true;
      complete(op, why);
      comm_.end_everywhere(comm_.next_seq, why);
      for (int peer = 0; peer < comm_.size; ++peer) {  // this rank may make no call for long
        if (comm_.link(peer).kind == LinkKind::Mpi) flush(peer);
      }
      return true;
    }
    case FaultKind::Delay:
      comm_.chaos->log(*fault, said_late(fault->seconds));
      task.gate.until_s = now_s() + fault->seconds;
      return false;
    case FaultKind::Drop:  // as one that is lost on its way: its sender does not know
      comm_.chaos->log(*fault, "it is lost on its way");
      complete(op);
      return true;
    case FaultKind::Corrupt:
      if (task.nbytes == 0) return false;
      fault->copy.reset(new unsigned char[task.nbytes]);
      std::memcpy(fault->copy.get(), task.send_buffer, task.nbytes);
      flip_bit(fault->copy.get(), task.nbytes, fault->drawn);
      task.sum = checksum(task.send_buffer, task.nbytes);
      task.has_sum = true;
      task.send_buffer = fault->copy.get();
      op->fault = fault;
      comm_.chaos->log(*fault, "a bit of " + std::to_string(task.nbytes) + " bytes flips on their way");
      return false;
    case FaultKind::Duplicate: {
      Message message{nullptr, task.nbytes, task.peer, task.tag, task.type, false};
      const auto again = make(true, message);
      fault->copy.reset(new unsigned char[task.nbytes + 1]);
      std::memcpy(fault->copy.get(), task.send_buffer, task.nbytes);
      again->p2p->send_buffer = fault->copy.get();
      again->fault = fault;
      number(*again);
      comm_.chaos->log(*fault, "it goes twice");
      queue(op);
      queue(again);
      return true;
    }
    default: return false;
  }
}

}  // namespace commrt
