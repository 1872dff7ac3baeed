// SPDX-License-Identifier: Apache-2.0
// Refused calls between nodes: messages of one that are on their way, and what comes instead of
// those that are not.
//
// Messages of a pair of ranks cross in the order of their ids (mpi_steps.cpp), so both ranks know
// which call a message belongs to by counting. The order has to survive a refused call:
// - A rank that leaves a call sends an empty message in the place of each that it has not sent.
// - It takes its receives back, and discards as many messages as it had still expected.
// - The rank that refused has neither sent nor expected anything. So the others skip what they
//   expected from there, and tell it how many messages they have sent, and how many ids both skip.
//   It sends nothing of later calls to a rank that has not told it so.
// - An array that is being sent without a copy is let go once its receiver has left the call, too:
//   else that rank could take what the program writes there next for the value.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/call_mark.hpp"
#include "engine/mpi_api.hpp"

namespace commrt {

class Comm;
class Op;
struct Instr;
struct MpiEnd;

class Afar {
 public:
  explicit Afar(Comm& comm) : comm_(comm) {}
  ~Afar();
  Afar(const Afar&) = delete;
  Afar& operator=(const Afar&) = delete;

  // The answer to a rank that has refused an operation: how many ids it skips of messages from
  // here, how many of these have been sent, as the carrier counts them, and how many ids it skips
  // of messages to here.
  struct Told {
    uint64_t from_here = 0, sent = 0, to_here = 0;
  };

  // An operation sends its first message to a peer; `ids` will be all of them.
  void note_first(int peer, uint64_t seq, uint64_t ids);
  // A message has been given to the carrier.
  void count_sent(int peer) { ++history_[static_cast<size_t>(peer)].sent; }

  // True if something is left to do.
  bool is_busy() const {
    return !unsettled_.empty() || !fills_.empty() || !drains_.empty() || !left_.empty() ||
           !remains_.empty();
  }
  // True if operation `seq` may not exchange messages with a peer yet, or with any.
  bool hold_back(int peer, uint64_t seq) const;
  bool hold_back(uint64_t seq) const;
  // This rank has refused operation `seq`, which has no ids.
  void refuse(uint64_t seq);
  // A peer knows of that, and tells what to skip.
  void settle(int peer, uint64_t seq, const Told& told);
  // An operation ends here since some rank has refused it. To be called before Op::refuse.
  void leave(Op& op);
  // True once nothing touches the arrays of such an operation any more, or only peers that have
  // left it, too.
  bool is_at_rest(Op& op);
  // Nothing of operation `seq` goes to and from a peer: it has refused that. None: what was sent
  // there is not known any more.
  std::optional<Told> pass_over(int peer, uint64_t seq);
  // Takes back the ids of a new operation, of which the peer was told before.
  void forget(int peer, uint64_t seq);
  // A peer has left operation `seq`, and takes no message of it for a value.
  void has_left(int peer, uint64_t seq);
  // Does what can be done of all this.
  void work();

 private:
  struct First {  // an operation's first message to a peer
    uint64_t seq, ids, sent_before;
  };
  struct History {  // of the messages to a peer
    static constexpr size_t kMost = 64;
    uint64_t sent = 0;
    uint64_t num = 0;
    std::vector<First> firsts;
  };
  struct Ids {  // of an operation's messages with one peer, one way
    int peer;
    uint64_t seq;
    uint64_t base, at, end;  // at: the next that is to be seen to
    std::vector<bool> twice;  // of the first fragment's: a stamp goes before the value
    // Messages of the carrier's from `from` to `end`.
    uint64_t count(uint64_t from) const;
  };
  struct Fill : Ids {
    uint64_t mark;
    bool is_silent;
  };
  struct Drain : Ids {
    uint64_t left;  // messages of the carrier's that are to be discarded
  };
  struct Unsettled {  // a refusal of this rank that a peer may not know of
    int peer;
    uint64_t seq;
    uint64_t in, out;  // the ids that follow
  };
  struct Left {
    int peer;
    uint64_t seq;
  };
  struct Remains {  // a message that nobody waits for
    MpiRequest request;
    std::unique_ptr<unsigned char[]> bytes;
    std::unique_ptr<Stamp> stamp;
    std::shared_ptr<Op> op;  // whose array it is
  };

  bool take_back(MpiRequest& request, MpiEnd& end);
  void take_back(const Op& op, int peer);
  void drain_again(int peer);
  Ids ids_of(const Op& op, size_t peer, bool incoming) const;
  bool let_go(Op& op, int peer);
  bool has_remains(const Op& op) const;
  void move(int peer, uint64_t after, uint64_t in, uint64_t out);
  bool fill(Fill& one);
  bool drain(Drain& one);
  void finish_remains();
  std::optional<Told> sent_of(int peer, uint64_t seq) const;
  void fail(const char* function, int code);

  Comm& comm_;
  std::vector<History> history_;  // by rank; as long as there are ranks of other nodes
  std::vector<Unsettled> unsettled_;
  std::vector<Fill> fills_;
  std::vector<Drain> drains_;
  // Nothing was left of them while receives of earlier operations still waited. Where those are
  // taken back, the ids of these follow them once more.
  std::vector<Drain> drained_;
  std::vector<Left> left_;
  std::vector<Remains> remains_;

 public:
  void attach(size_t size) { history_.resize(size); }
};

}  // namespace commrt
