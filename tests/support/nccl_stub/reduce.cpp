// SPDX-License-Identifier: Apache-2.0
// Collectives on host memory, once all ranks have come.
#include "stub.hpp"

namespace stub {

namespace {

void reduce(const std::vector<std::pair<Comm*, Op*>>& ranks, size_t total, void* result) {
  std::vector<Part> parts;
  for (const auto& rank : ranks) {
    parts.push_back({rank.second->in, rank.second->scaled, rank.second->factor});
  }
  const Op& first = *ranks[0].second;
  if (!reduce_parts(first.dtype, first.redop, parts, total, result)) violation("a type of no NCCL");
}

}  // namespace

void execute(Clique* clique, const std::vector<std::pair<Comm*, Op*>>& ranks) {
  const Op& first = *ranks[0].second;
  for (const auto& [comm, op] : ranks) {
    if (op->kind != first.kind || op->count != first.count || op->dtype != first.dtype ||
        op->peer != first.peer || (op->redop != first.redop && !(op->scaled && first.scaled))) {
      violation(std::string("ranks differ in a collective: rank 0 has ") + name_of(first.kind) +
                " of " + std::to_string(first.count) + ", rank " + std::to_string(comm->rank) +
                " has " + name_of(op->kind) + " of " + std::to_string(op->count));
      return;
    }
  }
  if (world.settings["no_data"]) return;
  const auto size = static_cast<size_t>(clique->size);
  const size_t item = type_size(first.dtype), block = first.count * item;
  // Collected first: outputs may be inputs.
  std::vector<char> whole(block * size);
  auto copy_out = [&](size_t rank, const char* from, size_t nbytes) {
    if (nbytes) memcpy(ranks[rank].second->out, from, nbytes);
  };
  auto gather_all = [&] {
    for (size_t r = 0; r < size; ++r) memcpy(whole.data() + r * block, ranks[r].second->in, block);
  };
  const auto root = static_cast<size_t>(first.peer);
  switch (first.kind) {
    case Kind::AllReduce:
    case Kind::Reduce:
      reduce(ranks, first.count, whole.data());
      for (size_t r = 0; r < size; ++r) {
        if (first.kind == Kind::AllReduce || r == root) copy_out(r, whole.data(), block);
      }
      break;
    case Kind::Broadcast:
      memcpy(whole.data(), ranks[root].second->in, block);
      for (size_t r = 0; r < size; ++r) copy_out(r, whole.data(), block);
      break;
    case Kind::AllGather:
      gather_all();
      for (size_t r = 0; r < size; ++r) copy_out(r, whole.data(), block * size);
      break;
    case Kind::Gather:
      gather_all();
      copy_out(root, whole.data(), block * size);
      break;
    case Kind::ReduceScatter:
      reduce(ranks, first.count * size, whole.data());
      for (size_t r = 0; r < size; ++r) copy_out(r, whole.data() + r * block, block);
      break;
    case Kind::Scatter:
      memcpy(whole.data(), ranks[root].second->in, block * size);
      for (size_t r = 0; r < size; ++r) copy_out(r, whole.data() + r * block, block);
      break;
    case Kind::AlltoAll: {
      std::vector<char> all(block * size * size);
      for (size_t r = 0; r < size; ++r) {
        memcpy(all.data() + r * block * size, ranks[r].second->in, block * size);
      }
      for (size_t r = 0; r < size; ++r) {
        for (size_t s = 0; s < size; ++s) {
          memcpy(static_cast<char*>(ranks[r].second->out) + s * block,
                 all.data() + (s * size + r) * block, block);
        }
      }
      break;
    }
    default: break;
  }
}

}  // namespace stub
