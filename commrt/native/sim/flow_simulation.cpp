// SPDX-License-Identifier: Apache-2.0
// The loop of events: steps become ready, messages leave, flow and arrive, cores work.
#include "sim/flow_simulation.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace commrt {

namespace {

// Times that differ by less are one, so that rounding does not make one event many.
constexpr double kSameTime = 1e-12;
constexpr std::uint8_t kSendPosted = 1, kRecvPosted = 2, kBothPosted = 3, kArrived = 4;

}  // namespace

FlowSimulation::FlowSimulation(AllSteps all,
                               std::vector<std::vector<const std::vector<std::int64_t>*>> bounds,
                               std::int64_t itemsize, LinkRates rates,
                               std::vector<double> latencies_us, RankRoutes routes,
                               const SimulatedCosts& costs)
    : all_(std::move(all)), bounds_(std::move(bounds)), itemsize_(itemsize), rates_(rates),
      latencies_us_(std::move(latencies_us)), routes_(std::move(routes)), costs_(costs),
      sharing_(std::move(rates), costs.contention_penalty), followers_(all_) {
  const auto total = static_cast<std::size_t>(num_steps(all_));
  const std::vector<std::int64_t> partners = match_messages(all_);
  ranks_.reserve(total);
  waiting_.reserve(total);
  message_of_.assign(total, -1);
  causes_.assign(total, -1);
  ready_.assign(total, -1);
  done_.assign(total, -1);
  core_free_.assign(all_.size(), 0);
  core_last_.assign(all_.size(), -1);
  link_nbytes_.assign(latencies_us_.size(), 0);
  last_of_line_.assign(routes_.peers.size() + latencies_us_.size(), -1);
  tokens_.assign(latencies_us_.size(), costs_.burst_nbytes);
  rests_since_.assign(latencies_us_.size(), 0);
  link_busy_us_ = link_since_ = link_nbytes_;
  for (std::size_t at = 0; at < all_.size(); ++at) {
    const StepColumns& steps = *all_[at].steps;
    for (std::int32_t index = 0; index < steps.size(); ++index) {
      const std::int64_t place = all_[at].base + index;
      ranks_.push_back(static_cast<std::int32_t>(at));
      waiting_.push_back(steps.deps().count(index));
      if (steps.row(index).op != kSendStep) continue;
      message_of_[place] = message_of_[partners[place]] =
          static_cast<std::int64_t>(messages_.size());
      SimulatedMessage made;
      made.send = place;
      made.recv = partners[place];
      made.nbytes = nbytes(place, steps.row(index).src);
      messages_.push_back(made);
    }
  }
  for (auto place = static_cast<std::int64_t>(total) - 1; place >= 0; --place)
    if (waiting_[place] == 0) make_ready(place);
}

bool FlowSimulation::advance(std::int64_t events) {
  const std::int64_t stop = num_events_ + events;
  run_ready();
  settle();
  while (!events_.empty() && num_events_ < stop) {
    now_ = std::max(now_, events_.front().time);
    const double until = now_ * (1 + kSameTime);
    while (!events_.empty() && events_.front().time <= until) {
      std::pop_heap(events_.begin(), events_.end(), std::greater<>());
      const Event event = events_.back();
      events_.pop_back();
      ++num_events_;
      handle(event);
      run_ready();
    }
    settle();
  }
  return events_.empty();
}

void FlowSimulation::expect(double time, Kind kind, std::int64_t subject, std::int64_t version) {
  events_.push_back({time, next_number_++, subject, version, kind});
  std::push_heap(events_.begin(), events_.end(), std::greater<>());
}

void FlowSimulation::handle(const Event& event) {
  switch (event.kind) {
    case Kind::kPosted: return post(event.subject, kSendPosted);
    case Kind::kBegins: return queue(event.subject);
    case Kind::kFlows:
      leave_line(event.subject);
      return arrive(event.subject);
    case Kind::kDone: return finish(event.subject);
    case Kind::kEnds:
      if (event.version == flows_[event.subject].version) end(event.subject);
  }
}

void FlowSimulation::end(std::int64_t slot) {
  const Flow ended = flows_[slot];
  flows_[slot].message = -1;
  ++flows_[slot].version;
  sharing_.remove(static_cast<std::int32_t>(slot));
  for (std::int64_t at = ended.first; at < ended.last; ++at) {
    const std::int32_t link = routes_.links[at];
    if (sharing_.load(link) > 0) continue;
    link_busy_us_[link] += now_ - link_since_[link];
    rests_since_[link] = now_;
  }
  if (ended.leads) leave_line(ended.message);
  if (--messages_[ended.message].parts == 0) arrive(ended.message);
}

// Gives flows the rates that they have from now on.
void FlowSimulation::settle() {
  for (std::int32_t slot : sharing_.settle()) {
    Flow& one = flows_[slot];
    if (one.rate > 0 && std::isfinite(one.rate))
      one.left = std::max(0.0, one.left - one.rate * (now_ - one.since));
    one.since = now_;
    one.rate = sharing_.rate(slot);
    SimulatedMessage& message = messages_[one.message];
    if (sharing_.sharers(slot) > message.sharers || message.bottleneck < 0) {
      message.sharers = std::max(1, sharing_.sharers(slot));
      message.bottleneck = sharing_.bottleneck(slot);
    }
    expect(now_ + one.left / one.rate, Kind::kEnds, slot, ++one.version);
  }
}

void FlowSimulation::make_ready(std::int64_t place) {
  ready_[place] = now_;
  todo_.push_back(place);
}

void FlowSimulation::run_ready() {
  while (!todo_.empty()) {
    const std::int64_t place = todo_.back();
    todo_.pop_back();
    const ScheduleStep& one = step(place);
    switch (one.op) {
      case kSendStep:
        work(place, costs_.send_overhead_us, Kind::kPosted, message_of_[place]);
        break;
      case kRedStep:
        work(place, costs_.reduce_us_per_byte * nbytes(place, one.dst), Kind::kDone, place);
        break;
      case kCopyStep:
        work(place, costs_.copy_us_per_byte * nbytes(place, one.dst), Kind::kDone, place);
        break;
      default:
        post(message_of_[place], kRecvPosted);
    }
  }
}

void FlowSimulation::work(std::int64_t place, double time_us, Kind then, std::int64_t subject) {
  if (time_us == 0) return handle({now_, 0, subject, 0, then});
  const std::int32_t at = rank(place);
  if (core_free_[at] > now_) causes_[place] = core_last_[at];
  core_free_[at] = std::max(core_free_[at], now_) + time_us;
  core_last_[at] = place;
  expect(core_free_[at], then, subject);
}

void FlowSimulation::finish(std::int64_t place) {
  done_[place] = last_done_ = now_;
  ++num_done_;
  // The last of them first, so that they run in the order of the program.
  for (std::int64_t at = followers_.starts[place + 1] - 1; at >= followers_.starts[place]; --at) {
    const std::int64_t next = followers_.steps[at];
    if (--waiting_[next] > 0) continue;
    causes_[next] = place;
    make_ready(next);
  }
}

void FlowSimulation::post(std::int64_t at, std::uint8_t end) {
  SimulatedMessage& message = messages_[at];
  message.ends_posted |= end;
  const bool eager = message.nbytes <= static_cast<double>(costs_.eager_nbytes);
  if (end == kSendPosted) {
    message.posted = now_;
    if (eager) {
      begin(at);
      return finish(message.send);
    }
  } else if (message.ends_posted & kArrived) {
    return receive(at);
  }
  if (!eager && (message.ends_posted & kBothPosted) == kBothPosted) begin(at);
}

// Sends a message off once its transport allows.
void FlowSimulation::begin(std::int64_t at) {
  SimulatedMessage& message = messages_[at];
  const std::int64_t pair = pair_of(at);
  const bool eager = message.nbytes <= static_cast<double>(costs_.eager_nbytes);
  double start = now_;
  if (!eager && costs_.handshake) {
    const double trip = latency(routes_.ways[pair]);
    start = std::max(message.posted + trip, now_) + trip;
  }
  message.begun = start;
  // Which way it takes is chosen with its first byte: ways of a pair are equally long.
  expect(start + latency(routes_.ways[pair]), Kind::kBegins, at);
}

// Lets a message flow once those have passed that left before it on its line.
void FlowSimulation::queue(std::int64_t at) {
  const std::int64_t pair = pair_of(at);
  // Ways of a pair are equally long. Which one it takes is chosen with its first byte.
  messages_[at].way = static_cast<std::int32_t>(choose_way(pair) - routes_.ways[pair]);
  const std::int64_t line = line_of(at);
  const std::int64_t before = line < 0 ? -1 : std::exchange(last_of_line_[line], at);
  if (before < 0) return flow(at);
  messages_[before].next = at;
}

void FlowSimulation::leave_line(std::int64_t at) {
  const std::int64_t line = line_of(at);
  if (line < 0) return;
  const std::int64_t next = messages_[at].next;
  if (next >= 0) return flow(next);
  last_of_line_[line] = -1;
}

// Returns the line in which a message waits: of its first link, of its pair, or -1.
std::int64_t FlowSimulation::line_of(std::int64_t at) const {
  const SimulatedMessage& message = messages_[at];
  if (!costs_.in_order && !is_queued(message)) return -1;
  const std::int64_t pair = pair_of(at), way = routes_.ways[pair] + message.way;
  const std::int64_t first = routes_.starts[way];
  if (is_queued(message) && first < routes_.starts[way + 1])
    return static_cast<std::int64_t>(routes_.peers.size()) + routes_.links[first];
  return costs_.in_order ? pair : -1;
}

void FlowSimulation::flow(std::int64_t at) {
  SimulatedMessage& message = messages_[at];
  message.flowing = now_;
  const std::int64_t way = routes_.ways[pair_of(at)] + message.way;
  const std::int64_t first = routes_.starts[way], last = routes_.starts[way + 1];
  if (first == last) return expect(now_ + message.nbytes / costs_.local_rate, Kind::kFlows, at);
  for (std::int64_t i = first; i < last; ++i) link_nbytes_[routes_.links[i]] += message.nbytes;
  if (message.nbytes == 0) {
    leave_line(at);
    return arrive(at);
  }
  if (!is_queued(message) || first + 1 == last) return enter(at, first, last, true);
  // Those behind it wait for its first link alone. It goes on while it passes that.
  enter(at, first, first + 1, true);
  enter(at, first + 1, last, false);
}

double FlowSimulation::burst(std::int32_t link, double time) const {
  if (sharing_.load(link) > 0) return 0;
  const double rested = std::max(0.0, time - rests_since_[link]);
  if (rested == 0) return tokens_[link];
  return std::min(costs_.burst_nbytes, tokens_[link] + rested * rates_.shared[link]);
}

// Makes a message a flow on links of its way; `leads`: its end lets the next one of its line go.
void FlowSimulation::enter(std::int64_t at, std::int64_t first, std::int64_t last, bool leads) {
  SimulatedMessage& message = messages_[at];
  ++message.parts;
  double at_once = message.nbytes;
  for (std::int64_t i = first; i < last; ++i)
    at_once = std::min(at_once, burst(routes_.links[i], now_));
  for (std::int64_t i = first; i < last; ++i) {
    const std::int32_t link = routes_.links[i];
    if (sharing_.load(link) > 0) continue;
    link_since_[link] = now_;
    tokens_[link] = burst(link, now_) - at_once;
    rests_since_[link] = now_;
  }
  const std::int32_t slot =
      sharing_.add(routes_.links.data() + first, routes_.links.data() + last);
  if (flows_.size() <= static_cast<std::size_t>(slot)) flows_.resize(slot + 1);
  Flow& made = flows_[slot];
  made = {at, first, last, message.nbytes - at_once, 0, now_, made.version, leads};
}

void FlowSimulation::arrive(std::int64_t at) {
  SimulatedMessage& message = messages_[at];
  message.ended = now_;
  message.ends_posted |= kArrived;
  const bool eager = message.nbytes <= static_cast<double>(costs_.eager_nbytes);
  if (!eager) finish(message.send);
  if (message.ends_posted & kRecvPosted) receive(at);
}

void FlowSimulation::receive(std::int64_t at) {
  const SimulatedMessage& message = messages_[at];
  const bool reduces = step(message.recv).op == kRredStep;
  const double time_us =
      costs_.receive_overhead_us + (reduces ? costs_.reduce_us_per_byte * message.nbytes : 0);
  work(message.recv, time_us, Kind::kDone, message.recv);
}

std::int64_t FlowSimulation::pair_of(std::int64_t at) const {
  const SimulatedMessage& message = messages_[at];
  const std::int32_t from = rank(message.send), to = rank(message.recv);
  const auto first = routes_.peers.begin() + routes_.pairs[from];
  const auto last = routes_.peers.begin() + routes_.pairs[from + 1];
  const auto found = std::lower_bound(first, last, to);
  if (found == last || *found != to)
    throw std::out_of_range("there is no way from rank " + std::to_string(from) + " to rank " +
                            std::to_string(to));
  return found - routes_.peers.begin();
}

// Returns the way whose most loaded link leaves a further flow the most; the first of equal ones.
std::int64_t FlowSimulation::choose_way(std::int64_t pair) const {
  const std::int64_t first = routes_.ways[pair], last = routes_.ways[pair + 1];
  if (last - first == 1) return first;
  std::int64_t best = first;
  double most = -1;
  for (std::int64_t way = first; way < last; ++way) {
    double least = std::numeric_limits<double>::infinity();
    for (std::int64_t i = routes_.starts[way]; i < routes_.starts[way + 1]; ++i) {
      const std::int32_t link = routes_.links[i];
      least = std::min(least, rates_.shared[link] / (sharing_.load(link) + 1));
    }
    if (least > most) {
      most = least;
      best = way;
    }
  }
  return best;
}

double FlowSimulation::latency(std::int64_t way) const {
  const std::int64_t first = routes_.starts[way], last = routes_.starts[way + 1];
  if (first == last) return costs_.local_latency_us;
  double sum = 0;
  for (std::int64_t i = first; i < last; ++i) sum += latencies_us_[routes_.links[i]];
  return sum;
}

const ScheduleStep& FlowSimulation::step(std::int64_t place) const {
  const RankSteps& own = all_[rank(place)];
  return own.steps->row(static_cast<std::int32_t>(place - own.base));
}

double FlowSimulation::nbytes(std::int64_t place, const BlockSlice& where) const {
  const std::vector<std::int64_t>& edges = *bounds_[rank(place)].at(where.space);
  return static_cast<double>((edges.at(where.hi) - edges.at(where.lo)) * itemsize_);
}

}  // namespace commrt
