// SPDX-License-Identifier: Apache-2.0
// Short operations whose values fit into message lines, instruction by instruction written
// out: between seeing a peer's line and showing the next own one, every instruction counts.
#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

namespace {

// memcpy of at most kInlineBytes, without a call; source and destination may be the same.
inline void copy_few(void* to, const void* from, size_t nbytes) {
  auto move = [=](auto word, size_t at) {
    std::memcpy(&word, static_cast<const unsigned char*>(from) + at, sizeof word);
    return word;
  };
  auto put = [=](auto word, size_t at) {
    std::memcpy(static_cast<unsigned char*>(to) + at, &word, sizeof word);
  };
  if (nbytes >= 8) {
    const uint64_t last = move(uint64_t{}, nbytes - 8);
    for (size_t at = 0; at + 8 < nbytes; at += 8) put(move(uint64_t{}, at), at);
    put(last, nbytes - 8);
  } else if (nbytes >= 4) {
    const uint32_t first = move(uint32_t{}, 0), last = move(uint32_t{}, nbytes - 4);
    put(first, 0);
    put(last, nbytes - 4);
  } else {
    for (size_t at = 0; at < nbytes; ++at) put(move(uint8_t{}, at), at);
  }
}

}  // namespace

// Adds what does the same as `flat`; false if there is no such thing.
bool Plan::add_tiny(const ShortInstr& flat) {
  TinyInstr tiny{};
  tiny.own = tiny.result = -1;
  tiny.elems = static_cast<uint32_t>(flat.elems);
  tiny.nbytes = static_cast<uint32_t>(flat.nbytes);
  tiny.meta = pack_meta(0, kInlineFlag, flat.nbytes);
  if (flat.nbytes > kMostInlineBytes || flat.num_inputs > 2 || flat.num_local_outs > 1 ||
      flat.num_sends > 1 || flat.full->scaled() != nullptr) {
    return false;
  }
  const ShortOperand* const operand = &short_operands[flat.first];
  for (int i = 0; i < flat.num_inputs; ++i) {
    const ShortOperand& input = operand[i];
    if (input.link != nullptr ? tiny.from != nullptr : tiny.own >= 0) return false;
    if (input.link != nullptr) {
      tiny.from = input.link;
      tiny.from_k = input.k;
      tiny.message_first = i == 0;
    } else {
      tiny.own = input.where;
      tiny.own_offset = input.offset;
    }
  }
  if (flat.num_local_outs != 0) {
    tiny.result = operand[flat.num_inputs].where;
    tiny.result_offset = operand[flat.num_inputs].offset;
  }
  if (flat.num_sends != 0) {
    tiny.to = operand[flat.num_inputs + flat.num_local_outs].link;
    tiny.to_k = operand[flat.num_inputs + flat.num_local_outs].k;
  }
  tiny_instrs.push_back(tiny);
  return tiny.to != nullptr || tiny.result >= 0;
}

// Does what run_short() does, for tiny instructions. `kHasMore`: values may go on beyond a line.
template <bool kHasMore>
std::shared_ptr<Op> Comm::run_tiny(const std::shared_ptr<const Plan>& plan, const void* in,
                                   void* out, int spins) {
  const Plan& p = *plan;
  const uint64_t seq = next_seq++;
  const uint64_t mark = call_mark(p.mark, seq);
  alignas(64) unsigned char tmp[kShortTmpBytes];
  constexpr size_t kValueBytes = kHasMore ? kMostInlineBytes : 1;
  alignas(64) unsigned char gathered[kValueBytes], sum[kValueBytes];
  // Looked up in memory, a base would be one load more on the way to the line.
  auto base = [&](int32_t where) {
    return where == 0 ? static_cast<unsigned char*>(const_cast<void*>(in))
           : where == 1 ? static_cast<unsigned char*>(out)
                        : tmp;
  };
  // The books are kept while the first message is on its way: that costs nothing. Nobody
  // sees them before the end, as nobody else has the lock.
  bool noted = false;
  auto keep_books = [&](OpState state) {
    noted = true;
    note(seq, p, 0);
    records[seq % kRecords].state = static_cast<uint8_t>(state);
  };
  const TinyInstr* const begin = p.tiny_instrs.data();
  const TinyInstr* const end = begin + p.tiny_instrs.size();
  for (const TinyInstr* ins = begin; ins != end; ++ins) {
    auto wait_longer = [&] {
      keep_books(OpState::Running);
      return go_on(plan, in, out, seq, static_cast<size_t>(ins - begin), -1, tmp, p.store, 0,
                   false);
    };
    const unsigned char* const own =
        ins->own >= 0 ? base(ins->own) + ins->own_offset : nullptr;
    unsigned char* const result =
        ins->result >= 0 ? base(ins->result) + ins->result_offset : nullptr;
    Line* shown = nullptr;
    uint64_t out_id = 0, in_id = 0;
    const bool has_more = kHasMore && ins->nbytes > kInlineBytes;
    if (ins->to != nullptr) {
      out_id = ins->to->next_out + static_cast<uint64_t>(ins->to_k);
      if (!ins->to->line_free(out_id)) return wait_longer();
      shown = &ins->to->out_lines[out_id & (kLines - 1)];
    }
    const unsigned char* theirs = nullptr;
    if (ins->from != nullptr) {
      in_id = ins->from->next_in + static_cast<uint64_t>(ins->from_k);
      const Line& line = ins->from->in_lines[in_id & (kLines - 1)];
      if (line.seq.load(std::memory_order_acquire) != in_id + mark) {
        if (!noted) keep_books(OpState::Done);
        ring(p);
        for (int spin = 0; line.seq.load(std::memory_order_acquire) != in_id + mark; ++spin) {
          if (spin >= spins) return wait_longer();
          relax();
        }
      }
      if (has_more && is_in_slot(line.meta, ins->nbytes)) {
        theirs = arena + (line.meta & kSlotMask);  // it goes to other ranks, too
      } else if (line.meta != ins->meta) {
        return wait_longer();
      } else if (has_more) {
        unsigned char* const whole = own == nullptr && result != nullptr ? result : gathered;
        gather(whole, line, ins->from->in_more[in_id & (kLines - 1)], ins->nbytes);
        theirs = whole;
      } else {
        theirs = line.payload;
      }
    }
    const bool combines = theirs != nullptr && own != nullptr;
    const void* both[] = {ins->message_first ? theirs : own, ins->message_first ? own : theirs};
    if (has_more) {
      const unsigned char* value = theirs != nullptr ? theirs : own;
      if (combines) {
        unsigned char* const to = result != nullptr ? result : sum;
        p.combine(to, nullptr, both, 2, ins->elems, nullptr, p.factor, Store::Plain);
        value = to;
      } else if (result != nullptr && result != value) {
        std::memcpy(result, value, ins->nbytes);
      }
      if (shown != nullptr) {
        spread(*shown, ins->to->out_more[out_id & (kLines - 1)], value, ins->nbytes);
      }
    } else {
      unsigned char* const first = shown != nullptr ? shown->payload : result;
      if (!combines) {
        copy_few(first, theirs != nullptr ? theirs : own, ins->nbytes);
      } else if (!add_few(p.few, first, both[0], both[1], ins->elems)) {
        p.combine(first, nullptr, both, 2, ins->elems, nullptr, p.factor, Store::Plain);
      }
      if (shown != nullptr && result != nullptr) copy_few(result, first, ins->nbytes);
    }
    if (shown != nullptr) publish(*shown, out_id + mark, ins->meta);
    if (ins->from != nullptr) ins->from->consume(in_id);
  }
  for (const LinkUse& use : p.short_links) {
    use.link->next_out += use.sends;
    use.link->next_in += use.recvs;
  }
  if (!noted) keep_books(OpState::Done);
  ring(p);
  return nullptr;
}

template std::shared_ptr<Op> Comm::run_tiny<false>(const std::shared_ptr<const Plan>&,
                                                  const void*, void*, int);
template std::shared_ptr<Op> Comm::run_tiny<true>(const std::shared_ptr<const Plan>&, const void*,
                                                 void*, int);

}  // namespace commrt
