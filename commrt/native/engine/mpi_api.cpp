// SPDX-License-Identifier: Apache-2.0
// Fills the MPI function table from looked-up addresses, and puts its errors into words.
#include "engine/mpi_api.hpp"

#include <algorithm>

namespace commrt {

MpiApi& mpi() {
  static MpiApi api;
  return api;
}

std::string MpiApi::load(const std::unordered_map<std::string, uint64_t>& addresses) {
  std::string missing;
  auto bind = [&](const char* name, auto& slot) {
    const auto it = addresses.find(name);
    if (it == addresses.end() || it->second == 0) {
      if (missing.empty()) missing = name;
      return;
    }
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(it->second);
  };
  bind("MPI_Isend", isend);
  bind("MPI_Irecv", irecv);
  bind("MPI_Test", test);
  bind("MPI_Cancel", cancel);
  bind("MPI_Iprobe", iprobe);
  bind("MPI_Get_count", get_count);
  bind("MPI_Test_cancelled", test_cancelled);
  bind("MPI_Abort", abort);
  bind("MPI_Error_class", error_class);
  bind("MPI_Error_string", error_string);
  bind("MPI_Iallreduce", iallreduce);
  bind("MPI_Ireduce", ireduce);
  bind("MPI_Ibcast", ibcast);
  bind("MPI_Iallgather", iallgather);
  bind("MPI_Ireduce_scatter_block", ireduce_scatter_block);
  bind("MPI_Ialltoall", ialltoall);
  bind("MPI_Igather", igather);
  bind("MPI_Iscatter", iscatter);
  bind("MPI_Iscan", iscan);
  bind("MPI_Iexscan", iexscan);
  bind("MPI_Ibarrier", ibarrier);
  bind("MPI_Iallgatherv", iallgatherv);
  bind("MPI_Ialltoallv", ialltoallv);
  bind("MPI_Igatherv", igatherv);
  bind("MPI_Iscatterv", iscatterv);
  bind("MPI_Ireduce_scatter", ireduce_scatter);
  loaded = missing.empty();
  return missing;
}

bool MpiApi::is_truncation(int code) const {
  int which = 0;
  return code != 0 && error_class(code, &which) == 0 && which == err_truncate;
}

std::string MpiApi::describe(const char* function, int code) const {
  // MPI_MAX_ERROR_STRING is 256 to 1024 in known libraries.
  char text[8192] = {0};
  int length = 0;
  std::string said;
  if (error_string(code, text, &length) == 0) said = text;
  std::replace(said.begin(), said.end(), '\n', ' ');
  if (is_relay) return said;
  const std::string number = "error code " + std::to_string(code);
  return std::string(function) + " failed" +
         (said.empty() ? " with " + number : ": " + said + " (" + number + ")");
}

}  // namespace commrt
