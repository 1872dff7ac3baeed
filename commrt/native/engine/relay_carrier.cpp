// SPDX-License-Identifier: Apache-2.0
// Frames from a relay to gloo, on the thread that has them.
#include "engine/relay_carrier.hpp"

#include <algorithm>
#include <utility>

#include "engine/gloo_calls.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace commrt {

namespace {

// Guarded by the GIL.
std::vector<RelayCarrier*>& carriers() {
  static auto* const all = new std::vector<RelayCarrier*>;  // relays may outlive static objects
  return *all;
}

}  // namespace

RelayCarrier::RelayCarrier(std::shared_ptr<Relay> relay, nb::object send, nb::object recv,
                           nb::object frombuffer, nb::object uint8, nb::dict landing)
    : relay_(std::move(relay)),
      send_(std::move(send)),
      recv_(std::move(recv)),
      frombuffer_(std::move(frombuffer)),
      uint8_(std::move(uint8)),
      landing_(std::move(landing)) {
  for (int peer = 0; peer < relay_->size(); ++peer) peers_.push_back(std::make_unique<Peer>());
  relay_->be_carried(static_cast<int>(kSlots));
  carriers().push_back(this);
}

RelayCarrier::~RelayCarrier() { forget(); }

void RelayCarrier::forget() {
  auto& all = carriers();
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
  is_forgotten_ = true;
  if (num_giving_ == 0) let_go();
}

void RelayCarrier::let_go() {
  // Their ends may call anything: they come last.
  const nb::object functions[] = {std::move(send_), std::move(recv_), std::move(frombuffer_),
                                  std::move(uint8_)};
  const nb::dict landing = std::move(landing_);
  std::vector<std::vector<Slot>> slots;
  std::vector<std::deque<Sent>> sent;
  for (auto& peer : peers_) {
    slots.push_back(std::exchange(peer->slots, {}));
    sent.push_back(std::exchange(peer->sent, {}));
  }
}

nb::object RelayCarrier::tensor(void* memory, size_t nbytes) const {
  const auto view = nb::steal(PyMemoryView_FromMemory(
      static_cast<char*>(memory), static_cast<Py_ssize_t>(nbytes), PyBUF_WRITE));
  return frombuffer_(view, nb::arg("dtype") = uint8_);
}

RelayCarrier::Slot& RelayCarrier::slot_of(Peer& peer, size_t frame) {
  if (peer.slots.empty()) peer.slots.resize(kSlots);
  Slot& slot = peer.slots[frame % kSlots];
  if (slot.memory == nullptr) {
    slot.memory.reset(new unsigned char[Relay::kFrameNbytes]);
    slot.whole = tensor(slot.memory.get(), Relay::kFrameNbytes);
    nb::list head;
    head.append(tensor(slot.memory.get(), Relay::kHeaderNbytes));
    slot.heads = std::move(head);
  }
  return slot;
}

void RelayCarrier::give(int number) {
  if (is_forgotten_) return;
  const Giving giving(*this);
  Peer& peer = *peers_[static_cast<size_t>(number)];
  while (relay_->begin_to_take(number)) {
    for (;;) {
      Relay::Todo todo;
      // A slot's memory is free: the relay counts frames on their way.
      Slot& slot = slot_of(peer, peer.num_frames);
      if (!relay_->take(number, slot.memory.get(), todo)) break;
      const bool is_frame = todo.frame_nbytes != 0;
      peer.num_frames += is_frame;
      try {
        send(peer, number, slot, todo);
      } catch (nb::python_error& error) {
        lose(number, error.what());
      }
      if (!is_frame) relay_->frame_left(number);
    }
  }
}

void RelayCarrier::send(Peer& peer, int number, Slot& slot, const Relay::Todo& todo) {
  if (todo.landing != nullptr) {
    // Posted before the peer hears that it may send.
    const nb::object memory = tensor(todo.landing, todo.landing_nbytes);
    nb::list one;
    one.append(memory);
    const nb::object work = recv_(one, number, todo.where);
    landing_[nb::int_(number)].attr("__setitem__")(todo.where, nb::make_tuple(work, memory));
  }
  if (todo.frame_nbytes == 0) return;
  if (todo.payload != nullptr) {
    const nb::object memory = tensor(const_cast<void*>(todo.payload), todo.payload_nbytes);
    nb::list one;
    one.append(memory);
    peer.sent.push_back({send_(one, number, todo.where), memory, false});
  }
  nb::object frame = slot.heads;
  if (todo.frame_nbytes != Relay::kHeaderNbytes) {
    const nb::slice head(nb::int_(0), nb::int_(todo.frame_nbytes), nb::none());
    nb::list one;
    one.append(slot.whole[head]);
    frame = std::move(one);
  }
  peer.sent.push_back({send_(frame, number, kFrames), frame, true});
  if (todo.ends) peer.ended = true;
  // Half of the slots are to be free again before the others are used.
  if (todo.ends || todo.payload != nullptr || peer.num_frames % (kSlots / 2) == 0) {
    relay_->call(number);
  }
}

void RelayCarrier::give_all() {
  for (int peer = 0; peer < relay_->size(); ++peer) give(peer);
}

void RelayCarrier::give_everything() {
  GlooGroup::start_everything();
  // One that is given to may end meanwhile: torch lets go of the GIL.
  const std::vector<RelayCarrier*> all = carriers();
  for (RelayCarrier* one : all) {
    const auto& now = carriers();
    if (std::find(now.begin(), now.end(), one) == now.end()) continue;
    const nb::object kept = nb::find(*one);  // nor does this one end meanwhile
    one->give_all();
  }
}

nb::object RelayCarrier::attend(int number) {
  Peer& peer = *peers_[static_cast<size_t>(number)];
  if (peer.ended && peer.sent.empty()) return nb::none();
  bool goes_on = false;
  {
    const ReleasedGil released;
    goes_on = relay_->attend(number);
  }
  if (!goes_on) return nb::none();
  GlooGroup::start_everything();  // what the progress thread has come upon
  nb::list works;
  for (const Sent& one : peer.sent) works.append(one.work);
  return works;
}

void RelayCarrier::left(int number) {
  Peer& peer = *peers_[static_cast<size_t>(number)];
  if (peer.sent.empty()) return;
  const Sent first = std::move(peer.sent.front());
  peer.sent.pop_front();
  if (first.is_frame) {
    relay_->frame_left(number);
  } else {
    relay_->sent(number);
  }
}

void RelayCarrier::lose(int number, const std::string& why) {
  const ReleasedGil released;
  relay_->lost(number, "rank " + std::to_string(number) +
                           " of the job, on another node, has ended, or the network to it has "
                           "failed (gloo: " + why.substr(0, why.find('\n')) + ")",
               why.substr(0, why.find('\n')));
}

}  // namespace commrt
