// SPDX-License-Identifier: Apache-2.0
// The extension module: numpy's C interface, then every binding.
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL commrt_numpy
#include "calls/group.hpp"

#include <numpy/arrayobject.h>

namespace commrt {
void bind_kernels(nb::module_& m);
void bind_nccl(nb::module_& m);
void bind_programs(nb::module_& m);
void bind_nccl_work(nb::module_& m);
void bind_peer_work(nb::module_& m);
void bind_mpi_work(nb::module_& m);
void bind_device(nb::module_& m);
void bind_device_request(nb::module_& m);
void bind_known_calls(nb::module_& m);
void bind_recording(nb::module_& m);
void bind_relay(nb::module_& m);
void bind_hosted(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_tensor_view(nb::module_& m);
void bind_wire(nb::module_& m);
}

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "commrt's native engine";
  if (_import_array() < 0) throw nb::python_error();
  // Communicators live as long as the process; what is alive at its end is no leak.
  nb::set_leak_warnings(false);
  commrt::bind_kernels(m);
  commrt::bind_plan(m);
  commrt::bind_relay(m);
  commrt::bind_group(m);
  commrt::bind_fusion(m);
  commrt::bind_tensor_view(m);
  commrt::bind_operation(m);
  commrt::bind_p2p_operation(m);
  commrt::bind_boxes(m);
  commrt::bind_persistent(m);
  commrt::bind_multi(m);
  commrt::bind_sparse(m);
  commrt::bind_wire(m);
  commrt::bind_device(m);
  commrt::bind_programs(m);
  commrt::bind_nccl(m);
  commrt::bind_device_work(m);
  commrt::bind_device_request(m);
  commrt::bind_staging(m);
  commrt::bind_hosted(m);
  commrt::bind_nccl_work(m);
  commrt::bind_peer_work(m);
  commrt::bind_known_calls(m);
  commrt::bind_mpi_work(m);
  commrt::bind_recording(m);
}
