// SPDX-License-Identifier: Apache-2.0
// Writes and reads frames, as far as the kernel has room or bytes.
#include "engine/tcp_links.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace commrt {

class TcpLinks::Link final : public TcpPoller::Link {
 public:
  Link(TcpLinks& links, int peer, Relay::Lane lane, int socket)
      : links_(links), peer_(peer), lane_(lane), socket_(socket) {}

  int socket() const { return socket_; }
  void see(bool readable, bool writable, bool ended) override;
  // Sends what there is, unless another thread does. `first`: false for the one that does.
  void send(bool first);
  // Sends nothing more, and receives only what is here.
  void shut();
  // The caller has the poller's lock.
  void end();

 private:
  static constexpr size_t kAheadNbytes = 64 << 10;
  static constexpr size_t kLongNbytes = 16 << 10;  // of a body that is better not copied
  static constexpr size_t kTurnNbytes = 4 << 20;  // received before others have their turn

  bool write();
  bool drop();
  void keep_rest();
  void receive();
  bool take_frames();
  size_t room_ahead() const;
  void lose(const std::string& why);
  void end_if_done();

  TcpLinks& links_;
  const int peer_;
  const Relay::Lane lane_;
  const int socket_;
  std::atomic<bool> is_open_{true};
  std::mutex writing_;  // the socket is not closed meanwhile
  std::string error_;
  // Of whoever sends.
  Relay::Parts parts_;
  size_t written_ = 0;  // of the head and the body
  std::unique_ptr<unsigned char[]> rest_;
  std::atomic<bool> has_rest_{false};  // from then on the poller's thread sends
  std::atomic<bool> has_sent_last_{false};
  // Of whoever has the poller's lock.
  std::unique_ptr<unsigned char[]> ahead_{new unsigned char[kAheadNbytes]};
  size_t begin_ = 0, end_ = 0;  // of the bytes there
  bool was_long_ = false;       // the newest body
  Relay::Body body_;
  size_t landed_ = 0;  // of the body
  std::atomic<bool> has_last_{false};
};

TcpLinks::TcpLinks(Relay& relay, const std::vector<Sockets>& sockets)
    : relay_(relay), links_(static_cast<size_t>(relay.size()) * Relay::kLanes) {
  TcpPoller& poller = TcpPoller::instance();
  const auto held = poller.hold();
  for (const Sockets& one : sockets) {
    for (size_t lane = 0; lane < Relay::kLanes; ++lane) {
      const int socket = one.by_lane[lane], on = 1;
      setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      auto& link = links_[static_cast<size_t>(one.peer) * Relay::kLanes + lane];
      link = std::make_unique<Link>(*this, one.peer, static_cast<Relay::Lane>(lane), socket);
      poller.add(socket, link.get());
      num_open_.fetch_add(1);
    }
  }
}

TcpLinks::~TcpLinks() { stop(); }

void TcpLinks::stop() {
  if (TcpPoller::is_in_child()) return;  // it has no connections, and its lock may be lost
  // Also where none is open any more: the thread that has ended the last one may still be here.
  const auto held = TcpPoller::instance().hold();
  for (const auto& link : links_) {
    if (link != nullptr) link->end();
  }
}

void TcpLinks::drop(int peer) {
  for (size_t lane = 0; lane < Relay::kLanes; ++lane) {
    if (Link* const link = link_of(peer, lane)) link->shut();
  }
}

TcpLinks::Link* TcpLinks::link_of(int peer, size_t lane) const {
  return links_[static_cast<size_t>(peer) * Relay::kLanes + lane].get();
}

void TcpLinks::send(int peer, Relay::Lane lane) {
  Link* const link = link_of(peer, static_cast<size_t>(lane));
  if (link != nullptr) link->send(true);
}

void TcpLinks::Link::send(bool first) {
  while (links_.relay_.take_parts(peer_, lane_, parts_, first)) {
    first = false;
    written_ = 0;
    if (!write()) return;
  }
}

// True once the frame has left. Otherwise this thread does not send any more: the poller goes on,
// or nobody.
bool TcpLinks::Link::write() {
  constexpr size_t kHead = Relay::kHeaderNbytes;
  const size_t all = kHead + parts_.nbytes;
  const std::lock_guard<std::mutex> lock(writing_);
  while (written_ < all) {
    if (!is_open_) return drop();
    iovec pieces[2];
    size_t num_pieces = 0;
    if (written_ < kHead) pieces[num_pieces++] = {parts_.head + written_, kHead - written_};
    const size_t of_body = written_ < kHead ? 0 : written_ - kHead;
    if (of_body < parts_.nbytes) {
      unsigned char* const body = static_cast<unsigned char*>(const_cast<void*>(parts_.body));
      pieces[num_pieces++] = {body + of_body, parts_.nbytes - of_body};
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = num_pieces;
    // The kernel then fills the packet with the next frame, and the receiver wakes once.
    const int more = parts_.has_next ? MSG_MORE : 0;
    const ssize_t took = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT | more);
    if (took >= 0) {
      written_ += static_cast<size_t>(took);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      keep_rest();
      has_rest_.store(true, std::memory_order_release);
      TcpPoller::instance().watch(socket_, this, !has_last_, true);
      return false;
    }
    // Whoever reads tells the relay, after what the peer has sent before.
    error_ = std::strerror(errno);
    shutdown(socket_, SHUT_RDWR);
    return drop();
  }
  if (parts_.request != nullptr) parts_.request->end();
  if (parts_.is_payload) links_.relay_.sent(peer_);
  parts_.state = nullptr;
  if (parts_.ends) {
    has_sent_last_.store(true, std::memory_order_release);
    shutdown(socket_, SHUT_WR);
  }
  return true;
}

// The frame goes nowhere, and nobody sends any more: the relay fails what it has not given.
bool TcpLinks::Link::drop() {
  if (parts_.request != nullptr) parts_.request->end();
  parts_.request = nullptr;
  return false;
}

// A message is its sender's no more as soon as it has been taken: what has not left is copied.
void TcpLinks::Link::keep_rest() {
  if (parts_.request == nullptr) return;
  const size_t of_body = std::max(written_, Relay::kHeaderNbytes) - Relay::kHeaderNbytes;
  rest_.reset(new unsigned char[parts_.nbytes + 1]);
  const unsigned char* const body = static_cast<const unsigned char*>(parts_.body);
  std::memcpy(rest_.get() + of_body, body + of_body, parts_.nbytes - of_body);
  parts_.body = rest_.get();
  parts_.request->end();
  parts_.request = nullptr;
}

void TcpLinks::Link::see(bool readable, bool writable, bool ended) {
  if (!is_open_) return;
  if (writable && has_rest_.exchange(false, std::memory_order_acquire)) {
    TcpPoller::instance().watch(socket_, this, !has_last_, false);
    if (write()) send(false);
  }
  if (!has_last_) {
    if (readable || ended) receive();
  } else if (ended && !has_sent_last_) {
    lose("Connection closed by peer");  // it takes no more
  }
  end_if_done();
}

void TcpLinks::Link::receive() {
  for (size_t received = 0; is_open_ && !has_last_ && received < kTurnNbytes;) {
    iovec pieces[2];
    size_t num_pieces = 0, wanted = 0;
    const size_t of_body = body_.nbytes - landed_;
    if (of_body != 0) {
      pieces[num_pieces++] = {static_cast<unsigned char*>(body_.to) + landed_, of_body};
      begin_ = end_ = 0;  // all that was ahead is in the body
    } else if (begin_ != 0) {
      std::memmove(ahead_.get(), ahead_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    const size_t room = room_ahead();
    pieces[num_pieces++] = {ahead_.get() + end_, room};
    wanted = of_body + room;
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = num_pieces;
    const ssize_t got = recvmsg(socket_, &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) return lose(got == 0 ? "Connection closed by peer" : std::strerror(errno));
    const size_t count = static_cast<size_t>(got);
    received += count;
    const size_t into_body = std::min(count, of_body);
    landed_ += into_body;
    end_ += count - into_body;
    if (of_body != 0 && into_body == of_body) {
      body_ = {};
      landed_ = 0;
      links_.relay_.body_arrived(peer_, lane_);
    }
    if (!take_frames() || count < wanted) return;
  }
}

// How many bytes may be read that no body has asked for. They are copied to where they belong. So
// behind a long body only a head is read: another long body mostly follows it, and goes where it
// belongs. Many short frames are read at once.
size_t TcpLinks::Link::room_ahead() const {
  if (was_long_ && end_ < Relay::kHeaderNbytes) return Relay::kHeaderNbytes - end_;
  return kAheadNbytes - end_;
}

// Takes the frames that are ahead. False: nothing comes any more.
bool TcpLinks::Link::take_frames() {
  while (landed_ == body_.nbytes && end_ - begin_ >= Relay::kHeaderNbytes) {
    body_ = links_.relay_.head_arrived(peer_, lane_, ahead_.get() + begin_);
    begin_ += Relay::kHeaderNbytes;
    landed_ = 0;
    was_long_ = body_.nbytes >= kLongNbytes;
    if (body_.ends) {
      has_last_ = true;
      TcpPoller::instance().watch(socket_, this, false, !has_sent_last_.load());
      return false;
    }
    if (body_.nbytes == 0) continue;
    landed_ = std::min(body_.nbytes, end_ - begin_);
    std::memcpy(body_.to, ahead_.get() + begin_, landed_);
    begin_ += landed_;
    if (landed_ == body_.nbytes) {
      body_ = {};
      landed_ = 0;
      links_.relay_.body_arrived(peer_, lane_);
    }
  }
  return true;
}

void TcpLinks::Link::lose(const std::string& why) {
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(writing_);
    error = error_.empty() ? why : error_;
  }
  for (size_t lane = 0; lane < Relay::kLanes; ++lane) links_.link_of(peer_, lane)->end();
  links_.relay_.lost(peer_, "rank " + std::to_string(peer_) +
                                " of the job, on another node, has ended, or the network to it has "
                                "failed (TCP: " + error + ")",
                     error);
}

void TcpLinks::Link::shut() {
  const std::lock_guard<std::mutex> lock(writing_);
  if (is_open_) shutdown(socket_, SHUT_RDWR);
}

void TcpLinks::Link::end_if_done() {
  if (is_open_ && has_last_ && has_sent_last_.load(std::memory_order_acquire)) end();
}

void TcpLinks::Link::end() {
  const std::lock_guard<std::mutex> lock(writing_);
  if (!is_open_.exchange(false)) return;
  TcpPoller::instance().remove(socket_);
  links_.num_open_.fetch_sub(1, std::memory_order_release);
  Relay::tell();
}

}  // namespace commrt
