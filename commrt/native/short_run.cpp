// SPDX-License-Identifier: Apache-2.0
// Operations of one fragment, run straight from the caller's stack.
//
// A short message takes about as long as one cache line takes to cross between cores;
// anything else on the way costs visibly. So an operation that finds nothing else in flight
// runs here, in program order, without an Op. Where it has to wait for longer than a short
// spin it becomes an ordinary Op that goes on from the same place.
#include <algorithm>
#include <cstring>

#include "comm.hpp"
#include "engine.hpp"

namespace commrt {

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

}  // namespace

bool Plan::is_short() const {
  if (native || fragments != 1 || tmp_nbytes > kShortTmpBytes) return false;
  if (peers.size() > kShortPeers) return false;
  return std::all_of(instrs.begin(), instrs.end(), [](const Instr& ins) {
    return !ins.has_mpi && ins.inputs.size() <= kShortInputs;
  });
}

std::shared_ptr<Op> Comm::run_short(const std::shared_ptr<const Plan>& plan, const void* in,
                                    void* out, int spins) {
  const Plan& p = *plan;
  int lane = -1;
  if (p.needs_lane) {
    lane_refused_ = false;
    lane = acquire_lane();
    if (lane < 0) return start(plan, in, out, nullptr);
  }
  const uint64_t seq = next_seq++;
  if (arena != nullptr) {
    header(member_index_[rank])->started.store(next_seq, std::memory_order_relaxed);
  }
  note(seq, p);

  const Store store = p.store_for_run(true);
  const uint64_t timed_from = p.adaptive ? ticks() : 0;

  uint64_t out_base[kShortPeers], in_base[kShortPeers];
  Link* links[kShortPeers];
  const size_t npeers = p.peers.size();
  for (size_t i = 0; i < npeers; ++i) {
    Link& link = links_[p.peers[i].rank];
    links[i] = &link;
    out_base[i] = link.next_out;
    in_base[i] = link.next_in;
    link.next_out += static_cast<uint64_t>(p.peers[i].sends_per_fragment);
    link.next_in += static_cast<uint64_t>(p.peers[i].recvs_per_fragment);
  }
  alignas(64) unsigned char tmp[kShortTmpBytes];
  unsigned char* slots = lane >= 0 ? lane_base(lane) : nullptr;
  auto address = [&](const Ref& ref) -> unsigned char* {
    const SpaceSpec& space = p.spaces[ref.space];
    switch (space.kind) {
      case SpaceKind::In:
        return static_cast<unsigned char*>(const_cast<void*>(in)) + ref.offset_nbytes;
      case SpaceKind::Out: return static_cast<unsigned char*>(out) + ref.offset_nbytes;
      default: return tmp + space.tmp_offset + ref.offset_nbytes;
    }
  };

  const size_t m = p.instrs.size();
  for (size_t i = 0; i < m; ++i) {
    const Instr& ins = p.instrs[i];
    const size_t nbytes = static_cast<size_t>(ins.elems) * p.itemsize;
    const void* inputs[kShortInputs];
    int nin = 0;
    for (const Ref& ref : ins.inputs) {
      if (!ref.is_message) {
        inputs[nin++] = address(ref);
        continue;
      }
      const uint64_t id = in_base[ref.peer] + static_cast<uint64_t>(ref.k);
      const Line& line = links[ref.peer]->in_lines[id & (kLines - 1)];
      for (int spin = 0; line.seq.load(std::memory_order_acquire) != id + 1; ++spin) {
        if (spin >= spins) {
          return go_on(plan, in, out, seq, i, out_base, in_base, lane, tmp, store,
                         timed_from);
        }
        relax();
      }
      const uint64_t meta = line.meta;
      if (!meta_length_is(meta, nbytes) && !(ins.local_outs.empty() && ins.sends.empty())) {
        return go_on(plan, in, out, seq, i, out_base, in_base, lane, tmp, store,
                         timed_from);
      }
      inputs[nin++] = (meta & kInlineFlag) ? line.payload : arena + (meta & kOffsetMask);
    }
    unsigned char small[kInlineBytes];
    unsigned char* second = nullptr;
    if (!ins.sends.empty()) {
      for (const Ref& ref : ins.sends) {
        const uint64_t id = out_base[ref.peer] + static_cast<uint64_t>(ref.k);
        if (!links[ref.peer]->line_free(id)) {
          return go_on(plan, in, out, seq, i, out_base, in_base, lane, tmp, store,
                         timed_from);
        }
      }
      second = nbytes <= kInlineBytes
                   ? small
                   : slots + static_cast<size_t>(ins.publish) * p.slot_nbytes;
    }
    if (nbytes != 0 && (second != nullptr || !ins.local_outs.empty())) {
      unsigned char* first = ins.local_outs.empty() ? nullptr : address(ins.local_outs[0]);
      p.compute(ins, store, first, second, inputs, static_cast<size_t>(ins.elems));
      for (size_t o = 1; o < ins.local_outs.size(); ++o) {
        unsigned char* more = address(ins.local_outs[o]);
        if (more != first) copy(more, first, nbytes);
      }
    }
    if (store != Store::Plain && second != nullptr && second != small) store_fence();
    for (const Ref& ref : ins.sends) {
      const uint64_t id = out_base[ref.peer] + static_cast<uint64_t>(ref.k);
      Line& line = links[ref.peer]->out_lines[id & (kLines - 1)];
      const bool in_line = second == small;
      if (!in_line) lanes_[lane].last[p.peers[ref.peer].rank] = id + 1;
      publish(line, id, in_line ? small : nullptr,
              in_line ? 0 : static_cast<uint64_t>(second - arena), nbytes);
    }
    for (const Ref& ref : ins.inputs) {
      if (!ref.is_message) continue;
      links[ref.peer]->consume(in_base[ref.peer] + static_cast<uint64_t>(ref.k));
    }
  }
  if (p.divide_out && p.out_elems > 0) {
    divide_inplace(p.dtype, out, static_cast<size_t>(p.out_elems), p.divisor);
  }
  if (timed_from != 0) p.choice.report(ticks() - timed_from);
  if (lane >= 0) lanes_[lane].busy = false;
  records[seq % kRecords].state = 1;
  records[seq % kRecords].end_ticks = ticks();
  return nullptr;
}

// Turns a short operation that has to wait into an Op whose first `done` instructions are done.
std::shared_ptr<Op> Comm::go_on(const std::shared_ptr<const Plan>& plan, const void* in,
                                void* out, uint64_t seq, size_t done, const uint64_t* out_base,
                                const uint64_t* in_base, int lane, const unsigned char* tmp,
                                Store store, uint64_t timed_from) {
  std::shared_ptr<Op> op = fresh_op();
  op->seq = seq;
  op->keep[0] = op->keep[1] = nullptr;
  op->store = store;
  op->timed_from = timed_from;
  op->resume(plan, in, out, done, out_base, in_base, lane);
  if (plan->tmp_nbytes != 0) std::memcpy(op->tmp, tmp, plan->tmp_nbytes);
  active_.push_back(op);
  return op;
}

}  // namespace commrt
