// SPDX-License-Identifier: Apache-2.0
// Collectives on host memory, once all ranks have come.
#include <algorithm>
#include <cmath>

#include "stub.hpp"

namespace stub {

size_t type_size(int dtype) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[dtype];
}

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather",
                                   "ReduceScatter", "AlltoAll", "Gather", "Scatter", "Send",
                                   "Recv"};
  return names[static_cast<int>(kind)];
}

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 0    ? std::ldexp(fraction, -24)
                       : exponent == 31 ? (fraction ? NAN : INFINITY)
                                        : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -value : value;
}

namespace {

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

template <class T> double load(T x) { return static_cast<double>(x); }
template <> double load(Brain x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}
template <> double load(Half x) { return half_value(x.bits); }

template <class T> T store(double x) { return static_cast<T>(x); }
template <> Brain store(double x) {
  const float f = static_cast<float>(x);
  uint32_t wide;
  memcpy(&wide, &f, 4);
  return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
template <> Half store(double x) {  // small integers and halves, which tests use
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x == 0) return {sign};
  int exponent;
  const double fraction = std::frexp(x, &exponent);
  const auto rounded = static_cast<uint16_t>(std::nearbyint(fraction * 2048));
  return {static_cast<uint16_t>(sign + ((exponent + 14 - 1) << 10) + rounded)};
}

// Integers wrap, so they are added as they are.
template <class T>
T combine(T a, T b, int op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    if (op == 0 || op >= 4) return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == 1) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return op == 2 ? std::max(a, b) : std::min(a, b);
  } else {
    const double x = load(a), y = load(b);
    if (op == 0 || op >= 4) return store<T>(x + y);
    if (op == 1) return store<T>(x * y);
    return store<T>(op == 2 ? std::fmax(x, y) : std::fmin(x, y));
  }
}

template <class T>
void reduce_typed(const std::vector<std::pair<Comm*, Op*>>& ranks, size_t total, void* result) {
  const int op = ranks[0].second->redop;
  const auto size = static_cast<int>(ranks.size());
  T* out = static_cast<T*>(result);
  for (size_t i = 0; i < total; ++i) {
    T sum{};
    for (int r = 0; r < size; ++r) {
      const Op* one = ranks[r].second;
      T x = static_cast<const T*>(one->in)[i];
      if (one->scaled) {
        if constexpr (std::is_integral_v<T>) {  // which wrap
          x = static_cast<T>(static_cast<uint64_t>(x) *
                             static_cast<uint64_t>(static_cast<int64_t>(one->factor)));
        } else {
          x = store<T>(load(x) * one->factor);
        }
      } else if (op == 4 && !std::is_integral_v<T>) {
        x = store<T>(load(x) / size);
      }
      sum = r == 0 ? x : combine(sum, x, op);
    }
    if constexpr (std::is_integral_v<T>) {
      if (op == 4) sum = static_cast<T>(sum / static_cast<std::conditional_t<
                       std::is_signed_v<T>, int64_t, uint64_t>>(size));
    }
    out[i] = sum;
  }
}

void reduce(const std::vector<std::pair<Comm*, Op*>>& ranks, size_t total, void* result) {
  switch (ranks[0].second->dtype) {
    case 0: return reduce_typed<int8_t>(ranks, total, result);
    case 1: return reduce_typed<uint8_t>(ranks, total, result);
    case 2: return reduce_typed<int32_t>(ranks, total, result);
    case 3: return reduce_typed<uint32_t>(ranks, total, result);
    case 4: return reduce_typed<int64_t>(ranks, total, result);
    case 5: return reduce_typed<uint64_t>(ranks, total, result);
    case 6: return reduce_typed<Half>(ranks, total, result);
    case 7: return reduce_typed<float>(ranks, total, result);
    case 8: return reduce_typed<double>(ranks, total, result);
    case 9: return reduce_typed<Brain>(ranks, total, result);
    default: violation("the stub does not add 8-bit floats");
  }
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
