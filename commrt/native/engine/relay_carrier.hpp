// SPDX-License-Identifier: Apache-2.0
// Gives a relay's frames to gloo, through a group of torch's that Python has made.
//
// Sending to gloo never waits. So any thread with frames and the GIL does it: one that calls, waits
// or receives. A frame then leaves without waking another thread. The code is all C++, as a signal
// handler could interrupt Python between two lines and leave a frame half sent.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/relay.hpp"

namespace commrt {

class RelayCarrier {
 public:
  // send(list of one tensor, peer, tag) and recv are the group's, landing is where receives of
  // payloads go: for each peer a dictionary of (work, tensor), by their numbers.
  RelayCarrier(std::shared_ptr<Relay> relay, nanobind::object send, nanobind::object recv,
               nanobind::object frombuffer, nanobind::object uint8, nanobind::dict landing);
  ~RelayCarrier();
  RelayCarrier(const RelayCarrier&) = delete;
  RelayCarrier& operator=(const RelayCarrier&) = delete;

  // All of these need the GIL.
  // Gives gloo what there is for this peer, unless another thread does.
  void give(int peer);
  void give_all();
  // Waits for frames that nobody sends, or for some on their way. The works of the latter, to be
  // waited for one by one, and each followed by `left`; None: nothing comes any more.
  nanobind::object attend(int peer);
  void left(int peer);
  void lose(int peer, const std::string& why);
  // A tensor of the bytes at an address.
  nanobind::object tensor(void* memory, size_t nbytes) const;
  // No work of gloo's, and nothing else of Python's, is kept any more, once no thread gives.
  void forget();

  // Starts gloo's queued collectives, and gives it the frames of all carriers of this process.
  static void give_everything();

 private:
  static constexpr int kFrames = 0;     // gloo's tag; those of payloads are their numbers
  static constexpr size_t kSlots = 16;              // frames on their way
  struct Sent {
    nanobind::object work;
    nanobind::object memory;
    bool is_frame = false;
  };
  struct Slot {
    std::unique_ptr<unsigned char[]> memory;
    nanobind::object whole;  // a tensor of it
    nanobind::object heads;  // a list of a tensor of a frame without payload
  };
  struct Peer {
    std::vector<Slot> slots;
    size_t num_frames = 0;
    std::deque<Sent> sent;
    bool ended = false;
  };

  // A thread gives: whatever it calls may let another one have the GIL, which may end the relay.
  class Giving {
   public:
    explicit Giving(RelayCarrier& carrier) : carrier_(carrier) { ++carrier_.num_giving_; }
    ~Giving() {
      if (--carrier_.num_giving_ == 0 && carrier_.is_forgotten_) carrier_.let_go();
    }
    Giving(const Giving&) = delete;
    Giving& operator=(const Giving&) = delete;

   private:
    RelayCarrier& carrier_;
  };

  Slot& slot_of(Peer& peer, size_t frame);
  void send(Peer& peer, int number, Slot& slot, const Relay::Todo& todo);
  void let_go();

  std::shared_ptr<Relay> relay_;
  nanobind::object send_, recv_, frombuffer_, uint8_;
  nanobind::dict landing_;
  std::vector<std::unique_ptr<Peer>> peers_;
  int num_giving_ = 0;
  bool is_forgotten_ = false;
};

// At its end gives what is left: a caller may go and wait elsewhere for whom it has just sent to.
// Needs the GIL then.
struct GiveAtEnd {
  ~GiveAtEnd() {
    if (!Relay::is_due()) return;
    const nanobind::error_scope saved;
    RelayCarrier::give_everything();
  }
};

}  // namespace commrt
