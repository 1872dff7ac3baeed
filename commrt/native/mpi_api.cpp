// SPDX-License-Identifier: Apache-2.0
// Fills the MPI function table from looked-up addresses.
#include "mpi_api.hpp"

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
  bind("MPI_Abort", abort);
  bind("MPI_Iallreduce", iallreduce);
  bind("MPI_Ireduce", ireduce);
  bind("MPI_Ibcast", ibcast);
  bind("MPI_Iallgather", iallgather);
  bind("MPI_Ireduce_scatter_block", ireduce_scatter_block);
  bind("MPI_Ialltoall", ialltoall);
  bind("MPI_Igather", igather);
  bind("MPI_Iscatter", iscatter);
  bind("MPI_Ibarrier", ibarrier);
  loaded = missing.empty();
  return missing;
}

}  // namespace commrt
