// SPDX-License-Identifier: Apache-2.0
#include "calls.hpp"

#include <climits>

#include "values.hpp"

namespace stub {

const char* text_of(int code) {
  switch (code) {
    case 0: return "no error";
    case 1: return "unhandled cuda error";
    case 2: return "unhandled system error";
    case 3: return "internal error";
    case 4: return "invalid argument";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    case 7: return "operation in progress";
    default: return "unknown result code";
  }
}

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather",
                                   "ReduceScatter", "AlltoAll", "Gather", "Scatter", "Send",
                                   "Recv"};
  return names[static_cast<int>(kind)];
}

int since(Kind kind) {
  const bool is_newer = kind == Kind::AlltoAll || kind == Kind::Gather || kind == Kind::Scatter;
  return is_newer ? 22800 : 0;
}

Touched touched(const Op& op, int rank, int size) {
  const size_t block = op.count * type_size(op.dtype), all = block * static_cast<size_t>(size);
  const bool is_root = op.peer == rank;
  switch (op.kind) {
    case Kind::Reduce: return {block, is_root ? block : 0};
    case Kind::Broadcast: return {is_root ? block : 0, block};
    case Kind::AllGather: return {block, all};
    case Kind::ReduceScatter: return {all, block};
    case Kind::AlltoAll: return {all, all};
    case Kind::Gather: return {block, is_root ? all : 0};
    case Kind::Scatter: return {is_root ? all : 0, block};
    case Kind::Send: return {block, 0};
    case Kind::Recv: return {0, block};
    default: return {block, block};
  }
}

std::string problem_of(const Op& op, int rank, int size, int version) {
  const int num_types = version >= 22400 ? 12 : 10;
  if (version < since(op.kind)) return "not in this version";
  if (op.dtype < 0 || op.dtype >= num_types) return "type " + std::to_string(op.dtype);
  if (op.peer < 0 || op.peer >= size) return "rank " + std::to_string(op.peer);
  if (op.count == 0) return "no elements: such a call should have been left out";
  const auto [read, written] = touched(op, rank, size);
  if ((read != 0 && op.in == nullptr) || (written != 0 && op.out == nullptr)) return "no buffer";
  if (op.kind == Kind::AlltoAll && op.in == op.out && size > 1) return "in place";
  return "";
}

std::string problem_of(const Config& config, int version) {
  const size_t known = version >= 23000 ? 96 : version >= 22900 ? 88
                       : version >= 22800 ? 80 : version >= 22700 ? 72 : 48;
  if (config.magic != 0xcafebeef) return "ncclConfig_t without its magic";
  if (config.size < 48 || config.size > known) {
    return "ncclConfig_t of " + std::to_string(config.size) + " bytes";
  }
  if (static_cast<int>(config.version) > version) {
    return "ncclConfig_t of a version that is newer than the library";
  }
  if (config.traffic_class != INT_MIN && config.version < 22600) {
    return "a traffic class in the padding of an older ncclConfig_t";
  }
  return "";
}

}  // namespace stub
