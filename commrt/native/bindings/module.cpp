// SPDX-License-Identifier: Apache-2.0
// The extension module: numpy's C interface, then every binding.
#include "arrays/places.hpp"
#include "arrays/tensor_view.hpp"
#include "arrays/view.hpp"
#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "calls/device_call_cache.hpp"

NB_MODULE(_native, m) {
  m.doc() = "commrt's native engine";
  if (!commrt::load_numpy()) throw nb::python_error();
  // Communicators live as long as the process; what is alive at its end is no leak.
  nb::set_leak_warnings(false);
  commrt::bind_kernels(m);
  commrt::bind_plan(m);
  commrt::bind_relay(m);
  commrt::bind_engine(m);
  commrt::bind_group(m);
  commrt::bind_faults(m);
  commrt::bind_flight(m);
  commrt::bind_waiting(m);
  commrt::bind_fusion(m);
  commrt::bind_tensor_view(m);
  commrt::bind_places(m);
  commrt::bind_operation(m);
  commrt::bind_p2p_operation(m);
  commrt::bind_boxes(m);
  commrt::bind_persistent(m);
  commrt::bind_multi(m);
  commrt::bind_sparse(m);
  commrt::bind_channel_norm(m);
  commrt::bind_csr(m);
  commrt::bind_wire(m);
  commrt::bind_device(m);
  commrt::bind_programs(m);
  commrt::bind_schedules(m);
  commrt::bind_flows(m);
  commrt::bind_nccl(m);
  commrt::bind_device_work(m);
  commrt::bind_device_request(m);
  commrt::bind_staging(m);
  commrt::bind_host_work(m);
  commrt::bind_nccl_work(m);
  commrt::bind_peer_work(m);
  commrt::bind_device_call_cache(m);
  commrt::bind_mpi_work(m);
  commrt::bind_recording(m);
  commrt::bind_callbacks(m);
  commrt::bind_end(m);
}
