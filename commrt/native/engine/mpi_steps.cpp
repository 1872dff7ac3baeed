// SPDX-License-Identifier: Apache-2.0
// The parts of an operation that go through MPI: messages of a schedule to other nodes, and
// the library's own collectives. Nothing here blocks inside MPI.
//
// MPI delivers messages of one pair and tag in order. Ids of a pair are therefore posted in
// order, on both sides, and need no place in the tag.
#include <algorithm>
#include <cstring>

#include "engine/backoff.hpp"
#include "engine/collective_codes.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

// True once a receive has ended; then `end` says how.
bool has_ended(const MpiApi& api, MpiRequest& request, MpiEnd& end) {
  if (end.known) return true;
  MpiStatus status;
  int flag = 0;
  end.code = api.test(&request, &flag, &status);
  if (end.code == 0 && !flag) return false;
  end.known = true;
  if (end.code != 0) return true;
  int cancelled = 0;
  if (end.may_be_cancelled) api.test_cancelled(&status, &cancelled);
  end.cancelled = cancelled != 0;
  if (!end.cancelled) end.count_code = api.get_count(&status, api.byte_type, &end.count);
  return true;
}

bool Op::over_mpi(const Ref& ref) const {
  return ref.is_message && comm->link(rank_of(ref)).kind == LinkKind::Mpi;
}

unsigned char* Op::start_of(const Instr& ins, const Ref& ref, int64_t fragment) const {
  const auto& at = plan->spaces[ref.space].offsets;
  const int64_t lo = at[ref.lo];
  const int64_t cut = plan->fragments == 1 ? 0 : plan->cut(ins, at[ref.lo + 1] - lo, fragment);
  return const_cast<unsigned char*>(base(ref.space)) +
         static_cast<size_t>(lo + cut) * plan->itemsize;
}

void Op::fail_mpi(const char* function, int code, const std::string& what, int peer) {
  const std::string died = comm->who_died(peer, MpiFailures::is_failure(code));
  if (!died.empty()) {
    if (!is_over()) {  // a rank that has refused the call, and has left since, has said so before
      comm->p2p->look_closely();
      comm->p2p->progress();
      if (is_over()) return;
      if (comm->p2p->fail_after_last_words(*this)) return;
    }
    by_death = true;
    return fail(what + ": " + died);
  }
  const std::string why = what + ": " + comm->off_node->describe(function, code);
  by_death = MpiFailures::is_failure(code);
  given_up = MpiFailures::is_revocation(code);
  by_mpi = !by_death && !given_up;
  comm->break_down(why, by_death);
  fail(by_mpi ? why + "; " + kAfterMpiFailure : why);
}

// Posts the receives that may be posted: ids of a pair in their order, whatever instructions they
// belong to. True if all are posted. The call may fail the operation.
bool Op::all_posted(MpiStep& step, const Instr& ins, int64_t fragment, size_t nbytes) {
  bool all = true;
  for (MpiInput& one : step.inputs) {
    if (one.posted) continue;
    const Ref& ref = ins.inputs[one.index];
    Link& link = comm->link(rank_of(ref));
    if (link.mpi_in != in_id(ref, fragment)) {
      all = false;
      continue;
    }
    auto post = [&](void* to, size_t length, MpiRequest& request) {
      const int rc = comm->off_node->irecv(to, static_cast<int>(length), comm->off_node->byte_type,
                                           link.mpi_rank, comm->mpi_tag, comm->mpi_comm, &request);
      if (rc == 0) return true;
      fail_mpi("MPI_Irecv", rc, "no message from rank " + std::to_string(rank_of(ref)), rank_of(ref));
      return false;
    };
    if (one.stamp != nullptr && !one.stamp_posted) {
      if (!post(one.stamp.get(), sizeof(Stamp), one.stamp_request)) return false;
      one.stamp_posted = true;
    }
    const size_t length = nbytes + tail_nbytes(nbytes);
    if (!post(step.sources[one.index], length, one.request)) return false;
    one.posted = true;
    ++link.mpi_in;
  }
  return all;
}

// MPI may write to where this message belongs at any time.
void Op::hold(MpiInput& one) {
  if (one.staging == nullptr) held = true;
  static_cast<void>(one.staging.release());
  static_cast<void>(one.stamp.release());
}

// False: the message is of another call, or of another length, and the operation has failed.
bool Op::is_stamped_so(const Stamp& stamp, const Ref& ref, int64_t fragment, size_t nbytes) {
  const uint64_t id = in_id(ref, fragment);
  if (stamp.word != id + mark()) {
    // A rank whose call was refused has said so before it sent anything else.
    comm->p2p->look_closely();
    comm->p2p->progress();
    if (is_over()) return false;
    fail(describe_marks(rank_of(ref), stamp.word - id, comm->rank, mark(), seq));
  } else if (stamp.nbytes != nbytes) {
    fail_by_length(rank_of(ref), nbytes);
  }
  return !is_over();
}

// True if there is a message that takes the place of one of a call that its sender has left.
bool Op::is_empty_message(const MpiEnd& end, const void* at, uint64_t id) const {
  if (end.count != static_cast<int>(sizeof(Stamp))) return false;
  Stamp stamp;
  std::memcpy(&stamp, at, sizeof stamp);
  return stamp.nbytes == kNoMessage && stamp.word == id + mark();
}

void Op::fail_by_length(int peer, size_t expected) {
  fail("rank " + std::to_string(peer) + " sent a message of another length than the " +
       std::to_string(expected) + " bytes expected here: the ranks called with different arguments");
}

// True once every posted message has come with the length that is expected here. The call may fail
// the operation.
bool Op::all_arrived(MpiStep& step, const Instr& ins, int64_t fragment, size_t nbytes) {
  bool all = true;
  for (MpiInput& one : step.inputs) {
    const Ref& ref = ins.inputs[one.index];
    const int rank = rank_of(ref);
    if (one.is_empty) {
      all = false;
      continue;
    }
    // Waits for a message of at most `length` bytes, to be found at `at`; false: it is not there,
    // or it is not so long.
    auto has_come = [&](MpiRequest& request, MpiEnd& end, bool& done, size_t length, const void* at) {
      auto lost = [&](const char* function, int code) {
        fail_mpi(function, code, "no message from rank " + std::to_string(rank), rank);
        return false;
      };
      if (!has_ended(*comm->off_node, request, end)) {
        all = false;
        return false;
      }
      done = true;
      if (end.code != 0 && !comm->off_node->is_truncation(end.code)) {
        hold(one);  // nobody knows whether the request has ended
        return lost("MPI_Test", end.code);
      }
      if (end.count_code != 0) return lost("MPI_Get_count", end.count_code);
      if (end.cancelled) {
        fail("a receive from rank " + std::to_string(rank) + " could not be posted again");
        return false;
      }
      if (is_empty_message(end, at, in_id(ref, fragment))) {
        // Whoever refused the call has said so; that may be on its way.
        one.is_empty = true;
        all = false;
        comm->p2p->look_closely();
        return false;
      }
      if (end.count == static_cast<int>(length)) return true;
      fail_by_length(rank, nbytes);
      return false;
    };
    if (one.stamp_posted && !one.stamp_done) {
      const bool here =
          has_come(one.stamp_request, one.stamp_end, one.stamp_done, sizeof(Stamp), one.stamp.get()) &&
          is_stamped_so(*one.stamp, ref, fragment, nbytes);
      if (is_over()) return false;
      if (!here) continue;
    }
    if (!one.posted || one.done) continue;
    const bool stamped = ends_with_stamp(nbytes);
    const unsigned char* const at = step.sources[one.index];
    const bool here = has_come(one.request, one.end, one.done, nbytes + tail_nbytes(nbytes), at);
    if (here && stamped) {
      Stamp stamp;
      std::memcpy(&stamp, at + nbytes, sizeof stamp);
      is_stamped_so(stamp, ref, fragment, nbytes);
    }
    if (here && comm->checksums && !is_over()) {
      uint64_t sum;
      std::memcpy(&sum, at + nbytes + tail_nbytes(nbytes) - sizeof sum, sizeof sum);
      fits(at, nbytes, sum, rank);
    }
    if (is_over()) return false;
  }
  return all;
}

// True once MPI needs none of the messages sent so far any more.
bool Op::all_sent() {
  for (auto it = mpi_sends_.begin(); it != mpi_sends_.end();) {
    MpiStatus status;
    int flag = 0;
    const int rc = comm->off_node->test(&it->request, &flag, &status);
    if (rc != 0 && !was_refused) {
      fail_mpi("MPI_Test", rc, "a message was not sent", it->peer);
      return false;
    }
    // Of a refused call, nobody misses it.
    it = flag || rc != 0 ? mpi_sends_.erase(it) : std::next(it);
  }
  return mpi_sends_.empty();
}

// Cancels receives, so that MPI writes no more where that can be prevented. Memory that MPI may
// still read or write is kept for ever.
void Op::abandon_mpi() {
  for (auto& [position, step] : mpi_steps_) {
    for (MpiInput& one : step.inputs) {
      // A receive that has no message yet ends at once when it is cancelled.
      auto ends = [&](MpiRequest& request, bool& done) {
        comm->off_node->cancel(&request);
        MpiStatus status;
        int flag = 0;
        for (int tries = 0; tries < 1000 && !flag; ++tries) {
          if (comm->off_node->test(&request, &flag, &status) != 0) break;
        }
        done = true;
        return flag != 0;
      };
      if (one.stamp_posted && !one.stamp_done && !ends(one.stamp_request, one.stamp_done)) {
        static_cast<void>(one.stamp.release());
      }
      if (one.posted && !one.done && !ends(one.request, one.done)) hold(one);
    }
  }
  for (MpiSend& send : mpi_sends_) {
    MpiStatus status;
    int flag = 0;
    if (comm->off_node->test(&send.request, &flag, &status) == 0 && flag) continue;
    if (send.staging == nullptr) held = true;
    static_cast<void>(send.staging.release());
  }
  if (native_started_) held = true;
  if (held && in_flight != nullptr) static_cast<void>(new std::shared_ptr<InFlight>(in_flight));
  if (held && fault != nullptr) static_cast<void>(new std::shared_ptr<Fault>(fault));
  if (held) static_cast<void>(tmp_storage.release());
}

// Everything that the instruction's messages need, before any is posted.
MpiStep Op::prepare_mpi(const Instr& ins, int64_t fragment, size_t nbytes, bool one_piece) {
  MpiStep step;
  step.sources.assign(ins.inputs.size(), nullptr);
  const bool direct = one_piece && !ins.boxed && ins.inputs.size() == 1 &&
                      ins.local_outs.size() == 1 && ins.sends.empty() && !ends_with_stamp(nbytes) &&
                      !comm->checksums;
  for (size_t i = 0; i < ins.inputs.size(); ++i) {
    if (!over_mpi(ins.inputs[i])) continue;
    MpiInput& one = step.inputs.emplace_back();
    one.index = i;
    if (follows_stamp(nbytes, fragment)) one.stamp = std::make_unique<Stamp>();
    if (direct) {
      step.sources[i] = start_of(ins, ins.local_outs[0], fragment);
    } else {
      one.staging.reset(new unsigned char[nbytes + sizeof(Stamp) + sizeof(uint64_t)]);
      step.sources[i] = one.staging.get();
    }
  }
  return step;
}

// The length of one fragment of an instruction's value.
size_t Op::nbytes_of(const Instr& ins, int64_t fragment) const {
  const Plan& p = *plan;
  if (p.fragments == 1) return static_cast<size_t>(ins.elems) * p.itemsize;
  const Ref* shape = nullptr;
  for (const Ref& ref : ins.inputs) if (!ref.is_message) shape = &ref;
  for (const Ref& ref : ins.local_outs) shape = &ref;
  const auto& offsets = p.spaces[shape->space].offsets;
  size_t nbytes = 0;
  for (int b = shape->lo; b < shape->hi; ++b) {
    const int64_t len = offsets[b + 1] - offsets[b];
    nbytes += static_cast<size_t>(p.cut(ins, len, fragment + 1) - p.cut(ins, len, fragment)) * p.itemsize;
  }
  return nbytes;
}

// Receives what the instruction needs, computes, and sends. A send is done once posted: the
// schedule may rely on messages being buffered, so what is sent is copied, unless nothing
// can overwrite it before the operation ends. True also where the operation has failed.
bool Op::run_mpi(int64_t fragment, int index) {
  const Plan& p = *plan;
  const Instr& ins = p.instrs[index];
  const uint64_t pos =
      static_cast<uint64_t>(fragment) * p.instrs.size() + static_cast<uint64_t>(index);
  auto crosses = [this](const Ref& ref) { return over_mpi(ref); };
  if (comm->refusals.disturb()) {
    const auto waits = [&](const Ref& ref) {
      return over_mpi(ref) && comm->refusals.afar.hold_back(rank_of(ref), seq);
    };
    if (std::any_of(ins.inputs.begin(), ins.inputs.end(), waits) ||
        std::any_of(ins.sends.begin(), ins.sends.end(), waits)) {
      return false;
    }
  }

  // The slice where this fragment of the value lies, if it is in one piece.
  const Ref* shape = nullptr;
  for (const Ref& ref : ins.inputs) if (!ref.is_message) shape = &ref;
  for (const Ref& ref : ins.local_outs) shape = &ref;
  const bool one_piece = p.fragments == 1 || shape->hi - shape->lo == 1;
  const size_t nbytes = nbytes_of(ins, fragment);

  auto it = mpi_steps_.find(pos);
  if (it == mpi_steps_.end()) {
    it = mpi_steps_.emplace(pos, prepare_mpi(ins, fragment, nbytes, one_piece)).first;
  }
  MpiStep& step = it->second;
  const bool posted = all_posted(step, ins, fragment, nbytes);
  const bool arrived = !is_over() && all_arrived(step, ins, fragment, nbytes);
  if (is_over()) return true;
  if (!posted || !arrived || !inputs_arrived(ins, fragment) || !outputs_free(ins, fragment)) {
    return is_over();
  }
  const bool any_mpi_send = std::any_of(ins.sends.begin(), ins.sends.end(), crosses);
  for (const Ref& ref : ins.sends) {
    if (over_mpi(ref) && comm->link(rank_of(ref)).mpi_out != out_id(ref, fragment)) return false;
  }
  // A few fragments may be on their way; one must, see above.
  if (any_mpi_send && !mpi_sends_.empty() && mpi_sends_.front().fragment + p.depth <= fragment &&
      !all_sent() && (is_over() || mpi_sends_.front().fragment + p.depth <= fragment)) {
    return is_over();
  }
  const bool only_mpi_sends = std::all_of(ins.sends.begin(), ins.sends.end(), crosses);
  if (!(ins.local_outs.empty() && any_mpi_send && only_mpi_sends)) {
    if (!value_ready(ins, fragment, index, step.sources.data())) return is_over();
    compute_and_send(ins, fragment, step.sources.data());
    if (is_over()) return true;
  }
  const Ref& source = ins.local_outs.empty() ? ins.inputs[0] : ins.local_outs[0];
  const bool stays = one_piece && !ins.boxed && !ends_with_stamp(nbytes) &&
                     ins.local_outs.empty() && ins.scaled() == nullptr && !source.is_message && p.spaces[source.space].kind == SpaceKind::In &&
                     static_cast<const void*>(in) != static_cast<void*>(out) && fault == nullptr && !comm->checksums;
  for (const Ref& ref : ins.sends) {
    if (!over_mpi(ref)) continue;
    const uint64_t id = out_id(ref, fragment);
    if (id == out_base_[ref.peer]) {
      comm->refusals.afar.note_first(rank_of(ref), seq, p.peers[ref.peer].num_sends());
    }
    const Stamp stamp{id + mark(), nbytes};
    if (follows_stamp(nbytes, fragment)) {
      std::unique_ptr<unsigned char[]> before(new unsigned char[sizeof stamp]);
      std::memcpy(before.get(), &stamp, sizeof stamp);
      const unsigned char* const at = before.get();
      if (!post_send(ref, fragment, at, sizeof stamp, std::move(before), true)) return true;
    }
    if (stays) {
      if (!post_send(ref, fragment, start_of(ins, source, fragment), nbytes, nullptr)) return true;
    } else {
      const size_t length = nbytes + tail_nbytes(nbytes);
      std::unique_ptr<unsigned char[]> staging(new unsigned char[length]);
      unsigned char* const at = staging.get();
      pack(ins, fragment, at);
      if (comm->checksums) {
        const uint64_t sum = checksum(at, nbytes);
        std::memcpy(at + length - sizeof sum, &sum, sizeof sum);
      }
      if (fault != nullptr) damage(at, nbytes);
      if (ends_with_stamp(nbytes)) std::memcpy(at + nbytes, &stamp, sizeof stamp);
      if (!post_send(ref, fragment, at, length, std::move(staging))) return true;
    }
    ++comm->link(rank_of(ref)).mpi_out;
    if (fault != nullptr) repeat_message(rank_of(ref), id);
    if (is_over()) return true;
  }
  mpi_steps_.erase(it);
  return true;
}

// Gives MPI a message. `staging`, if there is one, has the value. `has_next`: another message to
// the same rank follows at once. False: the operation has failed.
bool Op::post_send(const Ref& ref, int64_t fragment, const unsigned char* value, size_t nbytes,
                   std::unique_ptr<unsigned char[]> staging, bool has_next) {
  MpiSend& send = mpi_sends_.emplace_back();
  send.fragment = fragment;
  send.peer = rank_of(ref);
  send.staging = std::move(staging);
  const MpiApi& api = *comm->off_node;
  const auto isend = has_next && api.isend_before_next != nullptr ? api.isend_before_next : api.isend;
  const int rc = isend(value, static_cast<int>(nbytes), api.byte_type,
                       comm->link(rank_of(ref)).mpi_rank, comm->mpi_tag, comm->mpi_comm,
                       &send.request);
  if (rc == 0) {
    comm->refusals.afar.count_sent(send.peer);
    return true;
  }
  static_cast<void>(send.staging.release());
  mpi_sends_.pop_back();  // it has no request that could be tested
  fail_mpi("MPI_Isend", rc, "no message to rank " + std::to_string(rank_of(ref)), rank_of(ref));
  return false;
}

// Writes this fragment of a local slice, scaled where asked, to contiguous memory.
void Op::pack(const Instr& ins, int64_t fragment, unsigned char* to) {
  if (ins.boxed) return pack_boxes(ins, to, false);
  const Plan& p = *plan;
  const Ref& ref = ins.local_outs.empty() ? ins.inputs[0] : ins.local_outs[0];
  const bool scale = ins.local_outs.empty() && ins.scaled() != nullptr;
  const auto& at = p.spaces[ref.space].offsets;
  for (int b = ref.lo; b < ref.hi; ++b) {
    const int64_t len = at[b + 1] - at[b];
    const int64_t from = p.cut(ins, len, fragment);
    const size_t elems = static_cast<size_t>(p.cut(ins, len, fragment + 1) - from);
    const void* source = base(ref.space) + static_cast<size_t>(at[b] + from) * p.itemsize;
    if (elems == 0) continue;
    if (scale) {
      p.combine(to, nullptr, &source, 1, elems, ins.scaled(), p.factor, Store::Plain);
    } else {
      std::memcpy(to, source, elems * p.itemsize);
    }
    to += elems * p.itemsize;
  }
}

constexpr const char* kFunctions[] = {"MPI_Iallreduce", "MPI_Ireduce",
                                      "MPI_Ibcast",     "MPI_Iallgather",
                                      "MPI_Ireduce_scatter_block", "MPI_Ialltoall",
                                      "MPI_Igather",    "MPI_Iscatter",
                                      "MPI_Ibarrier",   "MPI_Iscan",
                                      "MPI_Iexscan",   "MPI_Iallgatherv",
                                      "MPI_Ialltoallv", "MPI_Igatherv",
                                      "MPI_Iscatterv", "MPI_Ireduce_scatter"};

// Copies at most `limit` bytes of what is left of a buffer; true once all of it is there.
bool Op::copy_slice(void* to, const void* from, int64_t elems, uint64_t limit) {
  const size_t nbytes = static_cast<size_t>(elems) * plan->itemsize;
  const size_t piece = std::min<uint64_t>(nbytes - copied_, limit);
  if (piece != 0) {
    std::memcpy(static_cast<unsigned char*>(to) + copied_,
                static_cast<const unsigned char*>(from) + copied_, piece);
    copied_ += piece;
  }
  return copied_ == nbytes;
}

// Returns what a collective sends that may write its result over its input: a copy if both buffers
// are the same. Null until the copy is complete.
const void* Op::copied_where_in_place(uint64_t limit) {
  if (static_cast<const void*>(in) != static_cast<void*>(out) || plan->in_elems == 0) return in;
  if (copied_ == 0) {
    const size_t nbytes = static_cast<size_t>(plan->in_elems) * plan->itemsize;
    tmp_storage.reset(new unsigned char[nbytes]);
  }
  return copy_slice(tmp_storage.get(), in, plan->in_elems, limit) ? tmp_storage.get() : nullptr;
}

bool Op::advance_native(uint64_t limit) {
  if (plan->gloo != nullptr) return advance_gloo(limit);
  const NativeCall& call = plan->call;
  const MpiApi& api = mpi();
  const bool copies_root = plan->coll == kBcast && comm->rank == plan->root && in != out;
  const bool starts = !native_started_;
  if (starts) {
    // The library matches collectives by the order of the calls: start in sequence order.
    if (comm->native_refused_) return false;
    const bool in_place = static_cast<const void*>(in) == static_cast<void*>(out);
    const void* send = in_place ? api.in_place : static_cast<const void*>(in);
    // MPI refuses equal buffers even where one of them is empty: where blocks differ in
    // length, an empty block may lie at the start of another array.
    static unsigned char nowhere[2];
    const void* const from = plan->in_elems != 0 ? static_cast<const void*>(in) : nowhere;
    void* const into = plan->out_elems != 0 ? static_cast<void*>(out) : nowhere + 1;
    void* request = &native_request_;
    const bool is_root = comm->rank == plan->root;
    if (plan->coll == kAlltoall || plan->coll == kAlltoallv) {
      // MPI wants "in place" from all ranks or none; here it is one rank's own business.
      send = copied_where_in_place(limit);
      if (send == nullptr && in_place && plan->in_elems != 0) {
        comm->native_refused_ = true;
        return true;
      }
    }
    if (!left_trail()) return true;
    int rc = 0;
    switch (plan->coll) {
      case kAllreduce:
        rc = api.iallreduce(send, out, call.count, call.datatype, call.op, call.comm, request);
        break;
      case kReduce:
        rc = api.ireduce(is_root ? send : in, out, call.count, call.datatype, call.op, plan->root,
                         call.comm, request);
        break;
      case kBcast:
        rc = api.ibcast(copies_root ? const_cast<unsigned char*>(in) : out, call.count, call.datatype, plan->root, call.comm, request);
        break;
      case kAllgather:
        rc = api.iallgather(in, call.count, call.datatype, out, call.count, call.datatype,
                            call.comm, request);
        break;
      case kReduceScatter:
        rc = api.ireduce_scatter_block(in, out, call.count, call.datatype, call.op, call.comm,
                                       request);
        break;
      case kAlltoall:
        rc = api.ialltoall(send, call.count, call.datatype, out, call.count, call.datatype,
                           call.comm, request);
        break;
      case kGather:
        rc = api.igather(in, call.count, call.datatype, out, call.count, call.datatype,
                         plan->root, call.comm, request);
        break;
      case kScatter:
        rc = api.iscatter(in, call.count, call.datatype, out, call.count, call.datatype,
                          plan->root, call.comm, request);
        break;
      case kBarrier:
        rc = api.ibarrier(call.comm, request);
        break;
      case kScan:
        rc = api.iscan(send, out, call.count, call.datatype, call.op, call.comm, request);
        break;
      case kExscan:
        // MPI leaves rank 0's result undefined, but in place untouched: so be it there.
        if (comm->rank == 0) {
          rc = api.iexscan(api.in_place, const_cast<unsigned char*>(in), call.count,
                           call.datatype, call.op, call.comm, request);
        } else {
          rc = api.iexscan(send, out, call.count, call.datatype, call.op, call.comm, request);
        }
        break;
      case kAllgatherv:
        rc = api.iallgatherv(from, call.count, call.datatype, into, call.recv_counts.data(),
                             call.recv_at.data(), call.datatype, call.comm, request);
        break;
      case kAlltoallv:
        if (plan->in_elems == 0) send = from;
        rc = api.ialltoallv(send, call.send_counts.data(), call.send_at.data(), call.datatype,
                            into, call.recv_counts.data(), call.recv_at.data(), call.datatype,
                            call.comm, request);
        break;
      case kGatherv:
        rc = api.igatherv(from, call.count, call.datatype, into, call.recv_counts.data(),
                          call.recv_at.data(), call.datatype, plan->root, call.comm, request);
        break;
      case kScatterv:
        rc = api.iscatterv(from, call.send_counts.data(), call.send_at.data(), call.datatype, into,
                           call.count, call.datatype, plan->root, call.comm, request);
        break;
      case kReduceScatterv:
        rc = api.ireduce_scatter(from, into, call.recv_counts.data(), call.datatype, call.op,
                                 call.comm, request);
        break;
      default:
        fail("the MPI library has no collective for this operation: use a schedule");
        return true;
    }
    if (rc != 0) {
      fail_mpi(kFunctions[plan->coll], rc, "the MPI library refused the collective");
      return true;
    }
    native_started_ = true;
  }
  MpiStatus status;
  int flag = 0;
  const int rc = api.test(&native_request_, &flag, &status);
  if (mpi().is_truncation(rc)) {
    fail("the MPI library's collective met a message of another length: the ranks called with "
         "different arguments");
    return true;
  }
  if (rc != 0) {
    fail_mpi("MPI_Test", rc, "the MPI library failed the collective");
    return true;
  }
  if (!flag) {
    Backoff::note_library_look();
    return starts;
  }
  if (!copies_root || copy_slice(out, in, plan->out_elems, limit)) finish();
  return true;
}

}  // namespace commrt
