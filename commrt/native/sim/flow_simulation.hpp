// SPDX-License-Identifier: Apache-2.0
// Plays a schedule on a network whose messages are flows: commrt/sim/simulate.py.
//
// Time is in microseconds. A run is a function of its inputs: events of one time are handled in
// the order in which they were foreseen.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "schedules/execution.hpp"
#include "schedules/steps.hpp"
#include "sim/fair_sharing.hpp"

namespace commrt {

struct SimulatedCosts {
  double send_overhead_us = 0;
  double receive_overhead_us = 0;
  double reduce_us_per_byte = 0;
  double copy_us_per_byte = 0;
  std::int64_t eager_nbytes = 0;  // longer messages wait for their receive
  bool handshake = false;         // and ask for it, which takes a message each way
  double local_latency_us = 0;    // of a message within a host
  double local_rate = 0;          // bytes per microsecond
  double contention_penalty = 0;
  bool in_order = false;  // messages of a pair flow one after the other
  // Messages up to this length pass their first link one after the other, and keep no later one
  // from it while they wait for the rest of their way.
  std::int64_t queued_nbytes = 0;
  double burst_nbytes = 0;  // what a link that rested passes at once: a token bucket
};

// The ways from each rank to its peers: rows of rows. A pair with several ways takes the one with
// the most rate left per flow when the message leaves.
struct RankRoutes {
  std::vector<std::int64_t> pairs;   // of a rank, in `peers`
  std::vector<std::int32_t> peers;   // rising for each rank
  std::vector<std::int64_t> ways;    // of a pair, in `starts`
  std::vector<std::int64_t> starts;  // of a way, in `links`
  std::vector<std::int32_t> links;
};

struct SimulatedMessage {
  std::int64_t send;  // steps, numbered over all ranks
  std::int64_t recv;
  double nbytes;
  double posted = -1;  // the send may start
  double begun = -1;   // it leaves
  double flowing = -1; // its first byte arrives, were it alone
  double ended = -1;
  std::int32_t way = -1;         // of the pair's
  std::int32_t bottleneck = -1;  // the link that it shared with most others while held back by it
  std::int32_t sharers = 1;
  std::uint8_t ends_posted = 0;
  std::int64_t next = -1;  // the message that waits for this one, as it left later
  std::int32_t parts = 0;  // flows that have not ended
};

class FlowSimulation {
 public:
  // `bounds`: for each rank and space the elements before each block.
  FlowSimulation(AllSteps all, std::vector<std::vector<const std::vector<std::int64_t>*>> bounds,
                 std::int64_t itemsize, LinkRates rates, std::vector<double> latencies_us,
                 RankRoutes routes, const SimulatedCosts& costs);

  // Handles up to so many events; returns whether nothing is left to happen.
  bool advance(std::int64_t events);

  std::int64_t num_done() const { return num_done_; }
  std::int64_t num_events() const { return num_events_; }
  // Time at which the last step was done.
  double last_done() const { return last_done_; }
  const std::vector<double>& ready() const { return ready_; }
  const std::vector<double>& done() const { return done_; }
  const std::vector<std::int64_t>& causes() const { return causes_; }
  const std::vector<SimulatedMessage>& messages() const { return messages_; }
  const std::vector<double>& link_nbytes() const { return link_nbytes_; }
  const std::vector<double>& link_busy_us() const { return link_busy_us_; }
  FairSharing& sharing() { return sharing_; }

 private:
  enum class Kind : std::uint8_t { kPosted, kBegins, kFlows, kEnds, kDone };
  struct Event {
    double time;
    std::int64_t number;
    std::int64_t subject;  // a step, a message, or the slot of a flow
    std::int64_t version;
    Kind kind;

    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };
  struct Flow {
    std::int64_t message = -1;
    std::int64_t first = 0;  // of its links, in the routes
    std::int64_t last = 0;
    double left = 0;
    double rate = 0;
    double since = 0;
    std::int64_t version = 0;
    bool leads = false;
  };

  void expect(double time, Kind kind, std::int64_t subject, std::int64_t version = 0);
  void handle(const Event& event);
  void settle();
  void make_ready(std::int64_t step);
  void run_ready();
  void finish(std::int64_t step);
  void post(std::int64_t message, std::uint8_t end);
  void begin(std::int64_t message);
  void flow(std::int64_t message);
  void queue(std::int64_t message);
  void leave_line(std::int64_t message);
  std::int64_t line_of(std::int64_t message) const;
  void enter(std::int64_t message, std::int64_t first, std::int64_t last, bool leads);
  void end(std::int64_t slot);
  // Bytes that the link would pass at once at that time.
  double burst(std::int32_t link, double time) const;
  bool is_queued(const SimulatedMessage& message) const {
    return message.nbytes <= static_cast<double>(costs_.queued_nbytes);
  }
  void arrive(std::int64_t message);
  void receive(std::int64_t message);
  // Lets the rank's core work on a step; calls finish() or expects an event at the end.
  void work(std::int64_t step, double time_us, Kind then, std::int64_t subject);
  std::int64_t pair_of(std::int64_t message) const;
  std::int64_t choose_way(std::int64_t pair) const;
  double latency(std::int64_t way) const;
  const ScheduleStep& step(std::int64_t index) const;
  std::int32_t rank(std::int64_t index) const { return ranks_[index]; }
  double nbytes(std::int64_t index, const BlockSlice& where) const;

  AllSteps all_;
  std::vector<std::vector<const std::vector<std::int64_t>*>> bounds_;
  std::int64_t itemsize_;
  LinkRates rates_;
  std::vector<double> latencies_us_;
  RankRoutes routes_;
  SimulatedCosts costs_;
  FairSharing sharing_;
  Followers followers_;

  std::vector<std::int32_t> ranks_, waiting_;
  std::vector<std::int64_t> message_of_, causes_;
  std::vector<double> ready_, done_;
  std::vector<SimulatedMessage> messages_;
  std::vector<double> core_free_;       // of each rank
  std::vector<std::int64_t> core_last_; // step that it worked on last
  std::vector<double> link_nbytes_, link_busy_us_, link_since_;
  // Of lines: of all pairs, and of all links. The message that came last, or -1.
  std::vector<std::int64_t> last_of_line_;
  std::vector<double> tokens_, rests_since_;  // of a link's bucket, when it came to rest
  std::vector<Flow> flows_;
  std::vector<std::int64_t> todo_;
  std::vector<Event> events_;  // a heap
  std::int64_t next_number_ = 0, num_done_ = 0, num_events_ = 0;
  double now_ = 0, last_done_ = 0;
};

}  // namespace commrt
