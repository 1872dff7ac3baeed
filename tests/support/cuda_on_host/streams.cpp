// SPDX-License-Identifier: Apache-2.0
#include "streams.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "captures.hpp"
#include "settings.hpp"

namespace cuda_on_host {
namespace {

// So many commands go behind a wait on an H200; the call that gives one more blocks.
constexpr std::uint64_t kMostBehindOne = 1020;

}  // namespace

thread_local bool in_host_function = false;

void Changes::tell() {
  { std::lock_guard<std::mutex> guard(mutex_); }
  changed_.notify_all();
}

void Changes::wait(const std::function<bool()>& ready) {
  for (int i = 0; i < 20; ++i) {
    if (ready()) return;
    sched_yield();
  }
  std::chrono::microseconds pause(20);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ready()) {
    changed_.wait_for(lock, pause);
    pause = std::min(pause * 2, std::chrono::microseconds(320));
  }
}

// A command that was given to a stream.
struct Given {
  StreamPtr stream;
  std::uint64_t number;
  std::vector<std::pair<StreamPtr, std::uint64_t>> behind;  // what the legacy stream waits for
  Command command;
};

struct Queue {
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Given> commands;
  std::minstd_rand random;
  bool runs = false;
  Handle of = nullptr;  // the stream of the latest command
  bool is_busy = false;
};

Card::Card() : legacy(std::make_shared<Stream>()) {
  legacy->blocking = true;
  legacy->queue = add_queue();
}

Queue* Card::add_queue() {
  queues_.push_back(new Queue);
  queues_.back()->random.seed(static_cast<unsigned>(settings().seed * 64 + queues_.size()));
  return queues_.back();
}

// A new stream takes the queue with the fewest streams; the legacy stream has the first one to
// itself if there are others. Which one the driver takes is not known.
StreamPtr Card::add_stream(bool blocking) {
  std::map<Queue*, int> taken{{legacy->queue, settings().queues == 1 ? 0 : 1 << 20}};
  for (const auto& [handle, stream] : streams) ++taken[stream->queue];
  for (const StreamPtr& stream : dropped_) taken[stream->queue] += stream->done < stream->given;
  Queue* least = queues_.front();
  for (Queue* each : queues_)
    if (taken[each] < taken[least]) least = each;
  const auto most = static_cast<std::size_t>(settings().queues);
  if (taken[least] && (!most || queues_.size() < most)) least = add_queue();
  auto made = std::make_shared<Stream>();
  made->handle = fresh();
  made->blocking = blocking;
  made->queue = least;
  return made;
}

void Card::drop_stream(const StreamPtr& stream) {
  std::lock_guard<std::mutex> guard(tables);
  const auto is_done = [](const StreamPtr& each) { return each->done == each->given; };
  dropped_.erase(std::remove_if(dropped_.begin(), dropped_.end(), is_done), dropped_.end());
  dropped_.push_back(stream);
  streams.erase(stream->handle);
}

std::vector<StreamPtr> Card::every_stream() {
  std::lock_guard<std::mutex> guard(tables);
  std::vector<StreamPtr> all = dropped_;
  all.push_back(legacy);
  for (const auto& [handle, stream] : streams) all.push_back(stream);
  return all;
}

StreamPtr Card::stream(Handle handle) {
  if (reinterpret_cast<std::uint64_t>(handle) <= 1) return legacy;  // 1 is CU_STREAM_LEGACY
  std::lock_guard<std::mutex> guard(tables);
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

EventPtr Card::event(Handle handle) {
  std::lock_guard<std::mutex> guard(tables);
  const auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

Command Card::record(const RecordPtr& record) {
  Command made;
  made.what = Command::What::Record;
  made.record = record;
  made.run = [record] {
    record->at = std::chrono::steady_clock::now();
    record->done = true;
  };
  return made;
}

Command Card::wait(const RecordPtr& record) {
  Command made;
  made.what = Command::What::Wait;
  made.record = record;
  if (record) made.ready = [record] { return record->done.load(); };
  return made;
}

Result Card::give(const StreamPtr& stream, Command command) {
  for (;;) {
    {
      std::lock_guard<std::mutex> guard(giving);
      if (Result result = capture_takes(stream, &command); result != kNotReady) return result;
      if (stream->given - stream->done <= kMostBehindOne || failure()) {
        push(stream, std::move(command));
        return failure();
      }
    }
    changes_.wait([&] { return stream->given - stream->done <= kMostBehindOne || failure(); });
  }
}

void Card::push(const StreamPtr& stream, Command command) {
  Given one{stream, ++stream->given, {}, std::move(command)};
  const auto behind = [&](const StreamPtr& other) {
    if (other != stream && other->done < other->given)
      one.behind.emplace_back(other, other->given.load());
  };
  if (stream == legacy) {
    for (const StreamPtr& other : every_stream())
      if (other->blocking) behind(other);
  } else if (stream->blocking) {
    behind(legacy);
  }
  Queue* const queue = stream->queue;
  std::lock_guard<std::mutex> guard(queue->mutex);
  queue->commands.push_back(std::move(one));
  if (!queue->runs) {
    queue->runs = true;
    // Signals are for threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this, queue] { run(queue); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  queue->arrived.notify_one();
}

void Card::run(Queue* queue) {
  for (;;) {
    Given one;
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->arrived.wait(lock, [&] { return !queue->commands.empty(); });
      one = std::move(queue->commands.front());
      queue->commands.pop_front();
      queue->of = one.stream->handle;
      queue->is_busy = true;
    }
    if (settings().max_delay_us) {
      const auto most = static_cast<unsigned>(settings().max_delay_us) + 1;
      std::this_thread::sleep_for(std::chrono::microseconds(queue->random() % most));
    }
    changes_.wait([&] {
      if (failure()) return true;
      for (const auto& [other, number] : one.behind)
        if (other->done < number) return false;
      return !one.command.ready || one.command.ready();
    });
    if (one.command.run && !failure()) one.command.run();
    one.command = {};  // what it holds goes before anybody hears that it is done
    one.stream->done = one.number;
    {
      std::lock_guard<std::mutex> guard(queue->mutex);
      queue->is_busy = false;
    }
    changes_.tell();
  }
}

std::string Card::report() {
  std::string text;
  const std::vector<StreamPtr> streams = every_stream();
  std::lock_guard<std::mutex> guard(tables);
  for (Queue* queue : queues_) {
    std::lock_guard<std::mutex> own(queue->mutex);
    text += "queue:";
    for (const StreamPtr& stream : streams)
      if (stream->queue == queue)
        text += " " + std::to_string(reinterpret_cast<std::uint64_t>(stream->handle)) + " (" +
                std::to_string(stream->done) + " of " + std::to_string(stream->given) + ")";
    if (queue->is_busy)
      text += ", in " + std::to_string(reinterpret_cast<std::uint64_t>(queue->of)) + ", " +
              std::to_string(queue->commands.size()) + " commands behind";
    text += "\n";
  }
  return text;
}

Result Card::wait_for(const StreamPtr& stream) {
  const std::uint64_t number = stream->given;
  changes_.wait([&] { return stream->done >= number || failure(); });
  return failure();
}

Result Card::wait_for_all() {
  std::vector<std::pair<StreamPtr, std::uint64_t>> until;
  for (const StreamPtr& stream : every_stream()) until.emplace_back(stream, stream->given.load());
  changes_.wait([&] {
    return failure() || std::all_of(until.begin(), until.end(), [](const auto& each) {
             return each.first->done >= each.second;
           });
  });
  return failure();
}

Card& card() {
  static Card* const made = new Card;
  return *made;
}

}  // namespace cuda_on_host
