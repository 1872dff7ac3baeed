// SPDX-License-Identifier: Apache-2.0
// The table by which the engine calls a relay as it calls MPI.
#include <cstring>
#include <string>

#include "engine/relay.hpp"
#include "engine/tcp_poller.hpp"

namespace commrt {

namespace {

struct Status {  // how a relay uses MPI's
  int count;
  int cancelled;
};

Relay* relay_of(Handle handle) { return reinterpret_cast<Relay*>(handle); }

Relay::Request** slot_of(void* request) { return static_cast<Relay::Request**>(request); }

int relay_isend(const void* data, int nbytes, Handle, int peer, int tag, Handle comm,
                void* request) {
  return relay_of(comm)->isend(data, nbytes, peer, tag, slot_of(request));
}

int relay_isend_before_next(const void* data, int nbytes, Handle, int peer, int tag, Handle comm,
                            void* request) {
  return relay_of(comm)->isend(data, nbytes, peer, tag, slot_of(request), false);
}

int relay_irecv(void* data, int nbytes, Handle, int peer, int tag, Handle comm, void* request) {
  return relay_of(comm)->irecv(data, nbytes, peer, tag, slot_of(request));
}

int relay_iprobe(int peer, int tag, Handle comm, int* flag, void* status) {
  int* const count = &static_cast<Status*>(status)->count;
  const int code = relay_of(comm)->iprobe(peer, tag, flag, count);
  if (code != 0 || *flag || !TcpPoller::is_used() || !TcpPoller::instance().poll()) return code;
  return relay_of(comm)->iprobe(peer, tag, flag, count);
}

int relay_expect(void* data, uint64_t nbytes, int peer, Handle comm, uint64_t* where,
                 void* request) {
  return relay_of(comm)->expect(data, nbytes, peer, where, slot_of(request));
}

int relay_deliver(const void* data, uint64_t nbytes, int peer, uint64_t where, Handle comm,
                  void* request) {
  return relay_of(comm)->deliver(data, nbytes, peer, where, slot_of(request));
}

int relay_test(void* slot, int* flag, void* status) {
  Relay::Request*& request = *slot_of(slot);
  *flag = request == nullptr || request->done.load(std::memory_order_acquire);
  if (!*flag || request == nullptr) return 0;
  static_cast<Status*>(status)->count = static_cast<int>(request->nbytes);
  static_cast<Status*>(status)->cancelled = request->cancelled;
  const int code = request->code;
  delete request;
  request = nullptr;
  return code;
}

int relay_cancel(void* slot) {
  Relay::Request* request = *slot_of(slot);
  if (request != nullptr) request->owner->cancel(request);
  return 0;
}

int relay_get_count(const void* status, Handle, int* count) {
  *count = static_cast<const Status*>(status)->count;
  return 0;
}

int relay_test_cancelled(const void* status, int* flag) {
  *flag = static_cast<const Status*>(status)->cancelled;
  return 0;
}

int relay_error_class(int code, int* which) {
  *which = code;
  return 0;
}

int relay_error_string(int code, char* text, int* length) {
  const std::string said = Relay::text_of(code).substr(0, 4000);
  std::memcpy(text, said.c_str(), said.size() + 1);
  *length = static_cast<int>(said.size());
  return 0;
}

}  // namespace

const MpiApi& relay_api() {
  static const MpiApi table = [] {
    MpiApi made;
    made.is_relay = true;
    made.isend = relay_isend;
    made.isend_before_next = relay_isend_before_next;
    made.irecv = relay_irecv;
    made.iprobe = relay_iprobe;
    made.expect = relay_expect;
    made.deliver = relay_deliver;
    made.test = relay_test;
    made.cancel = relay_cancel;
    made.get_count = relay_get_count;
    made.test_cancelled = relay_test_cancelled;
    made.error_class = relay_error_class;
    made.error_string = relay_error_string;
    made.err_truncate = Relay::kTruncated;
    return made;
  }();
  return table;
}

}  // namespace commrt
