// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a communicator meet: shared memory with a seat for each, and channels.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace stub {

constexpr size_t kChannelBytes = 16384;

// What a rank tells the others of itself.
struct Seat {
  std::atomic<int> is_taken;
  std::atomic<uint32_t> bell;  // a futex: rung when there is news for the rank
  char host[64];
  uint64_t bus;                // of its device
  struct Split {
    std::atomic<uint64_t> number;  // of the split that it speaks of, from 1
    std::atomic<int> color, key;
  } splits[2];
};

// A stream of bytes from one rank to another.
struct Channel {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  char bytes[kChannelBytes];

  // Each moves what it can, and returns how much that was.
  size_t push(const char* from, size_t nbytes);
  size_t pull(char* to, size_t nbytes);
};

struct Entrance {
  std::atomic<int> size, joined, finalized;
};

class Place {
 public:
  // Null where ranks say different sizes; throws std::system_error where there is no memory.
  static std::unique_ptr<Place> open(const std::string& name, int size);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  Entrance& entrance() const { return *static_cast<Entrance*>(memory_); }
  Seat& seat(int rank) const;
  Channel& channel(bool of_messages, int from, int to) const;
  bool is_complete() const { return entrance().joined.load() == size_; }
  void ring(int rank) const;
  void ring_all() const;
  // Waits for a ring after `seen` was read, or a moment.
  void wait(int rank, uint32_t seen) const;
  // The name goes; who has the memory keeps it.
  void unlink() const;
  const std::string& name() const { return name_; }

 private:
  Place(std::string name, int size, void* memory);

  const std::string name_;
  const int size_;
  void* const memory_;
};

}  // namespace stub
