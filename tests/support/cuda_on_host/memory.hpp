// SPDX-License-Identifier: Apache-2.0
// Memory of the card, pinned memory, and memory of other processes.
//
// The card's memory is a file without a name (memfd), so that other processes can map it and it
// goes with the last of them, however they end. As with a card, an allocation has one address for
// streams and kernels; the threads that stand for the card reach it through at(). Host threads reach
// it by the address itself, unless a guard is asked for: then such an access ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "results.hpp"

namespace cuda_on_host {

struct IpcHandle {
  unsigned char bytes[64];
};

enum class Kind { Unknown, Device, Opened, Pinned, Managed };

struct Block {
  Kind kind = Kind::Unknown;
  Pointer base = 0;
  std::size_t nbytes = 0;
};

class Memory {
 public:
  Result alloc(Pointer* out, std::size_t nbytes);
  Result free(Pointer base);
  // Both are ordinary memory of this process.
  Result alloc_host(void** out, std::size_t nbytes, Kind kind);
  Result free_host(void* base);
  bool owns(Pointer base, Kind kind);

  // The block that an address is in; of kind Unknown for all other memory.
  Block find(Pointer address);
  // True for memory that nobody allocated here, and for bytes that are all of one block.
  bool may_touch(Pointer address, std::size_t nbytes);
  // Where the card's threads find an address.
  void* at(Pointer address) const;

  Result handle_of(Pointer address, IpcHandle* out);
  Result open(const IpcHandle& handle, Pointer* out);
  Result close(Pointer base);

 private:
  // Places in a stretch of addresses. What was freed is not used again at once.
  struct Places {
    std::size_t begin = 0, end = 0, next = 0;
    std::map<std::size_t, std::size_t> taken;
    bool take(std::size_t nbytes, std::size_t* place);
  };
  // What the owner says in the file of the memory that it has exported; 0: it was freed.
  struct Exports;
  struct Allocation {
    Block block;
    std::size_t place = 0, mapped = 0;
    int slot = -1;            // of the exports
    std::uint64_t id = 0;     // of an opened one: of its handle
    int opened = 0;           // how often
  };

  bool start();
  Allocation* holding(Pointer address);

  std::mutex mutex_;
  bool started_ = false;
  int file_ = -1;
  std::uint64_t inode_ = 0, next_id_ = 0;
  char* addresses_ = nullptr;  // what the card's addresses begin with
  char* bytes_ = nullptr;      // where the card's threads find them
  Exports* exports_ = nullptr;
  int next_slot_ = 0;
  Places own_, others_;
  std::map<Pointer, Allocation> by_base_;
};

// Lives as long as the process: threads of the card use it to the end.
Memory& memory();

}  // namespace cuda_on_host
