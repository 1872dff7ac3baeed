// SPDX-License-Identifier: Apache-2.0
// Runs instructions on the arrays of a bucket.
#include "engine/parts.hpp"

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"

namespace commrt {

namespace {

// One local operand on its way through the parts.
struct PartWalk {
  const Part* part;     // null: scratch, which is one piece
  int64_t at;           // element of the bucket, or of the scratch
  unsigned char* flat;  // the scratch
  bool reads;
};

struct Scratch {
  std::vector<PartWalk> inputs, outs;
  std::vector<const void*> addresses;
};
thread_local Scratch scratch;

}  // namespace

std::unique_ptr<BucketParts> BucketParts::tail(size_t at) const {
  auto rest = std::make_unique<BucketParts>();
  for (size_t i = at; i < list_.size(); ++i) {
    rest->add(list_[i].in, list_[i].out, end_of(&list_[i]) - list_[i].first);
  }
  return rest;
}

void BucketParts::cut(size_t at) {
  elems_ = at == list_.size() ? elems_ : list_[at].first;
  list_.resize(at);
}

const Part* BucketParts::find(int64_t at) const {
  const auto behind = std::upper_bound(
      list_.begin(), list_.end(), at, [](int64_t e, const Part& part) { return e < part.first; });
  return &*(behind - 1);
}

unsigned char* BucketParts::pack(size_t itemsize) {
  packed_.reset(new unsigned char[std::max<size_t>(1, static_cast<size_t>(elems_) * itemsize)]);
  is_packed_ = true;
  for (const Part& part : list_) {
    const auto elems = static_cast<size_t>(end_of(&part) - part.first);
    if (elems == 0) continue;
    std::memcpy(packed_.get() + static_cast<size_t>(part.first) * itemsize, part.in,
                elems * itemsize);
  }
  return packed_.get();
}

void BucketParts::unpack(size_t itemsize) const {
  for (const Part& part : list_) {
    const auto elems = static_cast<size_t>(end_of(&part) - part.first);
    if (elems == 0) continue;
    std::memcpy(part.out, packed_.get() + static_cast<size_t>(part.first) * itemsize,
                elems * itemsize);
  }
}

void BucketParts::complete(const Plan& plan) const {
  for (const Part& part : list_) {
    plan.complete(part.out, static_cast<size_t>(end_of(&part) - part.first));
  }
}

// Does what compute_and_send() does for buffers in one piece. It works from one end of a part to
// the next, because everything between two ends is in one piece, too.
void Op::compute_in_parts(const Instr& ins, int64_t fragment,
                          const unsigned char* const* messages, unsigned char* slot) {
  const Plan& p = *plan;
  const size_t item = p.itemsize;
  const size_t nin = ins.inputs.size();
  const bool whole = p.fragments == 1;
  const Ref* shape = nullptr;
  for (const Ref& ref : ins.inputs) if (!ref.is_message) shape = &ref;
  for (const Ref& ref : ins.local_outs) shape = &ref;
  auto begin = [&](const Ref& ref, int piece, int64_t f) -> int64_t {
    const auto& offsets = p.spaces[ref.space].offsets;
    if (whole) return f == 0 ? offsets[ref.lo] : offsets[ref.hi];
    const int64_t lo = offsets[ref.lo + piece];
    return lo + p.cut(ins, offsets[ref.lo + piece + 1] - lo, fragment + f);
  };
  auto walk_from = [&](const Ref& ref, int piece) -> PartWalk {
    const SpaceSpec& space = p.spaces[ref.space];
    const int64_t at = begin(ref, piece, 0);
    if (space.kind == SpaceKind::Tmp) return {nullptr, at, tmp + space.tmp_offset, true};
    return {parts->find(at), at, nullptr, space.kind == SpaceKind::In};
  };
  auto address = [&](const PartWalk& walk) -> unsigned char* {
    if (walk.part == nullptr) return walk.flat + static_cast<size_t>(walk.at) * item;
    const auto offset = static_cast<size_t>(walk.at - walk.part->first) * item;
    return walk.reads ? const_cast<unsigned char*>(walk.part->in) + offset
                      : walk.part->out + offset;
  };
  // Steps over parts that end here; how far it is to the end of the one that then follows.
  auto room = [&](PartWalk& walk, int64_t most) -> int64_t {
    if (walk.part == nullptr) return most;
    while (parts->end_of(walk.part) == walk.at) ++walk.part;
    return std::min(most, parts->end_of(walk.part) - walk.at);
  };

  auto& inputs = scratch.inputs;
  auto& outs = scratch.outs;
  auto& addresses = scratch.addresses;
  inputs.resize(nin);
  outs.resize(ins.local_outs.size());
  addresses.resize(nin);
  size_t cursor = 0;  // in messages
  const int pieces = whole ? 1 : shape->hi - shape->lo;
  for (int piece = 0; piece < pieces; ++piece) {
    int64_t left = begin(*shape, piece, 1) - begin(*shape, piece, 0);
    if (left == 0) continue;
    for (size_t i = 0; i < nin; ++i) {
      if (!ins.inputs[i].is_message) inputs[i] = walk_from(ins.inputs[i], piece);
    }
    for (size_t o = 0; o < outs.size(); ++o) outs[o] = walk_from(ins.local_outs[o], piece);
    while (left != 0) {
      int64_t elems = left;
      for (size_t i = 0; i < nin; ++i) {
        if (!ins.inputs[i].is_message) elems = room(inputs[i], elems);
      }
      for (PartWalk& out_walk : outs) elems = room(out_walk, elems);
      const auto n = static_cast<size_t>(elems);
      for (size_t i = 0; i < nin; ++i) {
        const bool message = ins.inputs[i].is_message;
        addresses[i] = message ? messages[i] + cursor : address(inputs[i]);
        if (!message) inputs[i].at += elems;
      }
      unsigned char* const first = outs.empty() ? nullptr : address(outs[0]);
      unsigned char* const second = slot != nullptr ? slot + cursor : nullptr;
      if (first != nullptr || second != nullptr) {
        p.compute(ins, store, first, second, addresses.data(), n);
      }
      for (size_t o = 1; o < outs.size(); ++o) {
        unsigned char* const more = address(outs[o]);
        if (more != first) copy(more, first, n * item);
      }
      for (PartWalk& out_walk : outs) out_walk.at += elems;
      cursor += n * item;
      left -= elems;
    }
  }
}

}  // namespace commrt
