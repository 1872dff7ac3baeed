// SPDX-License-Identifier: Apache-2.0
#include "peer_exchange.hpp"

#include "device_error.hpp"

namespace commrt {

const char* const kPlantedInExchangeNames[kNumPlantedInExchange] = {
    "none",      "no_ready",       "no_end",        "end_early",     "no_await",
    "await_one_less", "publish_early", "no_begin",  "begin_one_less", "release_early",
    "one_half",  "values_again",   "user_stream"};

namespace {

using Bug = PlantedInExchange;

}  // namespace

#define COMMRT_GIVE(...)                                             \
  do {                                                               \
    const DeviceStatus given = (__VA_ARGS__);                        \
    if (given != DeviceStatus::Ok) return given;                     \
  } while (false)

PeerExchange::PeerExchange(Device* on, std::shared_ptr<void> keeps, int own_rank,
                           std::vector<unsigned char*> memory, std::size_t half,
                           DeviceStatus* status)
    : device(on), rank(own_rank), size(static_cast<int>(memory.size())), half_nbytes(half),
      keeps_(std::move(keeps)), memory_(std::move(memory)) {
  sent_.assign(memory_.size(), 0);
  received_.assign(memory_.size(), 0);
  for (int i : {0, 1}) {
    readers_[i].assign(memory_.size(), 0);
    has_read_[i].assign(memory_.size(), false);
  }
  const DeviceApi& api = *device->api;
  constexpr int kHighPriority = -1;
  *status = api.stream_create(device, kHighPriority, false, &stream_);
  if (*status == DeviceStatus::Ok)
    *status = api.stream_create(device, kHighPriority, false, &release_stream_);
  if (*status == DeviceStatus::Ok) *status = api.event_create(device, &ready_);
}

std::uint32_t* PeerExchange::ready_flag(int owner, int other) const {
  return reinterpret_cast<std::uint32_t*>(memory_[static_cast<std::size_t>(owner)] +
                                          static_cast<std::size_t>(other) * kLineNbytes);
}

std::uint32_t* PeerExchange::read_flag(int owner, int other) const {
  return ready_flag(owner, size + other);
}

DeviceStatus PeerExchange::take_event(Event* out) {
  if (!events_.empty()) {
    *out = events_.back();
    events_.pop_back();
    return DeviceStatus::Ok;
  }
  return device->api->event_create(device, out);
}

void PeerExchange::count_from(std::uint32_t value) {
  HostLock guard(device, mutex_);
  part_ = value;
  for (auto* counts : {&sent_, &received_})
    for (auto& count : *counts) count = value;
}

void PeerExchange::give_event(Event event) {
  HostLock guard(device, mutex_);
  if (!closed_) events_.push_back(event);
}

DeviceStatus PeerExchange::run(const StreamProgram& program, unsigned char* in,
                               unsigned char* out, unsigned char* scratch, Stream stream,
                               bool orders, Event* end) {
  HostLock guard(device, mutex_);
  if (guard.status() != DeviceStatus::Ok) return guard.status();
  if (lost_ || closed_)
    return device_fails(DeviceStatus::Failed, "the exchange between processes was given up");
  std::vector<unsigned char*> bases(static_cast<std::size_t>(kFirstPeerBase + size), nullptr);
  bases[kInBase] = in;
  bases[kOutBase] = out;
  bases[kScratchBase] = scratch;
  const DeviceApi& api = *device->api;
  Event ended = 0;
  COMMRT_GIVE(take_event(&ended));
  COMMRT_GIVE(api.event_record(device, ready_, stream));
  if (!has(Bug::NoReady)) COMMRT_GIVE(api.stream_wait_event(device, stream_, ready_));
  if (has(Bug::EndEarly)) COMMRT_GIVE(api.event_record(device, ended, stream_));
  const Stream usual = stream_;
  if (has(Bug::UserStream)) COMMRT_GIVE(api.stream_create(device, 0, false, &stream_));
  const DeviceStatus given = give(program, bases.data());
  stream_ = usual;
  if (given != DeviceStatus::Ok) {
    // Peers wait for what does not come, and this rank's stream perhaps for them.
    const std::string why = device_error();
    lost_ = true;
    return device_fails(given, why);
  }
  if (!has(Bug::EndEarly)) COMMRT_GIVE(api.event_record(device, ended, stream_));
  if (orders && !has(Bug::NoEnd)) COMMRT_GIVE(api.stream_wait_event(device, stream, ended));
  if (end != nullptr) {
    *end = ended;
  } else {
    events_.push_back(ended);  // its record was told to who waits; a new one changes nothing
  }
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::give(const StreamProgram& program, unsigned char** bases) {
  for (std::size_t i = 0; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    switch (one.step) {
      case StreamStep::Begin: COMMRT_GIVE(begin(program, i, bases)); break;
      case StreamStep::Publish:
        if (!has(Bug::PublishEarly)) COMMRT_GIVE(publish(one));
        break;
      case StreamStep::Await:
        if (!has(Bug::NoAwait)) COMMRT_GIVE(await(one));
        break;
      case StreamStep::Release:
        if (!has(Bug::ReleaseEarly)) COMMRT_GIVE(release(one));
        break;
      case StreamStep::Send:
      case StreamStep::Recv:
      case StreamStep::EndGroup:
        return device_fails(DeviceStatus::Invalid, "a program with messages of a library");
      default: COMMRT_GIVE(program.work(device, one, bases, stream_));
    }
  }
  if (has(Bug::ValuesAgain)) return DeviceStatus::Ok;
  for (std::size_t peer = 0; peer < sent_.size(); ++peer) {
    sent_[peer] += static_cast<std::uint32_t>(program.sent[peer]);
    received_[peer] += static_cast<std::uint32_t>(program.received[peer]);
  }
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::begin(const StreamProgram& program, std::size_t at,
                                 unsigned char** bases) {
  ++part_;
  const std::size_t now = part_ & 1u;
  const std::size_t where = has(Bug::OneHalf) ? 0 : now;
  for (std::size_t r = 0; r < memory_.size(); ++r)
    bases[static_cast<std::size_t>(kFirstPeerBase) + r] =
        memory_[r] + flags_nbytes(size) + where * half_nbytes;
  std::vector<bool> reads(memory_.size(), false);
  for (std::size_t i = at + 1; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    if (one.step == StreamStep::Begin) break;
    if (one.step == StreamStep::Publish) reads[static_cast<std::size_t>(one.peer)] = true;
    if (one.step == StreamStep::Publish && has(Bug::PublishEarly)) COMMRT_GIVE(publish(one));
  }
  for (std::size_t peer = 0; peer < memory_.size(); ++peer) {
    if (has_read_[now][peer] && !has(Bug::NoBegin)) {
      const std::uint32_t by = readers_[now][peer] - (has(Bug::BeginOneLess) ? 2u : 0u);
      COMMRT_GIVE(device->api->wait_value32_geq(device, stream_,
                                                read_flag(rank, static_cast<int>(peer)), by));
    }
    has_read_[now][peer] = reads[peer];
    if (reads[peer]) readers_[now][peer] = part_;
  }
  if (!has(Bug::ReleaseEarly)) return DeviceStatus::Ok;
  for (std::size_t i = at + 1; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    if (one.step == StreamStep::Begin) break;
    if (one.step == StreamStep::Release) COMMRT_GIVE(release(one));
  }
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::publish(const StreamCommand& one) {
  const auto value = sent_[static_cast<std::size_t>(one.peer)] +
                     static_cast<std::uint32_t>(one.number);
  return device->api->write_value32(device, stream_, ready_flag(static_cast<int>(one.peer), rank),
                                    value);
}

DeviceStatus PeerExchange::await(const StreamCommand& one) {
  const auto value = received_[static_cast<std::size_t>(one.peer)] +
                     static_cast<std::uint32_t>(one.number);
  return device->api->wait_value32_geq(device, stream_,
                                       ready_flag(rank, static_cast<int>(one.peer)),
                                       value - (has(Bug::AwaitOneLess) ? 1u : 0u));
}

DeviceStatus PeerExchange::release(const StreamCommand& one) {
  return device->api->write_value32(device, stream_, read_flag(static_cast<int>(one.peer), rank),
                                    part_);
}

DeviceStatus PeerExchange::give_up() {
  HostLock guard(device, mutex_);
  if (guard.status() != DeviceStatus::Ok) return guard.status();
  if (closed_) return DeviceStatus::Ok;
  lost_ = true;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto count = received_[static_cast<std::size_t>(peer)];
    COMMRT_GIVE(device->api->write_value32(device, release_stream_, ready_flag(rank, peer), count));
    COMMRT_GIVE(device->api->write_value32(device, release_stream_, read_flag(rank, peer), part_));
  }
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::close() {
  HostLock guard(device, mutex_);
  if (guard.status() != DeviceStatus::Ok) return guard.status();
  if (closed_) return DeviceStatus::Ok;
  closed_ = true;
  const DeviceApi& api = *device->api;
  COMMRT_GIVE(api.stream_synchronize(device, stream_));
  COMMRT_GIVE(api.stream_destroy(device, stream_));
  COMMRT_GIVE(api.stream_destroy(device, release_stream_));
  COMMRT_GIVE(api.event_destroy(device, ready_));
  for (Event event : events_) COMMRT_GIVE(api.event_destroy(device, event));
  events_.clear();
  return DeviceStatus::Ok;
}

#undef COMMRT_GIVE

}  // namespace commrt
