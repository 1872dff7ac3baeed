// SPDX-License-Identifier: Apache-2.0
// Asks MPI for the group of failed ranks.
#include "engine/mpi_failures.hpp"

#include <algorithm>
#include <numeric>
#include <type_traits>

namespace commrt {

namespace {

struct Api {
  int (*comm_get_failed)(Handle, void*) = nullptr;
  int (*comm_group)(Handle, void*) = nullptr;
  int (*group_size)(Handle, int*) = nullptr;
  int (*group_translate_ranks)(Handle, int, const int*, Handle, int*) = nullptr;
  int (*group_free)(void*) = nullptr;
  Handle comm_self = 0;
  int any_source = 0, any_tag = 0;
  int err_proc_failed = 0, err_proc_failed_pending = 0, err_revoked = 0;
  bool loaded = false;
};

Api& api() {
  static Api one;
  return one;
}

int class_of(int code) {
  int found = 0;
  if (code == 0 || !api().loaded || mpi().error_class(code, &found) != 0) return 0;
  return found;
}

}  // namespace

std::string MpiFailures::load(const std::unordered_map<std::string, uint64_t>& found) {
  std::string missing;
  auto bind = [&](const char* name, auto& slot) {
    const auto it = found.find(name);
    if (it == found.end()) {
      if (missing.empty()) missing = name;
      return;
    }
    using Slot = std::remove_reference_t<decltype(slot)>;
    if constexpr (std::is_pointer_v<Slot>) {
      slot = reinterpret_cast<Slot>(it->second);
    } else {
      slot = static_cast<Slot>(it->second);
    }
  };
  Api& one = api();
  bind("MPIX_Comm_get_failed", one.comm_get_failed);
  bind("MPI_Comm_group", one.comm_group);
  bind("MPI_Group_size", one.group_size);
  bind("MPI_Group_translate_ranks", one.group_translate_ranks);
  bind("MPI_Group_free", one.group_free);
  bind("COMM_SELF", one.comm_self);
  bind("ANY_SOURCE", one.any_source);
  bind("ANY_TAG", one.any_tag);
  bind("ERR_PROC_FAILED", one.err_proc_failed);
  bind("ERR_PROC_FAILED_PENDING", one.err_proc_failed_pending);
  bind("ERR_REVOKED", one.err_revoked);
  one.loaded = missing.empty();
  return missing;
}

bool MpiFailures::is_loaded() { return api().loaded; }

bool MpiFailures::is_failure(int code) {
  const int which = class_of(code);
  return which != 0 && (which == api().err_proc_failed || which == api().err_proc_failed_pending);
}

bool MpiFailures::is_revocation(int code) {
  const int which = class_of(code);
  return which != 0 && which == api().err_revoked;
}

MpiFailures::MpiFailures(Handle comm, const std::vector<int>& places) : comm_(comm) {
  const int size = 1 + *std::max_element(places.begin(), places.end());
  member_of_.assign(static_cast<size_t>(size), -1);
  known_.assign(static_cast<size_t>(size), false);
  for (size_t m = 0; m < places.size(); ++m) {
    member_of_[static_cast<size_t>(places[m])] = static_cast<int>(m);
  }
}

std::vector<int> MpiFailures::ask() {
  const Api& one = api();
  MpiStatus status;
  int flag = 0, size = 0;
  mpi().iprobe(one.any_source, one.any_tag, one.comm_self, &flag, &status);
  Handle failed = 0, whole = 0;
  std::vector<int> news;
  if (one.comm_get_failed(comm_, &failed) != 0) return news;
  if (one.group_size(failed, &size) == 0 && size > num_known_ && one.comm_group(comm_, &whole) == 0) {
    std::vector<int> numbers(static_cast<size_t>(size)), ranks(static_cast<size_t>(size), -1);
    std::iota(numbers.begin(), numbers.end(), 0);
    one.group_translate_ranks(failed, size, numbers.data(), whole, ranks.data());
    for (const int rank : ranks) {
      const size_t at = static_cast<size_t>(rank);
      if (rank < 0 || at >= known_.size() || known_[at]) continue;
      known_[at] = true;
      if (member_of_[at] >= 0) news.push_back(member_of_[at]);
    }
    num_known_ = size;
    one.group_free(&whole);
  }
  one.group_free(&failed);
  return news;
}

}  // namespace commrt
