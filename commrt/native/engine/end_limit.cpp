// SPDX-License-Identifier: Apache-2.0
#include "engine/end_limit.hpp"

#include <csignal>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

namespace commrt {

void limit_end(double seconds, int status, std::string message) {
  // Signals are for the program's threads: this one inherits that it takes none.
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  std::thread([seconds, status, text = std::move(message)] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(status);
    _exit(status);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace commrt
