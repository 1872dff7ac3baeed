// SPDX-License-Identifier: Apache-2.0
// Records in a ring (record_ring.hpp).
#include "recording/record_ring.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "python_callbacks.hpp"

namespace commrt {

namespace {

// Touched at once: a page that a call is the first to touch would cost that call.
LoggedCall* zeroed(size_t capacity) {
  auto* const memory = static_cast<LoggedCall*>(std::malloc(capacity * sizeof(LoggedCall)));
  if (memory == nullptr) throw std::bad_alloc();
  std::fill_n(memory, capacity, LoggedCall{});
  return memory;
}

}  // namespace

void RecordRing::reserve() {
  if (slots_ == nullptr) slots_.reset(zeroed(capacity_));
}

void RecordRing::resize(size_t capacity) {
  capacity = std::max<size_t>(capacity, 1);
  if (capacity == capacity_) return;
  while (next_ - oldest_ > capacity) drop_oldest();
  std::unique_ptr<LoggedCall[], Free> slots(zeroed(capacity));
  for (uint64_t number = oldest_; number < next_; ++number) slots[number % capacity] = at(number);
  slots_ = std::move(slots);
  capacity_ = capacity;
}

void RecordRing::clear() {
  while (oldest_ < next_) drop_oldest();
  dropped_ = 0;
}

void RecordRing::drop_oldest() {
  const LoggedCall gone = std::exchange(at(oldest_), LoggedCall{});
  ++oldest_;
  if (gone.kind == nullptr) {
    --holes_;
    return;
  }
  ++dropped_;
  Py_DECREF(gone.kind);
  Py_DECREF(gone.site);
}

uint64_t RecordRing::append(PyObject* kind, PyObject* site, RecordCounter& counter,
                            int64_t start_ns) {
  if (slots_ == nullptr) reserve();
  while (next_ - oldest_ >= capacity_) drop_oldest();
  at(next_) = {Py_NewRef(kind), Py_NewRef(site), counter.next++, start_ns, 0};
  return next_++;
}

void RecordRing::end_at(uint64_t first, uint32_t num, int64_t end_ns) {
  for (uint32_t i = 0; i < num; ++i) {
    LoggedCall* const record = find(first + i);
    if (record != nullptr && record->end_ns == 0) record->end_ns = end_ns;
  }
}

void RecordRing::fail(uint64_t first, uint32_t num, nb::handle error) {
  end_at(first, num, -monotonic_ns());
  tell(error);
}

void RecordRing::take_back(uint64_t first, uint32_t num) {
  for (uint64_t number = first + num; number-- > first;) {
    LoggedCall* const record = find(number);
    if (record == nullptr || record->kind == nullptr) continue;
    const LoggedCall gone = std::exchange(*record, LoggedCall{});
    if (number + 1 == next_) {
      --next_;
    } else {
      ++holes_;
    }
    auto& counter = nb::cast<RecordCounter&>(nb::handle(gone.kind).attr("counter"));
    if (counter.next == gone.seq + 1) --counter.next;
    Py_DECREF(gone.kind);
    Py_DECREF(gone.site);
  }
}

nb::object RecordRing::kind_of(uint64_t number) const {
  const LoggedCall* const record = find(number);
  return record == nullptr || record->kind == nullptr ? nb::none() : nb::borrow(record->kind);
}

nb::list RecordRing::snapshot() const {
  nb::list found;
  // As the list grows, the garbage collector may call something that is recorded. That call may
  // push out this very record, so it is copied.
  for (uint64_t number = oldest_; number < next_; ++number) {
    const LoggedCall* const slot = find(number);
    if (slot == nullptr || slot->kind == nullptr) continue;
    const LoggedCall record = *slot;
    const nb::object kind = nb::borrow(record.kind), site = nb::borrow(record.site);
    found.append(nb::make_tuple(kind, site, record.seq, record.start_ns, record.end_ns));
  }
  return found;
}

void RecordRing::tell(nb::handle error) {
  callback(Callback::Recorder)().attr("tell")(error);
}

}  // namespace commrt
