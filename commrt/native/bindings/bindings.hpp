// SPDX-License-Identifier: Apache-2.0
// Declares every binding of this folder; calls/ declares its own beside the bound classes.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace commrt {

struct RankState;

void bind_boxes(nb::module_& m);
void bind_callbacks(nb::module_& m);
void bind_channel_norm(nb::module_& m);
void bind_csr(nb::module_& m);
void bind_device(nb::module_& m);
void bind_device_request(nb::module_& m);
void bind_device_work(nb::module_& m);
void bind_end(nb::module_& m);
void bind_flight(nb::module_& m);
void bind_flows(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_group(nb::module_& m);
void bind_faults(nb::module_& m);
void bind_waiting(nb::module_& m);
void bind_host_work(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_mpi_work(nb::module_& m);
void bind_multi(nb::module_& m);
void bind_nccl(nb::module_& m);
void bind_nccl_work(nb::module_& m);
void bind_peer_work(nb::module_& m);
void bind_persistent(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_programs(nb::module_& m);
void bind_recording(nb::module_& m);
void bind_relay(nb::module_& m);
void bind_schedules(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_staging(nb::module_& m);
void bind_wire(nb::module_& m);

// The state of a rank, for Python: see rank_states() in bind_flight.cpp.
nb::object described(const RankState& state);

}  // namespace commrt
