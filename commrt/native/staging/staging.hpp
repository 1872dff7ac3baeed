// SPDX-License-Identifier: Apache-2.0
// Runs collectives on device memory through pinned memory and the host's engine.
//
// A call enqueues all its commands at once, on two streams of the communicator's own:
//
//   d2h:  after the caller's stream; for each piece: copy to the host, start flag = s
//   h2d:  for each piece: after that copy; wait until go flag >= s; copy back. Then the end
//         event, and end flag = e
//
// A stream takes a bounded number of commands (an H200's took 1020), then its caller waits. So the
// host gets its part of a piece before streams are given much that waits for it.
//
// The host's engine gets one operation for each piece, behind a gate that opens at s. The thread
// that makes progress looks at flags in memory: it opens gates, and sets the go flag when an
// operation is done. It calls no driver and no Python, so no blocked stream can hold it up.
//
// Nothing is enqueued later, because streams may share a hardware queue: behind a stream that
// waits for a flag a later copy would wait for ever. Values of flags count on, and waits are
// cyclic, so no flag is ever reset. Both streams work in order, so one flag of each kind serves a
// whole communicator, pieces are let go in order, and pinned memory is a ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device_calls/staged_work.hpp"
#include "planted_bugs.hpp"
#include "staging/pinned_ring.hpp"

namespace commrt {

// Bugs that tests plant in the protocol, to see that they are found.
enum class Planted : int {
  None = 0,
  Ungated,          // the host works before the flag of the copy to it
  NoGo,             // the copy back does not wait for the host
  EarlyRecycling,   // memory is used again once the host is done
  NoEndWait,        // wait() does not wait for the end event
  NoReady,          // the copy does not wait for the caller's stream
  StartEarly,       // the start flag is written before the copy
  EndEarly,         // the end event is recorded before the copy back
  GoEarly,          // the go flag is stored before the host is done
  GoAll,            // the first piece lets all go
  GoOffByOne,       // the copy back waits for the piece before
  EndFlagEarly,     // the end flag is written before the last copy back
  StartOtherStream, // the start flag is written by the other stream
  EndOtherStream,   // the end event is recorded in the stream of the first copies
  ReadyAfter,       // the stream waits for an event that is recorded later
  NotDrained,       // a piece is copied over one that has not gone back
  NotCopied,        // nothing but flags orders the copy back after the copy to the host
  FlagsKept,        // a failure does not release the streams
  WrongSlot,        // a piece goes back from the first one's place
  LateCopy,         // the copy back is given late, and the caller's stream waits for a flag
  ValuesAgain,      // flags do not count on from call to call
  RecycledAtCall,   // memory is used again by the next call
  RingUnlocked,     // memory is taken without the lock under which it comes back
  ReadyLate,        // the caller's stream is recorded after the first copy
  NotPacked,        // boxes are not packed before they are copied to the host
  UnpackedEarly,    // boxes are unpacked before they are copied back
  EventLost,        // a call takes an event more than it gives back
  MemoryKept,       // its pinned memory does not come back
  ReferencesKept,   // nor do its references to arrays
  KernelAside,      // kernels copy to the host in the other stream
  KernelBack,       // kernels copy back in the stream of the first copies
  GivenBackEarly,   // what failed is given back while its streams hold it
  Unagreed,         // the host works before the ranks have compared what they passed
  AgreementUnread,  // nobody looks what came of that
  WordsInPlace,     // what is compared lies where the first piece is copied to
  DrainedEarly,     // a place counts as free before its piece is copied back
  DrainedNext,      // a piece waits for the place after its own
  PackAside,        // boxes are packed in the stream of the copies back
  UnpackAside,      // boxes are unpacked in the stream of the first copies
  StaleEnd,         // wait() waits for the end of the call before
  OpenedAll,        // the first copy to the host lets the host work on all pieces
  StartAhead,       // the start flag promises the piece after, too
  Count,
};
std::vector<std::string> names_of(Planted);

// A collective, in pieces.
struct PiecesCall : StagedCall {
  std::shared_ptr<const StagedPlan> plan;
  std::vector<unsigned char*> arrays;                // on the device, by their numbers
  std::vector<std::vector<std::uint64_t>> tables;    // of addresses on the host, by piece
  PinnedRing::Part memory;
  std::shared_ptr<Op> agreement;    // until the ranks are known to have made the same call
  std::uint64_t* words = nullptr;   // of it, pinned: what is said, then what is heard
};

// One communicator's collectives on one device.
class Stager : public StagedWork {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  Stager(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
         const StagerOptions& options);

  // Gives the device and the engine all that there is to do. With `orders`, the caller's stream
  // goes on only when it is done. `keep` are references that become the call's own. Throws
  // DeviceFailure; then the references are still the caller's.
  CallPtr start(const std::shared_ptr<const StagedPlan>& plan, std::vector<unsigned char*> arrays,
                Stream stream, bool orders, void* const* keep, double timeout_s);

  PlantedBug<Planted> planted;

 private:
  using PiecesPtr = std::shared_ptr<PiecesCall>;
  struct Piece {
    PiecesPtr call;
    std::shared_ptr<Op> op;  // null where a failure came before it
    const StagedPart* part;
    std::size_t number;     // among the call's
    unsigned char* memory;  // pinned
    std::uint32_t value;
    bool last;
    Event copied;           // where there are no flags
    double opened_s = 0;
  };

  bool has(Planted bug) const { return planted.is(bug); }
  void issue(const PiecesPtr& made, Stream stream, void* const* keep);
  PinnedRing::Part take_part(std::size_t nbytes, double timeout_s);
  static std::size_t most_commands(const std::vector<Piece>& pieces);
  void begin(Stream stream);
  void give_rest(PiecesCall& call, std::vector<Piece>& pieces, std::size_t given, Stream stream,
                 std::size_t slots);
  void give_end(PiecesCall& call);
  void copy_to_host(Piece& piece, std::size_t slots);
  void copy_back(Piece& piece, const unsigned char* memory, std::size_t slots);
  void copy(const PiecesCall& made, void* to, const void* from, std::size_t nbytes,
            Stream stream);
  void launch(const StagedLaunch& what, const PiecesCall& made, Stream stream);
  void give_output(const Piece& piece, const unsigned char* memory);
  void submit(Piece* first, Piece* last, Stream stream);
  void touch(const Piece& piece, const std::vector<StagedCopy>& copies, bool writes);
  bool is_agreed(Piece& piece, bool has_come);
  bool look_after(Piece& piece, const std::shared_ptr<Op>& op);
  void give_copy_back(Piece& piece);
  void order_after(const StagedPtr& call, Stream stream) override;
  bool open_gates() override;
  bool let_go() override;
  void give_memory_back(StagedCall& call) override;
  std::size_t memory_nbytes() const override { return ring_.total(); }
  void free_all() override;
  Rest host_is_done() override;
  bool asks_device() const override { return !has(Planted::GivenBackEarly); }
  void let_all_go(const std::string& kind, const std::string& why) override;
  CallPtr oldest() const override;

  std::vector<Event> drained_;         // by slot
  Event stale_ = 0;                    // of a planted bug
  std::atomic<bool> has_kernels_{true};  // as far as is known
  std::atomic<std::uint32_t> issued_;  // the latest value of the start flag
  std::uint32_t ends_;                 // of the end flag

  // Guarded by polling_.
  PinnedRing ring_;
  std::deque<Piece> pieces_;  // the host's part of which is not done
  std::size_t open_ = 0;      // of these, the first so many have open gates
  std::vector<std::shared_ptr<Op>> failed_ops_;
};

}  // namespace commrt
