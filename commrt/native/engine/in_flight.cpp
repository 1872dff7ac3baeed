// SPDX-License-Identifier: Apache-2.0
// Compares what an array holds with what it held (in_flight.hpp).
#include "engine/in_flight.hpp"

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

InFlight::InFlight(const unsigned char* in, std::size_t in_nbytes, unsigned char* out,
                   std::size_t out_nbytes)
    : in_(in), in_nbytes_(in_nbytes), out_(out), out_nbytes_(out_nbytes) {
  before_ = sum();
  if (static_cast<const void*>(in) != static_cast<void*>(out) || in_nbytes != out_nbytes) return;
  before_ = checksum(in, in_nbytes);
  copy_.reset(new unsigned char[in_nbytes]);
  std::memcpy(copy_.get(), in, in_nbytes);
}

// Of all that the result does not change: what lies outside of it, or this rank's block in it.
uint64_t InFlight::sum() const {
  if (in_nbytes_ < out_nbytes_) return checksum(in_, in_nbytes_);
  const unsigned char* const in_end = in_ + in_nbytes_;
  const unsigned char* const from = std::clamp<const unsigned char*>(out_, in_, in_end);
  const unsigned char* const to = std::clamp<const unsigned char*>(out_ + out_nbytes_, from, in_end);
  if (out_nbytes_ == 0 || from == to) return checksum(in_, in_nbytes_);
  return checksum(to, static_cast<std::size_t>(in_end - to),
                  checksum(in_, static_cast<std::size_t>(from - in_)));
}

bool InFlight::has_changed() {
  if (copy_ == nullptr) return sum() != before_;
  const bool changed = checksum(in_, in_nbytes_) != before_;
  std::memcpy(out_, copy_.get(), out_nbytes_);
  copy_.reset();
  return changed;
}

void Comm::guard(Op& op) {
  const Plan& plan = *op.plan;
  if (plan.most_slots != 0 || op.in == nullptr || plan.in_elems == 0) return;  // boxes
  op.in_flight = std::make_shared<InFlight>(
      op.in, static_cast<size_t>(plan.in_elems) * plan.itemsize, op.out,
      static_cast<size_t>(plan.out_elems) * plan.itemsize);
  if (op.in_flight->copy() == nullptr) return;
  op.in = op.out = op.in_flight->copy();
}

}  // namespace commrt
