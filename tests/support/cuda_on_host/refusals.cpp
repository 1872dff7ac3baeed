// SPDX-License-Identifier: Apache-2.0
#include "refusals.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>

#include "streams.hpp"

namespace cuda_on_host {
namespace {

std::atomic<pid_t> initialised{0};  // in this process, and not in one that has forked it
thread_local int contexts = 0;

struct Failure {
  std::string function;
  long nth = 0, seen = 0;
  Result result = kSuccess;
};

std::mutex mutex;
Failure& wanted() {
  static Failure* const made = [] {
    auto* const failure = new Failure;
    const char* const text = std::getenv("CUDA_ON_HOST_FAIL");
    const std::string words = text ? text : "";
    const auto first = words.find(':'), second = words.find(':', first + 1);
    if (second != std::string::npos)
      *failure = {words.substr(0, first), std::atol(words.c_str() + first + 1), 0,
                  std::atoi(words.c_str() + second + 1)};
    return failure;
  }();
  return *made;
}

Result told_to_fail(const char* function) {
  std::lock_guard<std::mutex> guard(mutex);
  Failure& failure = wanted();
  if (failure.function != "*" && failure.function != function) return kSuccess;
  return ++failure.seen == failure.nth ? failure.result : kSuccess;
}

}  // namespace

void initialise() { initialised = getpid(); }
void push_context() { ++contexts; }
bool pop_context() { return contexts > 0 && contexts-- > 0; }
bool has_context() { return contexts > 0; }

Result refuse(const char* function, bool needs_context) {
  if (initialised != getpid()) return kNotInitialized;
  if (in_host_function) return kNotPermitted;
  if (needs_context && !has_context()) return kInvalidContext;
  if (Result result = card().failure()) return result;
  const Result result = told_to_fail(function);
  if (is_sticky(result)) card().fail(result);
  return result;
}

void fail_at(const char* function, long nth, Result result) {
  std::lock_guard<std::mutex> guard(mutex);
  wanted() = {function, nth, 0, result};
}

long num_calls() {
  std::lock_guard<std::mutex> guard(mutex);
  return wanted().seen;
}

}  // namespace cuda_on_host
