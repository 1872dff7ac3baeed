// SPDX-License-Identifier: Apache-2.0
// The one step of an operation that gloo runs by itself: what it needs copied, asking, the end.
#include <algorithm>
#include <cstring>

#include "engine/collective_codes.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/gloo_calls.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

constexpr double kHearing_s = 0.5;

}  // namespace

// At most `limit` bytes of what gloo is to find at `to`: a copy of `from`, scaled where the
// reduction wants that; they may be the same. True once all of it is there.
bool Op::contribute_slice(unsigned char* to, const unsigned char* from, int64_t elems,
                          uint64_t limit) {
  const Plan& p = *plan;
  const bool scales = !(p.factor == Scale{});
  if (!scales) return to == from || copy_slice(to, from, elems, limit);
  const size_t nbytes = static_cast<size_t>(elems) * p.itemsize;
  const size_t most = limit == kNoLimit ? nbytes : limit / p.itemsize * p.itemsize;
  const size_t piece = std::min(nbytes - copied_, most);
  if (piece != 0) {
    const uint64_t scaled = 1;
    const void* source = from + copied_;
    p.combine(to + copied_, nullptr, &source, 1, piece / p.itemsize, &scaled, p.factor,
              Store::Plain);
    copied_ += piece;
  }
  return copied_ == nbytes;
}

// Sets the addresses where gloo finds this rank's input and puts its result. Returns false while
// copies are still being made.
bool Op::prepare_for_gloo(uint64_t limit, const void*& from, void*& into) {
  from = in;
  into = out;
  unsigned char* const own = const_cast<unsigned char*>(in);
  const auto scratch = [&] {
    if (copied_ == 0 && tmp_storage == nullptr) {
      tmp_storage.reset(new unsigned char[static_cast<size_t>(plan->in_elems) * plan->itemsize + 1]);
    }
    return tmp_storage.get();
  };
  switch (plan->coll) {
    case kAllreduce:
      from = out;
      return contribute_slice(out, own, plan->in_elems, limit);
    case kReduce:
      // gloo overwrites what it reduces, on every rank.
      from = into = comm->rank == plan->root ? out : scratch();
      return contribute_slice(static_cast<unsigned char*>(into), own, plan->in_elems, limit);
    case kBcast:
      from = out;
      return comm->rank != plan->root || in == out || contribute_slice(out, own, plan->out_elems, limit);
    case kReduceScatter:
      if (plan->factor == Scale{}) return true;
      from = scratch();
      return contribute_slice(scratch(), own, plan->in_elems, limit);
    case kAlltoall:
    case kAlltoallv:
      if (static_cast<const void*>(in) != static_cast<void*>(out) || plan->in_elems == 0) return true;
      from = scratch();
      return copy_slice(scratch(), in, plan->in_elems, limit);
    default:
      return true;
  }
}

void Comm::make_agreement(Op& op) {
  const GlooPlan& how = *op.plan->gloo;
  if (how.agreement == nullptr) return;
  auto first = std::make_shared<Op>();
  first->comm = this;
  first->is_agreement = true;
  first->compared[0] = how.digest;
  first->compared[1] = -how.digest;
  first->bind(how.agreement, first->compared, first->compared);
  first->seq = op.seq;
  op.agreement = std::move(first);
}

void Comm::begin_agreement(const std::shared_ptr<Op>& first) {
  if (!fail_after_own(*first)) first->advance(kNoLimit);
}

// True once all ranks are known to have passed the same arguments, as far as gloo needs it. If
// they have not, the operation fails.
bool Op::has_agreed() {
  if (agreement == nullptr) return true;
  if (!agreement->finished() || agreement->has_failed()) return false;
  const int64_t digest = plan->gloo->digest;
  if (agreement->compared[0] == digest && agreement->compared[1] == -digest) return true;
  fail("the ranks called with different arguments (operation, length, type, reduction or root); "
       "gloo was given nothing");
  return false;
}

bool Op::advance_gloo(uint64_t limit) {
  if (gloo == nullptr) {
    // gloo matches collectives by the order of the calls: start in sequence order.
    if (comm->native_refused_) return false;
    if (!has_agreed()) {
      comm->native_refused_ = true;
      return finished();
    }
    const void* from = nullptr;
    void* into = nullptr;
    if (!prepare_for_gloo(limit, from, into)) {
      comm->native_refused_ = true;
      return true;
    }
    gloo = std::make_shared<GlooCall>();
    gloo->plan = plan;
    gloo->in = from;
    gloo->out = into;
    native_started_ = true;
    plan->gloo->group->ask(gloo);
    return true;
  }
  switch (gloo->now()) {
    case GlooCall::State::Done:
      finish();
      return true;
    case GlooCall::State::Failed: {
      const std::string died = comm->who_died();
      const std::string lost = died.empty() ? comm->who_is_lost() : died;
      // gloo does not say who it was, and the relay may hear of it a little later.
      if (lost.empty() && now_s() < gloo->failed_s + kHearing_s) return false;
      const std::string why =
          (lost.empty() ? "" : lost + "; ") + "gloo failed the collective: " + gloo->error;
      by_mpi = died.empty();
      by_death = !died.empty();
      native_started_ = false;  // gloo has let go of the buffers
      if (by_death) {
        fail(why);
        return true;
      }
      comm->break_down(why);
      fail(why + "; a rank has ended or cannot be reached, or the ranks called with different "
                 "arguments");
      return true;
    }
    default:
      return false;
  }
}

}  // namespace commrt
