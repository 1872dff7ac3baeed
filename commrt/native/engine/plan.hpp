// SPDX-License-Identifier: Apache-2.0
// A plan: one rank's lowered schedule bound to element counts, or one vendor collective.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/mpi_api.hpp"
#include "engine/store_choice.hpp"
#include "engine/user_reduction.hpp"
#include "kernels/boxes.hpp"
#include "kernels/kernels.hpp"
#include "kernels/kernels_few.hpp"
#include "types.hpp"

namespace commrt {

class Comm;
struct GlooPlan;
struct Link;

// The buffers an instruction addresses.
enum class SpaceKind : uint8_t { In = 0, Out = 1, Tmp = 2 };

struct SpaceSpec {
  SpaceKind kind;
  std::vector<int64_t> offsets;  // block i = elements [offsets[i], offsets[i+1])
  size_t tmp_offset = 0;         // byte offset in the operation's scratch, for Tmp
  std::vector<Box> boxes = {};   // block i is boxes[i]; the buffer is a table of arrays
};

// One operand: a slice of a space, or the k-th message with a peer within one fragment.
struct Ref {
  bool is_message;
  int space;  // local
  int lo, hi;
  int peer;  // message: index into Plan::peers
  int k;
  int64_t offset_nbytes;  // local, unfragmented: from the start of the space
  // A message that the peer only stores: in which cases (Sharing, of the peer's buffers) it may
  // be written there at once, and where, in bytes from the start of the peer's result.
  uint8_t deliverable = 0;
  int64_t landing_nbytes = 0;
};

struct Instr {
  std::vector<Ref> inputs;     // in reduction order
  std::vector<Ref> local_outs;
  std::vector<Ref> sends;
  std::vector<int> deps;
  std::vector<uint64_t> scaled_bits;  // inputs multiplied by the plan's factor; empty: none
  int publish = -1;          // index among instructions with sends, or -1
  int64_t elems = 0;         // unfragmented length
  size_t inline_nbytes = 0;  // payloads up to this ride in lines
  uint64_t slice_nbytes = 0;  // what one run counts for where work is bounded
  bool has_mpi = false;      // some message crosses MPI
  int64_t fragments = 0;     // of the plan's; later ones leave it out. 0: all of them
  bool boxed = false;        // its local operands are boxes, nothing between them is combined
  // The cases (Sharing) in which peers may read what is sent out of this rank's own buffer.
  uint8_t exposable = 0;  // out of the result here
  uint8_t operand_exposable = 0;  // out of the only operand
  bool gives_result = false;  // its first local output is read by no instruction, and may stream
  bool is_final = false;      // its first local output is a result, and is read by no instruction

  const uint64_t* scaled() const {
    return scaled_bits.empty() ? nullptr : scaled_bits.data();
  }
};

struct PeerUse {
  int rank;
  int sends_per_fragment;
  int recvs_per_fragment;
  // The numbers of the plan's fragments that have messages with this peer; 0: all of them have.
  int64_t send_fragments = 0;
  int64_t recv_fragments = 0;

  // Messages of one run.
  uint64_t num_sends() const { return static_cast<uint64_t>(send_fragments * sends_per_fragment); }
  uint64_t num_recvs() const { return static_cast<uint64_t>(recv_fragments * recvs_per_fragment); }
};

// The one opaque step of a vendor collective.
struct NativeCall {
  Handle datatype = 0;
  Handle op = 0;
  Handle comm = 0;
  int count = 0;  // per-rank block for block operations; this rank's part where they differ
  // A number of those lengths that all ranks agree on; 0: of none.
  uint64_t length = 0;
  uint64_t hash = 0;  // of this and of the plan's mark
  // If the blocks differ: elements and first element per rank, of what is sent (out of the root of
  // a scatter, and to every rank of an alltoall) and of what is received.
  std::vector<int> send_counts, send_at, recv_counts, recv_at;
};

// Bounds of what runs from the caller's stack (short_run.cpp).
constexpr size_t kShortTmpBytes = 512;
constexpr size_t kShortPeers = 16;
constexpr size_t kShortInputs = 16;

// Instructions of a single fragment with everything looked up that a run does not change.
// They lie one after another in memory: at 8 bytes each pointer that is followed shows.
struct ShortOperand {
  Link* link;      // message: with whom; else null
  int32_t where;   // message: the rank; else a SpaceKind
  int32_t k;       // message: its number within the fragment
  int64_t offset;  // from the start of the buffer, in bytes
};

struct ShortInstr {
  const Instr* full;
  uint32_t first;  // operands: inputs, local outs, sends
  uint16_t num_inputs, num_local_outs, num_sends;
  size_t elems, nbytes;
  size_t slot_offset;  // from the start of the lane
};

// The same where a value fits into a message line and an instruction combines at most one
// message with one own value, for at most one place here and one peer: most of what runs at
// such lengths. Written out, it takes half the instructions.
struct TinyInstr {
  Link* from;       // whose message it waits for, or null
  Link* to;         // to whom it sends the value, or null
  int32_t from_k, to_k;
  int32_t own, result;  // SpaceKind of the own operand and of the result here; negative: none
  int64_t own_offset, result_offset;
  uint64_t meta;    // of its messages, both ways
  uint32_t elems, nbytes;
  bool message_first;  // of the two that are combined
};

struct LinkUse {  // messages of one run
  Link* link;
  uint32_t sends, recvs;
};

// Python and the engine share plans by one count: a plan that dies in the engine, under its
// lock, must not need the GIL.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  int coll = 0;
  DType dtype = DType::F32;
  RedOp redop = RedOp::Sum;
  int root = 0;
  int device = kHost;     // where the buffers are
  int64_t in_elems = 0;   // 0 where this rank has no send buffer
  int64_t out_elems = 0;  // 0 where this rank has no output
  bool returns_out = false;  // the caller gets its array back even where nothing is written
  std::string label;      // "shm/ring", for messages and records

  // schedule
  std::vector<SpaceSpec> spaces;
  std::vector<Instr> instrs;
  std::vector<PeerUse> peers;
  std::vector<int> publish_instr;  // publish index -> instruction
  int64_t fragments = 1;
  int depth = 2;          // fragments in flight
  int spins = -1;         // looks of a rank that waits, before it yields; negative: the communicator's
  size_t inline_nbytes = 0;  // payloads for one peer ride in lines up to this; kInlineBytes at least
  size_t slot_nbytes = 0;
  int slots = 0;
  // True if runs go through the window of slots (Comm::slot_window). False if the slots stay in
  // the first cache, or if a run uses each of its slots again and again.
  bool moves_on = false;
  uint64_t ahead = 0;     // boxed: instructions tried beyond the first that is not done
  int most_slots = 0;     // boxed: slots to use again within the one fragment; 0: not boxed
  bool needs_lane = false;
  size_t tmp_nbytes = 0;
  size_t itemsize = 1;
  Store store = Store::Plain;
  Store adaptive = Store::Plain;  // which destinations are decided by experience
  // True if a run also takes the time that its peers need: messages go both ways, or slots are
  // used again. A rank that only sends may be done before its peers have read.
  bool answered = false;
  bool sends = false;
  mutable StoreChoice choice;  // guarded by the engine's lock
  bool shows_result = false;  // long enough for buffers in the symmetric heap to matter
  mutable StoreChoice heap_choice;  // the same for buffers there: all stores, or none
  CombineFn combine = nullptr;
  UserReduction user;      // instead of combine
  Scale factor;            // of what this rank contributes
  // True if an input is rounded to the type after it is multiplied by the factor, before it is
  // added. Other ranks round what they send, too, so it does not matter which rank adds.
  bool rounds_scaled = false;
  // True if a contribution may cross unscaled, and the reader multiplies it. Then all ranks have
  // the same factor, and no instruction writes the product where the contribution may lie.
  bool shows_raw = false;
  bool divide_out = false;  // integer avg: divide the result by size at the end
  int64_t divisor = 1;
  // Set for a logical reduction whose result here is a single contribution, as it came. It turns
  // the result into 0 or 1 at the end.
  CombineFn truth = nullptr;

  bool run_short = false;  // is_short(), settled by finish()
  std::vector<ShortInstr> short_instrs;  // where run_short
  std::vector<ShortOperand> short_operands;
  std::vector<LinkUse> short_links;
  uint16_t facts = 0;  // in the root's place of the mark, where there is no root
  uint64_t mark = 1;  // what its messages say of the call (call_mark.hpp)
  std::vector<TinyInstr> tiny_instrs;  // all of them or none
  FewSum few = FewSum::None;  // for these, where there is one
  bool has_more = false;  // some of their values are longer than a line

  // vendor collective
  bool native = false;
  NativeCall call;
  std::shared_ptr<const GlooPlan> gloo;  // gloo's collective, and not an MPI library's

  // Computes lengths and slots once instructions and spaces are in place. `fragments` must
  // be equal on all ranks. Throws std::invalid_argument where a fragment does not fit into
  // a lane of `lane_nbytes`. `slot_reuse`: fragments whose payload may be unread at once; 0: two,
  // or as many as `slot_window` holds (Comm::slot_window).
  void finish(int64_t fragments, size_t lane_nbytes, int slot_reuse, size_t slot_window);
  // Sets what messages, or peers that look, see of the call.
  void settle_mark();
  // Settles what lengths do not change, before finish(), in plans that are copied from a template.
  void settle_program();
  // For plans with run_short: looks up all that a run on this communicator does not change.
  void flatten(Comm& comm);

  // Reduces an instruction's inputs (`elems` elements each) into its first local output and
  // into what is sent; either may be null. `kind` is the run's, not the plan's. Bit k of `raw`:
  // input k came as it is (shows_raw).
  void compute(const Instr& ins, Store kind, unsigned char* local, unsigned char* sent,
               const void* const* inputs, size_t elems, uint64_t raw = 0) const {
    const int nin = static_cast<int>(ins.inputs.size());
    const uint64_t* scaled = ins.scaled();
    if (raw != 0) {
      if (scaled != nullptr) raw |= scaled[0];
      scaled = &raw;
    }
    if (!ins.gives_result) kind = store_of(false, streams_second(kind));
    if (nin == 1 && scaled == nullptr) {
      const size_t nbytes = elems * itemsize;
      if (local != nullptr && local != inputs[0]) {
        copy(local, inputs[0], nbytes, streams_first(kind));
      }
      if (sent != nullptr) copy(sent, inputs[0], nbytes, streams_second(kind));
    } else if (user.fn != nullptr) {
      combine_by(user.fn, itemsize, local != nullptr ? local : sent,
                 local != nullptr ? sent : nullptr, inputs, nin, elems);
    } else if (rounds_scaled && scaled != nullptr) {
      combine_rounded(nin, scaled, local != nullptr ? local : sent,
                      local != nullptr ? sent : nullptr, inputs, elems);
    } else if (local == nullptr) {
      combine(sent, nullptr, inputs, nin, elems, scaled, factor, store_of_second(kind));
    } else {
      combine(local, sent, inputs, nin, elems, scaled, factor, kind);
    }
  }

  void combine_rounded(int nin, const uint64_t* scaled, unsigned char* dst, unsigned char* dst2,
                       const void* const* inputs, size_t elems) const;

  // True if a result still needs work when all instructions are done.
  bool completes() const { return divide_out || truth != nullptr; }
  // Does the rest of the work on `elems` elements of it.
  void complete(unsigned char* result, size_t elems) const {
    if (divide_out) divide_inplace(dtype, result, elems, divisor);
    if (truth != nullptr && elems != 0) {
      const void* twice[] = {result, result};
      truth(result, nullptr, twice, 2, elems, nullptr, factor, Store::Plain);
    }
  }

  // Sub-range of fragment f of a block of `len` elements, for an instruction.
  int64_t cut(const Instr& ins, int64_t len, int64_t f) const {
    if (f == 0) return 0;
    if (f == ins.fragments) return len;
    const int64_t align = itemsize >= kAlign ? 1 : static_cast<int64_t>(kAlign / itemsize);
    return len * f / ins.fragments / align * align;
  }

  // The offset in its slot, in bytes, of a payload that is written together with `local`. Both
  // then have the same place in a line, so that both can be streamed.
  size_t slot_shift(const void* local) const {
    return reinterpret_cast<uintptr_t>(local) % kAlign;
  }

  // Bytes of memory that it takes.
  size_t nbytes() const;

  // True if runs are timed to learn from them.
  bool learns() const { return adaptive != Store::Plain && (answered || sends); }

 private:
  bool is_short() const;
  bool add_tiny(const ShortInstr& flat);
  static constexpr size_t kAlign = 64;
  int64_t slice_elems(const Ref& ref) const;
  size_t largest_fragment(const Instr& ins, const Ref& ref) const;
  bool reads_again(const Ref& written) const;
};

}  // namespace commrt
