// SPDX-License-Identifier: Apache-2.0
// Turns a lowered schedule and element counts into lengths, fragments and slots.
#include "engine/plan.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/call_mark.hpp"
#include "engine/layout.hpp"

namespace commrt {

namespace {
// A rank without peers has nobody to agree with. Its work is cut only to bound the slices: each
// fragment has about this many bytes.
constexpr size_t kAloneBytes = 128 * 1024;
// The work of an instruction without payload, counted in bytes.
constexpr uint64_t kLeastWork = 256;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

int64_t Plan::slice_elems(const Ref& ref) const {
  const auto& offsets = spaces[ref.space].offsets;
  return offsets[ref.hi] - offsets[ref.lo];
}

// Upper bound, in bytes, of any fragment of this slice.
size_t Plan::largest_fragment(const Instr& ins, const Ref& ref) const {
  const auto& offsets = spaces[ref.space].offsets;
  size_t nbytes = 0;
  for (int b = ref.lo; b < ref.hi; ++b) {
    const int64_t len = offsets[b + 1] - offsets[b];
    if (ins.fragments == 1) {
      nbytes += static_cast<size_t>(len) * itemsize;
    } else {
      nbytes += static_cast<size_t>(len / ins.fragments + 1) * itemsize + kAlign;
    }
  }
  return nbytes;
}

bool Plan::reads_again(const Ref& written) const {
  for (const Instr& ins : instrs) {
    for (const Ref& ref : ins.inputs) {
      if (!ref.is_message && ref.space == written.space && ref.lo < written.hi &&
          written.lo < ref.hi) {
        return true;
      }
    }
  }
  return false;
}

void Plan::combine_rounded(int nin, const uint64_t* scaled, unsigned char* dst,
                           unsigned char* dst2, const void* const* inputs, size_t elems) const {
  constexpr size_t kPieceBytes = 4096;  // stays in the first cache
  const size_t num = static_cast<size_t>(nin), most = kPieceBytes / itemsize;
  thread_local std::vector<unsigned char> rounded;
  thread_local std::vector<const void*> pieces;
  rounded.resize(num * kPieceBytes);
  pieces.resize(num);
  const uint64_t only = 1;
  for (size_t at = 0; at < elems; at += most) {
    const size_t count = std::min(most, elems - at), offset = at * itemsize;
    for (size_t k = 0; k < num; ++k) {
      pieces[k] = static_cast<const unsigned char*>(inputs[k]) + offset;
      if ((scaled[k / 64] >> (k % 64) & 1) == 0) continue;
      unsigned char* own = &rounded[k * kPieceBytes];
      combine(own, nullptr, &pieces[k], 1, count, &only, factor, Store::Plain);
      pieces[k] = own;
    }
    combine(dst + offset, dst2 != nullptr ? dst2 + offset : nullptr, pieces.data(),
            nin, count, nullptr, factor, Store::Plain);
  }
}

void Plan::settle_program() {
  for (Instr& ins : instrs) {
    ins.is_final = !ins.local_outs.empty() &&
                   spaces[ins.local_outs[0].space].kind == SpaceKind::Out &&
                   !reads_again(ins.local_outs[0]);
  }
}

size_t Plan::nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  size_t sum = sizeof *this + label.capacity() + of(spaces) + of(instrs) + of(peers) +
               of(publish_instr) + of(short_instrs) + of(short_operands) + of(short_links) +
               of(tiny_instrs) + of(call.send_counts) + of(call.send_at) + of(call.recv_counts) +
               of(call.recv_at);
  for (const SpaceSpec& space : spaces) sum += of(space.offsets) + of(space.boxes);
  for (const Instr& ins : instrs) {
    sum += of(ins.inputs) + of(ins.local_outs) + of(ins.sends) + of(ins.deps) +
           of(ins.scaled_bits);
  }
  return sum;
}

void Plan::settle_mark() {
  mark = mark_of_plan(coll, dtype, user ? kUserReduction : static_cast<uint64_t>(redop),
                      call_has_root(coll) ? root : facts);
}

void Plan::finish(int64_t fragments_, size_t lane_nbytes, int slot_reuse, size_t slot_window) {
  fragments = fragments_;
  settle_mark();
  const bool boxed = most_slots != 0;
  if (peers.empty() && !boxed) {
    for (const auto& space : spaces) {
      const size_t nbytes = static_cast<size_t>(space.offsets.back()) * itemsize;
      fragments = std::max(fragments, static_cast<int64_t>(nbytes / kAloneBytes));
    }
  }
  depth = static_cast<int>(std::min<int64_t>(depth, fragments));
  for (auto& ins : instrs) {
    if (ins.fragments == 0) ins.fragments = fragments;
  }
  for (auto& peer : peers) {
    if (peer.send_fragments == 0) peer.send_fragments = fragments;
    if (peer.recv_fragments == 0) peer.recv_fragments = fragments;
  }
  for (auto& space : spaces) {
    if (space.kind != SpaceKind::Tmp) continue;
    space.tmp_offset = tmp_nbytes;
    tmp_nbytes += round_up(static_cast<size_t>(space.offsets.back()) * itemsize, kAlign);
  }

  // An instruction's length is that of its local operands; a pure forward (message in,
  // message out) does not occur: lowering always has a local side.
  const bool may_stream = shows_result || streams_first(store) || streams_first(adaptive);
  int npublish = 0;
  publish_instr.clear();
  for (size_t i = 0; i < instrs.size(); ++i) {
    Instr& ins = instrs[i];
    const Ref* local = nullptr;
    auto settle = [&](Ref& ref) {
      if (ref.is_message) return;
      ref.offset_nbytes = spaces[ref.space].offsets[ref.lo] * static_cast<int64_t>(itemsize);
      const int64_t elems = slice_elems(ref);
      if (local != nullptr && elems != ins.elems) {
        throw std::invalid_argument("instruction " + std::to_string(i) +
                                    " has operands of different lengths");
      }
      ins.elems = elems;
      local = &ref;
    };
    for (auto& ref : ins.inputs) settle(ref);
    for (auto& ref : ins.local_outs) settle(ref);
    // An instruction without outputs has nothing to compute: its messages are only taken.
    const bool only_takes = ins.local_outs.empty() && ins.sends.empty() && !ins.has_mpi;
    if (local == nullptr && !only_takes) {
      throw std::invalid_argument("instruction " + std::to_string(i) + " has no local operand");
    }
    ins.gives_result = may_stream && ins.is_final;
    const uint64_t nbytes = static_cast<uint64_t>(ins.elems) * itemsize;
    ins.slice_nbytes = kLeastWork + nbytes / static_cast<uint64_t>(ins.fragments);
    if (!ins.sends.empty()) {
      // A slot holds a payload once for all of its readers.
      ins.inline_nbytes = ins.sends.size() == 1 ? inline_nbytes : kInlineBytes;
      needs_lane = needs_lane || nbytes > ins.inline_nbytes;
      ins.publish = npublish++;
      publish_instr.push_back(static_cast<int>(i));
    }
  }

  auto any = [this](int PeerUse::*count) {
    return std::any_of(peers.begin(), peers.end(),
                       [count](const PeerUse& peer) { return peer.*count > 0; });
  };
  sends = any(&PeerUse::sends_per_fragment);
  answered = sends && any(&PeerUse::recvs_per_fragment);
  run_short = is_short();
  if (!needs_lane) {
    slots = 1;
    return;
  }
  slot_nbytes = kAlign;
  for (int index : publish_instr) {
    const Instr& ins = instrs[index];
    const Ref* local = nullptr;
    for (const auto& ref : ins.inputs) if (!ref.is_message) local = &ref;
    for (const auto& ref : ins.local_outs) local = &ref;
    slot_nbytes = std::max(slot_nbytes, round_up(largest_fragment(ins, *local), kAlign));
  }
  slot_nbytes += kAlign;  // slot_shift()
  // A whole fragment fits, so a schedule that needs no bound on buffering needs none here.
  const size_t fit = lane_nbytes / slot_nbytes;
  if (boxed && fit != 0) {
    // No receive waits for a send, so a send may wait until a peer has read an earlier one.
    slots = static_cast<int>(std::min({fit, static_cast<size_t>(npublish),
                                       static_cast<size_t>(most_slots)}));
    return;
  }
  if (fit < static_cast<size_t>(npublish)) {
    throw std::invalid_argument("a fragment of this schedule publishes " +
                                std::to_string(npublish) + " blocks of " +
                                std::to_string(slot_nbytes) + " bytes, more than a lane holds");
  }
  // The slots are those of whole fragments, so that a slot always holds what one instruction
  // sends. If only some of these messages use it (symmetric.cpp), all earlier ones have been read
  // once the last one has.
  const size_t fragment_slots_nbytes = static_cast<size_t>(npublish) * slot_nbytes;
  const size_t wanted = slot_reuse > 0 ? static_cast<size_t>(slot_reuse)
                                       : std::max<size_t>(2, slot_window / fragment_slots_nbytes);
  const size_t fragments_held = std::min({fit / static_cast<size_t>(npublish), wanted,
                                          static_cast<size_t>(fragments)});
  slots = npublish * static_cast<int>(fragments_held);
  answered = answered || (sends && static_cast<size_t>(fragments) > fragments_held);
  constexpr size_t kLeastMoving = 8192;
  moves_on = fragments_held == static_cast<size_t>(fragments) &&
             static_cast<size_t>(slots) * slot_nbytes >= kLeastMoving;
}

}  // namespace commrt
