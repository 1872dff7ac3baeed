// SPDX-License-Identifier: Apache-2.0
// Refused calls: a rank whose call was refused tells its peers, and all of them go on in step.
//
// A call with a mistake sends nothing. It takes its place in the order of calls all the same: the
// rank writes a record of it for the ranks of its node, and its next call has the next number.
// Every other rank fails its operation of that number, names the rank and the reason, and goes on.
//
// Afterwards the ids of messages must agree again (Link). The rank that refused does not know how
// many messages its peers would have exchanged with it. So
// - a peer takes back what it expected from that rank: later messages move up;
// - it answers with the ids of what it has sent, or would have sent, to that rank, which skips them;
// - ranks that failed skip what they expected from each other, once the other has begun or refused
//   that operation, too: only then it is known that these ids will not be used by a later one.
//
// A right call pays nothing: one word of the node counts refusals, and only an operation that has
// become an Op looks at it. Two rules make that enough. A message counts as here only if the word
// shows nothing new after the message was seen: whoever refused wrote the word before it sent
// anything of later calls. And a line that a peer has given back is used only under the same
// condition: a rank that left an operation gives lines back after it has seen the word.
//
// Between nodes packets tell (P2P::tell_refused), and `afar` keeps the order of messages. A rank that
// leaves a call by such a packet tells its node first, as one that refuses does.
//
// A device gives no call back. So a rank asks before it refuses a call that others may have given to
// theirs (device_refusals.hpp). A refusal that meets such a call after all ends the communicator; and
// a rank that has refused one so gives the device the next one only when its peers have heard of that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/afar.hpp"
#include "engine/context_ends.hpp"
#include "engine/layout.hpp"
#include "engine/number_ranges.hpp"

namespace commrt {

class Comm;
class DeviceRefusals;
class Op;
class StandIns;

// Returns at most so many bytes of UTF-8, without a part of a character.
std::string shortened(const std::string& text, size_t most);
// The error of a call that a rank has refused, in words.
std::string said_refused(int rank, const std::string& reason);

class Refusals {
 public:
  explicit Refusals(Comm& comm);
  ~Refusals();
  Refusals(const Refusals&) = delete;
  Refusals& operator=(const Refusals&) = delete;

  // True if the program is to hear in its next call of one that a device has not done. Takes no lock.
  bool has_untold() const { return has_untold_.load(std::memory_order_relaxed); }
  void set_untold(bool is_any) { has_untold_.store(is_any, std::memory_order_relaxed); }

  // To be called once the communicator has its arena, and after it has lost it.
  void attach();
  void detach();

  // True if a rank of this node has refused a call, and this rank has not looked at it.
  bool is_due() const { return told_->load(std::memory_order_acquire) != seen_; }
  // True while something is not settled. Then no operation runs from the caller's stack.
  bool disturb() const { return disturb_; }
  // True if a rank of this node has refused a call of which `matters` says so, by its number.
  template <typename Matters>
  bool any(const Matters& matters) const {
    for (int member = 0; member < num_members(); ++member) {
      for (const uint64_t seq : all_of(member)) {
        if (matters(seq)) return true;
      }
    }
    return false;
  }
  // True if operation `seq` may not take messages from a peer yet: their ids are not known.
  bool hold_back(int peer, uint64_t seq) const;
  // The same for a library's collective, which takes messages from all.
  bool hold_back(uint64_t seq) const;
  // Fails what others have refused, and settles what can be settled.
  void look();
  // Takes a place in the order of calls for one that was refused here. False: peers have not
  // looked at so many earlier ones that there is no room; nothing has happened.
  bool refuse(const std::string& reason);
  // A rank of another node knows of this rank's refusal of `seq`.
  void settle_afar(int rank, uint64_t seq, const Afar::Told& told);
  // A rank of another node has left operation `seq`.
  void has_left_afar(int rank, uint64_t seq);
  // A rank of another node has refused its operation `seq`.
  void hear_from_afar(int rank, uint64_t seq, const std::string& reason);
  // An operation that is about to begin was refused by others. Its ids are those of a call that has
  // begun.
  bool are_for(const Op& op) const;
  void end_new(Op& op);
  // Fails an operation of the library's: another rank has left it, since some rank has refused it.
  void end_after(uint64_t seq, const std::string& why);
  // Looks what is left to do.
  void see();
  // Why others have refused the next operation; empty: they have not.
  std::string why_next();
  // Counts the next operation, which runs nowhere: some rank has refused it, or the ranks met.
  void pass_over();
  // False: no rank that this one can see or has heard of has ever refused a call. Takes no lock.
  bool have_been() const {
    return told_->load(std::memory_order_acquire) != 0 || have_been_.load(std::memory_order_acquire);
  }
  // Looks at what ranks of this and of other nodes have refused, whatever is in flight.
  void look_around();
  // A device is given operation `seq`. Returns why not, where another rank has refused that; then
  // the communicator has ended.
  std::string give_to_device(uint64_t seq);
  // Why a device's operation `seq` has ended by a refusal of it or of an earlier one; empty: it has
  // not.
  std::string why_device_ends(uint64_t seq) const;
  // Why a rank of this node has refused operation `seq`; empty: it has not, as far as is known.
  std::string reason_of(int member, uint64_t seq) const;

 private:
  struct Coming {  // a refusal of an operation that this rank has not begun
    uint64_t seq;
    int rank;
    std::string why;
  };
  struct Range {
    uint64_t begin = 0, end = 0;
    uint64_t length() const { return end - begin; }
  };
  struct Use {  // the messages of an operation with one peer
    int rank;
    Range out, in;
  };
  struct Ended {  // an operation that has failed here by a refusal
    uint64_t seq;
    std::vector<Use> uses;
  };
  struct Skip {  // messages from a peer that nobody will read
    int peer;
    uint64_t seq;
    Range ids;
  };
  struct Unsettled {  // a refusal of this rank that a peer has not answered
    int peer;
    uint64_t seq;
    uint64_t index;
    uint64_t at;  // the id of the first message from the peer that follows
  };

  void hear(int member);
  void hear_of_afar(int member);
  void tell_node(int rank, uint64_t seq, const std::string& reason);
  void end_by(int rank, uint64_t seq, const std::string& why);
  void end_communicator(uint64_t seq);
  void end_all(Op& op, int rank, const std::string& why);
  void end_on_device(uint64_t seq, const std::string& why);
  Range hear(int rank, uint64_t seq, const std::string& why);
  Op* find(uint64_t seq) const;
  Ended& end(Op& op, const std::string& why);
  static Op& with_messages(Op& op);
  void answer_all(uint64_t seq);
  Range leave(Ended& ended, int rank);
  void move(int peer, uint64_t after, uint64_t by);
  void settle();
  uint64_t count_by_marks(const Unsettled& one, bool& is_all) const;
  void skip();
  void prune();
  unsigned char* region(int member) const;
  RankHeader& header(int member) const;
  Refusal& record(int member, uint64_t index) const;
  int num_members() const;
  // The numbers of the last calls that a member has refused, or that it knows others to have refused.
  std::vector<uint64_t> all_of(int member) const;
  Refusal& record_afar(int member, uint64_t index) const;
  Answer& answer(int of, int to, uint64_t index) const;
  std::atomic<uint64_t>& heard(int of, int from) const;

  static const std::atomic<uint64_t> kNone;
  Comm& comm_;
  const std::atomic<uint64_t>* told_ = &kNone;
  uint64_t seen_ = 0;
  uint64_t num_own_ = 0;
  bool disturb_ = false;
  std::atomic<bool> has_untold_{false};
  std::vector<Coming> coming_;
  std::vector<Ended> ended_;
  std::vector<Skip> skips_;
  std::vector<Unsettled> unsettled_;
  std::vector<uint64_t> seen_afar_;  // by member: of what it has heard from other nodes
  std::atomic<bool> have_been_{false};  // of this rank or of other nodes
  NumberRanges on_device_;              // the operations that devices were given
  uint64_t device_ends_from_ = ~uint64_t{0};
  std::string why_device_ends_;

 public:
  Afar afar{comm_};
  ContextEnds context_ends{comm_};
  const std::unique_ptr<StandIns> stand_ins;  // where an MPI library runs the calls
  const std::unique_ptr<DeviceRefusals> on_devices;
};

}  // namespace commrt
