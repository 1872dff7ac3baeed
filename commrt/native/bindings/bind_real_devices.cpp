// SPDX-License-Identifier: Apache-2.0
// Binds devices of threads and CUDA devices.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind_device.hpp"
#include "devices/cuda_device.hpp"
#include "devices/device_error.hpp"
#include "devices/thread_device.hpp"
#include "gil.hpp"

namespace commrt {
namespace {

struct PyThreadDevice : PyDevice {
  threaded::ThreadDevice* threads() const {
    return static_cast<threaded::ThreadDevice*>(device);
  }
};

struct PyCudaDevice : PyDevice {
  cuda::CudaDevice* cuda() const { return static_cast<cuda::CudaDevice*>(device); }
};

// Ending threads waits for them, and one may be in a Python function.
void end_threads(threaded::ThreadDevice* device) {
  if (PyGILState_Check()) {
    ReleasedGil free;
    delete device;
  } else {
    delete device;
  }
}

}  // namespace

void bind_real_devices(nb::module_& m, nb::class_<PyDevice>& device) {
  m.def("cuda_driver", [](const std::string& library) {
    std::string why;
    const cuda::Driver* driver = cuda::open_driver(library, &why);
    if (!driver) check_device(device_fails(DeviceStatus::Missing, why));
    std::vector<std::tuple<std::string, int, bool>> cards;
    for (const cuda::Card& card : cuda::list_cards(driver))
      cards.emplace_back(card.name, card.capability, card.can_memory_flags);
    return std::make_tuple(cuda::path_of(driver), driver->version, cards);
  }, nb::arg("library") = "",
        "Return the CUDA driver's file, its version, and of each card the name, the compute "
        "capability and whether it has memory flags; no device is opened.");
  nb::class_<PyThreadDevice>(m, "ThreadDevice", device,
                             "A device of real threads, one for each stream.")
      .def("__init__", [](PyThreadDevice* self, std::uint64_t seed, int max_delay_us, int ordinal,
                          bool memory_flags) {
        if (max_delay_us < 0) {
          throw nb::value_error(("max_delay_us=" + std::to_string(max_delay_us) +
                                 " is negative: pass microseconds, or 0 for no delays")
                                    .c_str());
        }
        auto* made = new threaded::ThreadDevice(seed, max_delay_us, ordinal);
        made->memory_flags = memory_flags;
        new (self) PyThreadDevice;
        self->device = made;
        self->keeps = std::shared_ptr<threaded::ThreadDevice>(made, end_threads);
      }, nb::kw_only(), nb::arg("seed") = 0, nb::arg("max_delay_us") = 0, nb::arg("ordinal") = 0,
         nb::arg("memory_flags") = true)
      .def("fail_after", [](const PyThreadDevice& d, std::uint64_t commands) {
        d.threads()->fail_after(commands);
      }, nb::arg("commands"), "Let the device fail for good at the n-th command from now.")
      .def("close", [](const PyThreadDevice& d) {
        ReleasedGil free;
        d.threads()->close();
      }, "End all threads, also those that wait; memory goes with the last user of the device.");

  nb::class_<PyCudaDevice>(m, "CudaDevice", device, "A GPU, through the CUDA driver.")
      .def("__init__", [](PyCudaDevice* self, int ordinal, bool memory_flags,
                          const std::string& library, const std::string& sysfs) {
        std::unique_ptr<cuda::CudaDevice> made;
        {
          ReleasedGil free;
          made = cuda::CudaDevice::open(ordinal, memory_flags, library, sysfs);
        }
        if (!made) check_device(DeviceStatus::Missing);
        new (self) PyCudaDevice;
        self->device = made.get();
        self->keeps = std::shared_ptr<cuda::CudaDevice>(std::move(made));
      }, nb::arg("ordinal") = 0, nb::kw_only(), nb::arg("memory_flags") = true,
         nb::arg("library") = "", nb::arg("sysfs") = "/sys")
      .def_prop_ro("node", [](const PyCudaDevice& d) { return d.cuda()->node; },
                   "The machine's node that pinned memory is taken from; -1: any.")
      .def_prop_ro("name", [](const PyCudaDevice& d) { return d.cuda()->name; }, "The card.")
      .def_prop_ro("ordinal", [](const PyCudaDevice& d) { return d.cuda()->ordinal; },
                   "The device's number in this process.")
      .def_prop_ro("uuid", [](const PyCudaDevice& d) {
        std::string text;
        for (unsigned char byte : d.cuda()->uuid.bytes) {
          constexpr char kDigits[] = "0123456789abcdef";
          text += kDigits[byte >> 4];
          text += kDigits[byte & 15];
        }
        return text;
      }, "Identity of the device in every process: 32 hexadecimal digits.")
      .def_prop_ro("capability", [](const PyCudaDevice& d) { return d.cuda()->capability; },
                   "The card's compute capability: 90 is 9.0.")
      .def_prop_ro("driver_version",
                   [](const PyCudaDevice& d) { return d.cuda()->driver_version; },
                   "The driver's CUDA version: 12040 is 12.4.")
      .def_prop_ro("can_memory_flags",
                   [](const PyCudaDevice& d) { return d.cuda()->can_memory_flags; },
                   "Whether the card can do what memory_flags says.");
}

}  // namespace commrt
