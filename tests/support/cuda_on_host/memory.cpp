// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "settings.hpp"

namespace cuda_on_host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMostFilled = std::size_t{16} << 20;
constexpr std::size_t kForOthers = std::size_t{64} << 30;
constexpr std::uint64_t kMagic = 0x756461636e6f6870;

std::size_t whole_pages(std::size_t nbytes) {
  return (std::max<std::size_t>(nbytes, 1) + kPage - 1) / kPage * kPage;
}

// The 64 bytes that name memory to another process.
struct Ticket {
  std::uint64_t magic;
  std::int32_t pid, file, slot, unused;
  std::uint64_t inode, place, nbytes, id;
};
static_assert(sizeof(Ticket) <= sizeof(IpcHandle));

void* reserve(std::size_t nbytes) {
  void* const made =
      mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return made == MAP_FAILED ? nullptr : made;
}

}  // namespace

struct Memory::Exports {
  static constexpr int kMost = 1 << 14;
  std::atomic<std::uint64_t> ids[kMost];
};

bool Memory::Places::take(std::size_t nbytes, std::size_t* place) {
  for (int turn = 0; turn < 2; ++turn) {
    std::size_t at = turn ? begin : std::max(next, begin);
    auto behind = taken.upper_bound(at);
    if (behind != taken.begin()) {
      const auto before = std::prev(behind);
      at = std::max(at, before->first + before->second);
    }
    for (; behind != taken.end() && behind->first - at < nbytes; ++behind)
      at = behind->first + behind->second;
    if (at + nbytes > end) continue;
    taken[at] = nbytes;
    next = at + nbytes;
    *place = at;
    return true;
  }
  return false;
}

// Makes the card's memory, when it is first asked for.
bool Memory::start() {
  if (started_) return true;
  const std::size_t own = settings().memory_mib << 20;
  file_ = memfd_create("cuda-on-host", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(own)) != 0) return false;
  struct stat known {};
  fstat(file_, &known);
  inode_ = known.st_ino;
  addresses_ = static_cast<char*>(reserve(own + kForOthers));
  bytes_ = settings().guard ? static_cast<char*>(reserve(own + kForOthers)) : addresses_;
  if (!addresses_ || !bytes_) return false;
  const std::size_t head = whole_pages(sizeof(Exports));
  const int flags = MAP_SHARED | MAP_NORESERVE;
  void* const first = mmap(nullptr, head, PROT_READ | PROT_WRITE, flags, file_, 0);
  if (first == MAP_FAILED ||
      mmap(bytes_, own, PROT_NONE, flags | MAP_FIXED, file_, 0) == MAP_FAILED)
    return false;
  exports_ = static_cast<Exports*>(first);
  own_.begin = head, own_.end = own;
  others_.begin = own, others_.end = own + kForOthers;
  // Handles of a process before this one, of the same number, mean nothing here.
  if (getrandom(&next_id_, sizeof next_id_, 0) != sizeof next_id_) return false;
  started_ = true;
  return true;
}

Result Memory::alloc(Pointer* out, std::size_t nbytes) {
  if (!nbytes) return kInvalidValue;
  std::lock_guard<std::mutex> guard(mutex_);
  if (!start()) return kOutOfMemory;
  Allocation made;
  made.mapped = whole_pages(nbytes);
  if (nbytes > own_.end || !own_.take(made.mapped, &made.place)) return kOutOfMemory;
  mprotect(bytes_ + made.place, made.mapped, PROT_READ | PROT_WRITE);
  // Nobody may count on what fresh memory holds.
  std::memset(bytes_ + made.place, 0xff, std::min(nbytes, kMostFilled));
  made.block = {Kind::Device, reinterpret_cast<Pointer>(addresses_ + made.place), nbytes};
  by_base_[made.block.base] = made;
  *out = made.block.base;
  return kSuccess;
}

Result Memory::free(Pointer base) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = by_base_.find(base);
  if (found == by_base_.end() || found->second.block.kind != Kind::Device) return kInvalidValue;
  const Allocation& gone = found->second;
  if (gone.slot >= 0) exports_->ids[gone.slot] = 0;
  mprotect(bytes_ + gone.place, gone.mapped, PROT_NONE);
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(gone.place),
            static_cast<off_t>(gone.mapped));
  own_.taken.erase(gone.place);
  by_base_.erase(found);
  return kSuccess;
}

Result Memory::alloc_host(void** out, std::size_t nbytes, Kind kind) {
  if (!nbytes) return kInvalidValue;
  Allocation made;
  made.mapped = whole_pages(nbytes);
  void* const memory = mmap(nullptr, made.mapped, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  std::memset(memory, 0xff, std::min(nbytes, kMostFilled));
  made.block = {kind, reinterpret_cast<Pointer>(memory), nbytes};
  std::lock_guard<std::mutex> guard(mutex_);
  by_base_[made.block.base] = made;
  *out = memory;
  return kSuccess;
}

Result Memory::free_host(void* base) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = by_base_.find(reinterpret_cast<Pointer>(base));
  if (found == by_base_.end()) return kInvalidValue;
  const Kind kind = found->second.block.kind;
  if (kind != Kind::Pinned && kind != Kind::Managed) return kInvalidValue;
  munmap(base, found->second.mapped);
  by_base_.erase(found);
  return kSuccess;
}

bool Memory::owns(Pointer base, Kind kind) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = by_base_.find(base);
  return found != by_base_.end() && found->second.block.kind == kind;
}

Memory::Allocation* Memory::holding(Pointer address) {
  auto behind = by_base_.upper_bound(address);
  if (behind == by_base_.begin()) return nullptr;
  Allocation& found = std::prev(behind)->second;
  return address - found.block.base < found.block.nbytes ? &found : nullptr;
}

Block Memory::find(Pointer address) {
  std::lock_guard<std::mutex> guard(mutex_);
  const Allocation* const found = holding(address);
  return found ? found->block : Block{};
}

bool Memory::may_touch(Pointer address, std::size_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const Allocation* const found = holding(address);
  if (found) return address - found->block.base + nbytes <= found->block.nbytes;
  const auto begin = reinterpret_cast<Pointer>(addresses_);
  return !started_ || address < begin || address >= begin + others_.end;
}

void* Memory::at(Pointer address) const {
  const auto begin = reinterpret_cast<Pointer>(addresses_);
  if (!begin || address < begin || address >= begin + others_.end)
    return reinterpret_cast<void*>(address);
  return bytes_ + (address - begin);
}

Result Memory::handle_of(Pointer address, IpcHandle* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  Allocation* const found = holding(address);
  if (!found || found->block.kind != Kind::Device) return kInvalidValue;
  if (found->slot < 0) {
    const auto is_free = [&](int slot) { return exports_->ids[slot % Exports::kMost] == 0; };
    int tried = 0;
    while (tried < Exports::kMost && !is_free(next_slot_ + tried)) ++tried;
    if (tried == Exports::kMost) return kOutOfMemory;
    found->slot = (next_slot_ + tried) % Exports::kMost;
    next_slot_ = (found->slot + 1) % Exports::kMost;
    exports_->ids[found->slot] = next_id_ = std::max<std::uint64_t>(next_id_ + 1, 1);
  }
  Ticket ticket{kMagic, getpid(), file_, found->slot, 0, inode_, found->place,
                found->block.nbytes, exports_->ids[found->slot]};
  *out = {};
  std::memcpy(out->bytes, &ticket, sizeof ticket);
  return kSuccess;
}

Result Memory::open(const IpcHandle& handle, Pointer* out) {
  Ticket ticket;
  std::memcpy(&ticket, handle.bytes, sizeof ticket);
  if (ticket.magic != kMagic) return kInvalidValue;
  if (ticket.pid == getpid()) return kInvalidContext;  // as an H200 said
  std::lock_guard<std::mutex> guard(mutex_);
  if (!start()) return kOutOfMemory;
  for (auto& [base, one] : by_base_) {
    if (one.block.kind != Kind::Opened || one.id != ticket.id) continue;
    ++one.opened;
    *out = base;
    return kSuccess;
  }
  const std::string path =
      "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  struct stat known {};
  const std::size_t head = whole_pages(sizeof(Exports));
  void* exports = MAP_FAILED;
  if (fstat(file, &known) == 0 && known.st_ino == ticket.inode)
    exports = mmap(nullptr, head, PROT_READ, MAP_SHARED, file, 0);
  bool is_there = false;
  if (exports != MAP_FAILED) {
    is_there = static_cast<Exports*>(exports)->ids[ticket.slot] == ticket.id;
    munmap(exports, head);
  }
  Allocation made;
  made.mapped = whole_pages(ticket.nbytes);
  if (is_there && others_.take(made.mapped, &made.place)) {
    void* const memory =
        mmap(bytes_ + made.place, made.mapped, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, static_cast<off_t>(ticket.place));
    is_there = memory != MAP_FAILED;
    if (!is_there) others_.taken.erase(made.place);
  }
  ::close(file);
  if (!is_there) return kInvalidValue;
  made.block = {Kind::Opened, reinterpret_cast<Pointer>(addresses_ + made.place), ticket.nbytes};
  made.id = ticket.id;
  made.opened = 1;
  by_base_[made.block.base] = made;
  *out = made.block.base;
  return kSuccess;
}

Result Memory::close(Pointer base) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = by_base_.find(base);
  if (found == by_base_.end() || found->second.block.kind != Kind::Opened) return kInvalidValue;
  Allocation& one = found->second;
  if (--one.opened > 0) return kSuccess;
  mmap(bytes_ + one.place, one.mapped, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  others_.taken.erase(one.place);
  by_base_.erase(found);
  return kSuccess;
}

Memory& memory() {
  static Memory* const made = new Memory;
  return *made;
}

}  // namespace cuda_on_host
