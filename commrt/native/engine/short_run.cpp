// SPDX-License-Identifier: Apache-2.0
// Operations of one fragment, run straight from the caller's stack.
//
// A short message takes about as long as one cache line takes to cross between cores; anything
// else on the way costs visibly. So an operation that finds nothing else in flight runs here, in
// program order, without an Op. If it has to wait for longer than a short spin, it becomes an
// ordinary Op that goes on from the same place.
#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

bool Plan::is_short() const {
  if (native || user.python || most_slots != 0 || fragments != 1 ||
      tmp_nbytes > kShortTmpBytes) return false;
  if (peers.size() > kShortPeers) return false;
  return std::all_of(instrs.begin(), instrs.end(), [](const Instr& ins) {
    return !ins.has_mpi && ins.inputs.size() <= kShortInputs;
  });
}

void Plan::flatten(Comm& comm) {
  short_instrs.clear();
  short_operands.clear();
  short_links.clear();
  tiny_instrs.clear();
  auto add = [&](const std::vector<Ref>& refs) {
    for (const Ref& ref : refs) {
      if (ref.is_message) {
        const int rank = peers[ref.peer].rank;
        short_operands.push_back({&comm.link(rank), rank, ref.k, 0});
        continue;
      }
      const SpaceSpec& space = spaces[ref.space];
      const auto start = space.kind == SpaceKind::Tmp ? static_cast<int64_t>(space.tmp_offset) : 0;
      short_operands.push_back(
          {nullptr, static_cast<int32_t>(space.kind), 0, start + ref.offset_nbytes});
    }
    return static_cast<uint16_t>(refs.size());
  };
  for (const Instr& ins : instrs) {
    ShortInstr flat{};
    flat.full = &ins;
    flat.first = static_cast<uint32_t>(short_operands.size());
    flat.num_inputs = add(ins.inputs);
    flat.num_local_outs = add(ins.local_outs);
    flat.num_sends = add(ins.sends);
    flat.elems = static_cast<size_t>(ins.elems);
    flat.nbytes = flat.elems * itemsize;
    if (ins.publish >= 0) flat.slot_offset = static_cast<size_t>(ins.publish) * slot_nbytes;
    short_instrs.push_back(flat);
  }
  for (const PeerUse& peer : peers) {
    short_links.push_back({&comm.link(peer.rank), static_cast<uint32_t>(peer.sends_per_fragment),
                           static_cast<uint32_t>(peer.recvs_per_fragment)});
  }
  const bool tiny = !needs_lane && !completes() && !user && std::all_of(
      short_instrs.begin(), short_instrs.end(), [&](const ShortInstr& flat) {
        return add_tiny(flat);
      });
  if (!tiny) tiny_instrs.clear();
  has_more = std::any_of(short_instrs.begin(), short_instrs.end(), [](const ShortInstr& flat) {
    return flat.nbytes > kInlineBytes;
  });
  few = few_sum_of(dtype, redop);
}

std::shared_ptr<Op> Comm::run_short(const std::shared_ptr<const Plan>& plan, const void* in,
                                    void* out, int spins) {
  const Plan& p = *plan;
  const bool shows = p.shows_result && has_heap();
  if (!p.tiny_instrs.empty() && !shows) {
    return p.has_more ? run_tiny<true>(plan, in, out, spins)
                      : run_tiny<false>(plan, in, out, spins);
  }
  if (shows && !show_ordinary(p, in, out)) return start(plan, in, out, nullptr, true);
  int lane = -1;
  if (p.needs_lane) {
    lane_refused_ = false;
    lane = acquire_lane(p);
    if (lane < 0) return start(plan, in, out, nullptr, !p.answered);
  }
  const uint64_t seq = next_seq++;
  const uint64_t mark = call_mark(p.mark, seq);
  const Store store = store_for_run(p, true);
  const uint64_t timed_from = p.learns() ? ticks() : 0;

  alignas(64) unsigned char tmp[kShortTmpBytes];
  unsigned char* const bases[] = {static_cast<unsigned char*>(const_cast<void*>(in)),
                                  static_cast<unsigned char*>(out), tmp};
  unsigned char* const slots = lane >= 0 ? lane_base(lane) : nullptr;
  // Ids are those that the links will have counted at the end.
  auto out_id = [](const ShortOperand& message) {
    return message.link->next_out + static_cast<uint64_t>(message.k);
  };
  auto in_id = [](const ShortOperand& message) {
    return message.link->next_in + static_cast<uint64_t>(message.k);
  };
  auto out_line = [&](const ShortOperand& message) -> Line& {
    return message.link->out_lines[out_id(message) & (kLines - 1)];
  };

  // The books are kept while the first message is on its way: that costs nothing.
  bool noted = false;
  auto note_start = [&] {
    if (noted) return;
    noted = true;
    note(seq, p, 0);
  };
  auto wait_longer = [&](const ShortInstr& ins) {
    note_start();
    const size_t done = static_cast<size_t>(&ins - p.short_instrs.data());
    return go_on(plan, in, out, seq, done, lane, tmp, store, timed_from, shows);
  };

  for (const ShortInstr& ins : p.short_instrs) {
    const ShortOperand* const ins_inputs = &p.short_operands[ins.first];
    const ShortOperand* const outs = ins_inputs + ins.num_inputs;
    const ShortOperand* const sends = outs + ins.num_local_outs;
    const bool takes_only = ins.num_local_outs == 0 && ins.num_sends == 0;

    const void* inputs[kShortInputs];
    alignas(64) unsigned char gathered[kShortInputs][kMostInlineBytes];
    bool exposed = false;
    uint64_t raw = 0;
    for (int i = 0; i < ins.num_inputs; ++i) {
      const ShortOperand& operand = ins_inputs[i];
      if (operand.link == nullptr) {
        inputs[i] = bases[operand.where] + operand.offset;
        continue;
      }
      const uint64_t id = in_id(operand);
      const Line& line = operand.link->in_lines[id & (kLines - 1)];
      if (line.seq.load(std::memory_order_acquire) != id + mark) {
        note_start();
        ring(p);
        for (int spin = 0; line.seq.load(std::memory_order_acquire) != id + mark; ++spin) {
          if (spin >= spins) return wait_longer(ins);
          relax();
        }
      }
      const uint64_t meta = line.meta;
      if (!meta_length_is(meta, ins.nbytes) && !takes_only) return wait_longer(ins);
      inputs[i] = (meta & kInlineFlag) ? line.payload : arena + (meta & kSlotMask);
      if (ins.nbytes > kInlineBytes && (meta & kInlineFlag) && !takes_only) {
        gather(gathered[i], line, operand.link->in_more[id & (kLines - 1)], ins.nbytes);
        inputs[i] = gathered[i];
      }
      if ((meta & (kExposedFlag | kDeliveredFlag)) == 0) continue;
      Shown shown;
      std::memcpy(&shown, line.payload, sizeof shown);
      if (!shows || (meta & kDeliveredFlag) || !is_place(shown.place)) return wait_longer(ins);
      inputs[i] = address_of(member_of(operand.where), shown.place);
      if (shown.raw != 0) raw |= uint64_t{1} << i;
      exposed = true;
    }

    alignas(64) unsigned char small[kMostInlineBytes];
    unsigned char* second = nullptr;
    const bool in_line = ins.nbytes <= ins.full->inline_nbytes;
    if (ins.num_sends != 0) {
      for (int s = 0; s < ins.num_sends; ++s) {
        if (!sends[s].link->line_free(out_id(sends[s]))) return wait_longer(ins);
      }
      second = !in_line              ? slots + ins.slot_offset
               : ins.num_sends == 1 && ins.nbytes <= kInlineBytes ? out_line(sends[0]).payload
                                    : small;
    }
    if (ins.nbytes != 0 && !takes_only) {
      auto local = [&](int o) { return bases[outs[o].where] + outs[o].offset; };
      unsigned char* first = ins.num_local_outs != 0 ? local(0) : nullptr;
      p.compute(*ins.full, store, first, second, inputs, ins.elems, raw);
      for (int o = 1; o < ins.num_local_outs; ++o) {
        if (local(o) != first) copy(local(o), first, ins.nbytes);
      }
      // An Op looks again, and fails.
      for (int i = 0; exposed && i < ins.num_inputs; ++i) {
        if (ins_inputs[i].link != nullptr && gave_up(ins_inputs[i].where, seq)) {
          return wait_longer(ins);
        }
      }
    }
    if (store != Store::Plain && ins.num_sends != 0 && !in_line) store_fence();
    for (int s = 0; s < ins.num_sends; ++s) {
      Line& line = out_line(sends[s]);
      const uint64_t id = out_id(sends[s]);
      if (in_line) {
        if (ins.nbytes > kInlineBytes) {
          spread(line, sends[s].link->out_more[id & (kLines - 1)], small, ins.nbytes);
        } else if (second == small) {
          std::memcpy(line.payload, small, ins.nbytes);
        }
        publish(line, id + mark, true, 0, ins.nbytes);
      } else {
        lanes_[lane].last[sends[s].where] = id + 1;
        publish(line, id + mark, false, static_cast<uint64_t>(second - arena), ins.nbytes);
      }
    }
    for (int i = 0; i < ins.num_inputs; ++i) {
      const ShortOperand& operand = ins_inputs[i];
      if (operand.link != nullptr) operand.link->consume(in_id(operand));
    }
  }
  for (const PeerUse& peer : p.peers) {
    Link& link = links_[peer.rank];
    link.next_out += static_cast<uint64_t>(peer.sends_per_fragment);
    link.next_in += static_cast<uint64_t>(peer.recvs_per_fragment);
  }
  note_start();
  ring(p);
  if (p.completes() && p.out_elems > 0) {
    p.complete(static_cast<unsigned char*>(out), static_cast<size_t>(p.out_elems));
  }
  if (timed_from != 0) report_run(p, ticks() - timed_from);
  if (lane >= 0) lanes_[lane].busy = false;
  records[seq % kRecords].state = 1;
  return nullptr;
}

// Turns a short operation that has to wait into an Op whose first `done` instructions are done.
std::shared_ptr<Op> Comm::go_on(const std::shared_ptr<const Plan>& plan, const void* in,
                                void* out, uint64_t seq, size_t done, int lane,
                                const unsigned char* tmp, Store store, uint64_t timed_from,
                                bool shown) {
  std::shared_ptr<Op> op = fresh_op();
  op->seq = seq;
  op->keep[0] = op->keep[1] = nullptr;
  op->store = store;
  op->timed_from = timed_from;
  op->resume(plan, in, out, done, lane);
  if (shown) op->mark_shown();
  if (plan->tmp_nbytes != 0) std::memcpy(op->tmp, tmp, plan->tmp_nbytes);
  active_.push_back(op);
  ring(*plan);
  return op;
}

}  // namespace commrt
