// SPDX-License-Identifier: Apache-2.0
#include "peer_memory/peer_exchange.hpp"

#include "devices/device_error.hpp"

namespace commrt {

COMMRT_NAMES_OF_BUGS(
    PlantedInExchange,
    "no_ready", "ready_late", "no_end", "no_end_wait", "end_early", "end_other_stream",
    "end_flag_early", "no_copy", "copy_other_stream", "no_await", "await_one_less",
    "publish_early", "no_begin", "begin_one_less", "release_early", "one_half", "values_again",
    "user_stream", "kept", "kept_behind", "told_late", "unasked")

namespace {

using Bug = PlantedInExchange;
// No program and no number of calls under way waits for a value so far ahead.
constexpr std::uint32_t kFarAhead = 1u << 30;

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
      keeps_(std::move(keeps)), memory_(std::move(memory)), received_(memory_.size()),
      sent_(memory_.size(), 0) {
  for (int i : {0, 1}) {
    readers_[i].assign(memory_.size(), 0);
    has_read_[i].assign(memory_.size(), false);
  }
  const DeviceApi& api = *device->api;
  constexpr int kHighPriority = -1;
  *status = api.stream_create(device, kHighPriority, false, &stream);
  if (*status == DeviceStatus::Ok)
    *status = api.stream_create(device, kHighPriority, false, &release_stream_);
  for (Event* event : {&released_, &drained_})
    if (*status == DeviceStatus::Ok) *status = api.event_create(device, event);
}

std::uint32_t* PeerExchange::ready_flag(int owner, int other) const {
  return reinterpret_cast<std::uint32_t*>(memory_[static_cast<std::size_t>(owner)] +
                                          static_cast<std::size_t>(other) * kLineNbytes);
}

std::uint32_t* PeerExchange::read_flag(int owner, int other) const {
  return ready_flag(owner, size + other);
}

void PeerExchange::count_from(std::uint32_t value) {
  part_ = value;
  for (auto& count : sent_) count = value;
  for (auto& count : received_) count = value;
}

DeviceStatus PeerExchange::give(const StreamProgram& program, unsigned char* in,
                                unsigned char* out, unsigned char* scratch, Stream on) {
  std::vector<unsigned char*> bases(static_cast<std::size_t>(kFirstPeerBase + size), nullptr);
  bases[kInBase] = in;
  bases[kOutBase] = out;
  bases[kScratchBase] = scratch;
  for (std::size_t i = 0; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    switch (one.step) {
      case StreamStep::Begin: COMMRT_GIVE(begin(program, i, bases.data(), on)); break;
      case StreamStep::Publish:
        if (!has(Bug::PublishEarly)) COMMRT_GIVE(publish(one, on));
        break;
      case StreamStep::Await:
        if (!has(Bug::NoAwait)) COMMRT_GIVE(await(one, on));
        break;
      case StreamStep::Release:
        if (!has(Bug::ReleaseEarly)) COMMRT_GIVE(release_peer(one, on));
        break;
      case StreamStep::Send:
      case StreamStep::Recv:
      case StreamStep::EndGroup:
        return device_fails(DeviceStatus::Invalid, "a program with messages of a library");
      default: COMMRT_GIVE(program.work(device, one, bases.data(), on));
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
                                 unsigned char** bases, Stream on) {
  const std::uint32_t part = ++part_;
  const std::size_t now = part & 1u;
  const std::size_t where = has(Bug::OneHalf) ? 0 : now;
  for (std::size_t r = 0; r < memory_.size(); ++r)
    bases[static_cast<std::size_t>(kFirstPeerBase) + r] =
        memory_[r] + flags_nbytes(size) + where * half_nbytes;
  std::vector<bool> reads(memory_.size(), false);
  for (std::size_t i = at + 1; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    if (one.step == StreamStep::Begin) break;
    if (one.step == StreamStep::Publish) reads[static_cast<std::size_t>(one.peer)] = true;
    if (one.step == StreamStep::Publish && has(Bug::PublishEarly)) COMMRT_GIVE(publish(one, on));
  }
  for (std::size_t peer = 0; peer < memory_.size(); ++peer) {
    if (has_read_[now][peer] && !has(Bug::NoBegin)) {
      const std::uint32_t by = readers_[now][peer] - (has(Bug::BeginOneLess) ? 2u : 0u);
      COMMRT_GIVE(device->api->wait_value32_geq(device, on,
                                                read_flag(rank, static_cast<int>(peer)), by));
    }
    has_read_[now][peer] = reads[peer];
    if (reads[peer]) readers_[now][peer] = part;
  }
  if (!has(Bug::ReleaseEarly)) return DeviceStatus::Ok;
  for (std::size_t i = at + 1; i < program.commands.size(); ++i) {
    const StreamCommand& one = program.commands[i];
    if (one.step == StreamStep::Begin) break;
    if (one.step == StreamStep::Release) COMMRT_GIVE(release_peer(one, on));
  }
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::publish(const StreamCommand& one, Stream on) {
  const auto value = sent_[static_cast<std::size_t>(one.peer)] +
                     static_cast<std::uint32_t>(one.number);
  return device->api->write_value32(device, on, ready_flag(static_cast<int>(one.peer), rank),
                                    value);
}

DeviceStatus PeerExchange::await(const StreamCommand& one, Stream on) {
  const auto value = received_[static_cast<std::size_t>(one.peer)] +
                     static_cast<std::uint32_t>(one.number);
  return device->api->wait_value32_geq(device, on,
                                       ready_flag(rank, static_cast<int>(one.peer)),
                                       value - (has(Bug::AwaitOneLess) ? 1u : 0u));
}

DeviceStatus PeerExchange::release_peer(const StreamCommand& one, Stream on) {
  return device->api->write_value32(device, on, read_flag(static_cast<int>(one.peer), rank),
                                    part_);
}

DeviceStatus PeerExchange::release() {
  const DeviceApi& api = *device->api;
  if (is_releasing_) {
    const DeviceStatus arrived = api.event_query(device, released_);
    if (arrived != DeviceStatus::Ok)
      return arrived == DeviceStatus::NotReady ? DeviceStatus::Ok : arrived;
  }
  const std::uint32_t ahead = has(Bug::KeptBehind) ? 0 : kFarAhead;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const std::uint32_t count = received_[static_cast<std::size_t>(peer)] + ahead;
    COMMRT_GIVE(api.write_value32(device, release_stream_, ready_flag(rank, peer), count));
    COMMRT_GIVE(api.write_value32(device, release_stream_, read_flag(rank, peer), part_ + ahead));
  }
  COMMRT_GIVE(api.event_record(device, released_, release_stream_));
  is_releasing_ = true;
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::has_run(bool* all) {
  const DeviceApi& api = *device->api;
  *all = false;
  if (!is_draining_) {
    COMMRT_GIVE(api.event_record(device, drained_, stream));
    is_draining_ = true;
  }
  for (Event event : {drained_, released_}) {
    const DeviceStatus happened = api.event_query(device, event);
    if (happened == DeviceStatus::NotReady) return DeviceStatus::Ok;
    COMMRT_GIVE(happened);
  }
  *all = true;
  return DeviceStatus::Ok;
}

DeviceStatus PeerExchange::end() {
  const DeviceApi& api = *device->api;
  for (Stream one : {stream, release_stream_}) COMMRT_GIVE(api.stream_destroy(device, one));
  COMMRT_GIVE(api.event_destroy(device, released_));
  return api.event_destroy(device, drained_);
}

#undef COMMRT_GIVE

}  // namespace commrt
