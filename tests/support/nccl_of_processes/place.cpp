// SPDX-License-Identifier: Apache-2.0
#include "place.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

namespace stub {

namespace {

constexpr size_t kAlign = 64;
constexpr size_t rounded(size_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }
constexpr size_t kSeatsAt = rounded(sizeof(Entrance)), kSeat = rounded(sizeof(Seat));

size_t channels_at(int size) { return kSeatsAt + kSeat * static_cast<size_t>(size); }
size_t bytes_for(int size) {
  const auto ranks = static_cast<size_t>(size);
  return channels_at(size) + 2 * ranks * ranks * sizeof(Channel);
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// An open file, locked: one rank at a time looks whether it has its size.
class Locked {
 public:
  explicit Locked(const std::string& path)
      : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (descriptor_ < 0) fail("open");
    flock(descriptor_, LOCK_EX);
  }
  ~Locked() {
    flock(descriptor_, LOCK_UN);  // a mapping would keep it
    close(descriptor_);
  }
  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

size_t moved_around(uint64_t at, size_t nbytes) {
  return std::min<size_t>(nbytes, kChannelBytes - at % kChannelBytes);
}

}  // namespace

size_t Channel::push(const char* from, size_t nbytes) {
  const uint64_t begin = written.load(std::memory_order_relaxed);
  const size_t room = kChannelBytes - (begin - read.load(std::memory_order_acquire));
  const size_t now = std::min(nbytes, room), first = moved_around(begin, now);
  if (first != 0) memcpy(bytes + begin % kChannelBytes, from, first);
  if (now != first) memcpy(bytes, from + first, now - first);
  written.store(begin + now, std::memory_order_release);
  return now;
}

size_t Channel::pull(char* to, size_t nbytes) {
  const uint64_t begin = read.load(std::memory_order_relaxed);
  const size_t there = written.load(std::memory_order_acquire) - begin;
  const size_t now = std::min(nbytes, there), first = moved_around(begin, now);
  if (first != 0) memcpy(to, bytes + begin % kChannelBytes, first);
  if (now != first) memcpy(to + first, bytes, now - first);
  read.store(begin + now, std::memory_order_release);
  return now;
}

Place::Place(std::string name, int size, void* memory)
    : name_(std::move(name)), size_(size), memory_(memory) {}

std::unique_ptr<Place> Place::open(const std::string& name, int size) {
  const Locked file("/dev/shm/" + name);
  struct stat facts {};
  if (fstat(file.descriptor(), &facts) != 0) fail("fstat");
  const size_t nbytes = bytes_for(size);
  if (facts.st_size == 0 && ftruncate(file.descriptor(), static_cast<off_t>(nbytes)) != 0)
    fail("ftruncate");
  if (facts.st_size != 0 && static_cast<size_t>(facts.st_size) != nbytes) return nullptr;
  void* memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
  if (memory == MAP_FAILED) fail("mmap");
  return std::unique_ptr<Place>(new Place(name, size, memory));
}

Place::~Place() { munmap(memory_, bytes_for(size_)); }

Seat& Place::seat(int rank) const {
  auto* const at = static_cast<char*>(memory_) + kSeatsAt + kSeat * static_cast<size_t>(rank);
  return *reinterpret_cast<Seat*>(at);
}

Channel& Place::channel(bool of_messages, int from, int to) const {
  auto* const all = reinterpret_cast<Channel*>(static_cast<char*>(memory_) + channels_at(size_));
  return all[((of_messages ? size_ : 0) + from) * size_ + to];
}

void Place::ring(int rank) const {
  auto& bell = seat(rank).bell;
  bell.fetch_add(1);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Place::ring_all() const {
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

void Place::wait(int rank, uint32_t seen) const {
  const timespec moment{0, 20'000'000};
  syscall(SYS_futex, &seat(rank).bell, FUTEX_WAIT, seen, &moment, nullptr, 0);
}

void Place::unlink() const { ::unlink(("/dev/shm/" + name_).c_str()); }

}  // namespace stub
