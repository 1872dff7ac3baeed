// SPDX-License-Identifier: Apache-2.0
// Binds the relay to the threads of Python's that carry its frames (commrt/gloo/relay.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "engine/relay.hpp"
#include "engine/relay_carrier.hpp"
#include "engine/tcp_links.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace commrt {

namespace {

unsigned char* at(uint64_t address) { return reinterpret_cast<unsigned char*>(address); }

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

nb::object next(Relay& relay, int peer, uint64_t frame) {
  Relay::Todo todo;
  {
    const ReleasedGil released;
    todo = relay.next(peer, at(frame));
  }
  if (todo.ends && todo.frame_nbytes == 0) return nb::none();
  return nb::make_tuple(todo.frame_nbytes, address_of(todo.payload), todo.payload_nbytes,
                        address_of(todo.landing), todo.landing_nbytes, todo.where, todo.ends);
}

}  // namespace

void bind_relay(nb::module_& m) {
  nb::class_<Relay>(m, "Relay", "Messages to other nodes that threads of Python's carry.")
      .def(nb::new_([](int rank, int size) { return std::make_shared<Relay>(rank, size); }),
           nb::arg("rank"), nb::arg("size"))
      .def_prop_ro("frame_nbytes", [](const Relay&) { return Relay::kFrameNbytes; },
                   "The longest frame.")
      .def("next", &next, nb::arg("peer"), nb::arg("frame"),
           "Wait for something to send and write its frame. (bytes of the frame, payload to be "
           "sent before it, its bytes, where to receive a payload, its bytes, the number of the "
           "payload, whether it is the last one); None where the peer is lost. A frame of 0 "
           "bytes is none.")
      .def("sent", &Relay::sent, nb::arg("peer"), nb::call_guard<ReleasedGil>(),
           "The oldest payload that `next` gave has left.")
      .def("arrived",
           [](Relay& relay, int peer, uint64_t frame, uint64_t nbytes) {
             return relay.arrived(peer, at(frame), nbytes);
           }, nb::arg("peer"), nb::arg("frame"), nb::arg("nbytes"),
           nb::call_guard<ReleasedGil>(),
           "Take a frame. 0: on to the next; -1: it was the last one; else wait for the payload "
           "of this number first.")
      .def("landed", &Relay::landed, nb::arg("peer"), nb::arg("where"),
           nb::call_guard<ReleasedGil>(), "The payload of this number is there.")
      .def("lost", &Relay::lost, nb::arg("peer"), nb::arg("why"), nb::arg("error") = "",
           nb::call_guard<ReleasedGil>(),
           "Nothing comes from the peer any more, nor reaches it. The error is its carrier's.")
      .def("watch", &Relay::watch, nb::arg("liveness"), nb::arg("away"),
           "Tell liveness who is lost and who leaves, and other nodes whose process has ended here.")
      .def("ask", &Relay::ask, nb::arg("peer"), nb::arg("tag"), nb::arg("about"),
           nb::call_guard<ReleasedGil>(),
           "Ask a peer what it does on a communicator, or whether another rank of its node is "
           "stopped; return the number of the question.")
      .def("answer",
           [](Relay& relay, uint64_t question) -> nb::object {
             Relay::Answer said;
             if (!relay.answer(question, said)) return nb::none();
             return said.is_known ? described(said.state) : nb::object(nb::tuple());
           }, nb::arg("question"),
           "Return the peer's answer, as rank_states does: None so far; empty: no such "
           "communicator.")
      .def("ask_for_dumps", &Relay::ask_for_dumps, nb::call_guard<ReleasedGil>(),
           "Ask all peers to write their last operations.")
      .def("failure_of", &Relay::failure_of, nb::arg("peer"),
           "Reason why a peer is lost, or empty.")
      .def("leave", &Relay::leave, nb::call_guard<ReleasedGil>(),
           "Tell all peers that this was all.");

  m.def("num_late_looks", [] { return TcpPoller::instance().num_late(); },
        "How often the thread that receives while nobody looks found something to do by its "
        "clock, as nobody had handed the looking over.");

  nb::class_<TcpLinks>(m, "TcpLinks", "Carries a relay's frames by TCP.")
      .def(nb::new_([](std::shared_ptr<Relay> relay,
                       const std::vector<std::tuple<int, int, int>>& sockets) {
             std::vector<TcpLinks::Sockets> all;
             for (const auto& [peer, frames, payloads] : sockets) {
               all.push_back({peer, {frames, payloads}});
             }
             auto made = std::make_shared<TcpLinks>(*relay, all);
             relay->be_sent_by(made);
             return made;
           }), nb::arg("relay"), nb::arg("sockets"),
           "Take over connected sockets: for each rank its number, the descriptor for frames, and that "
           "for payloads.")
      .def_prop_ro("num_open", &TcpLinks::num_open, "Connections that have not ended.")
      .def("stop", &TcpLinks::stop, nb::call_guard<ReleasedGil>(), "End all connections at once.");

  nb::class_<RelayCarrier>(m, "RelayCarrier", "Gives a relay's frames to gloo.")
      .def(nb::init<std::shared_ptr<Relay>, nb::object, nb::object, nb::object, nb::object,
                    nb::dict>(),
           nb::arg("relay"), nb::arg("send"), nb::arg("recv"), nb::arg("frombuffer"),
           nb::arg("uint8"), nb::arg("landing"))
      .def("give", &RelayCarrier::give, nb::arg("peer"),
           "Send a peer what there is, unless another thread does.")
      .def("give_all", &RelayCarrier::give_all, "The same for all peers.")
      .def("attend", &RelayCarrier::attend, nb::arg("peer"),
           "Wait until this thread is needed. Works to be waited for, each to be followed by "
           "`left`; None where nothing comes any more.")
      .def("left", &RelayCarrier::left, nb::arg("peer"),
           "gloo needs the oldest memory of what it was given no more.")
      .def("lose", &RelayCarrier::lose, nb::arg("peer"), nb::arg("why"),
           "gloo does not reach the peer, and says why.")
      .def("forget", &RelayCarrier::forget, "Keep no work of gloo's any more.");
}

}  // namespace commrt
