// SPDX-License-Identifier: Apache-2.0
// Binds the words of a plan by which another rank makes the same call (engine/device_refusals.hpp).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

namespace nb = nanobind;

namespace commrt {

template <class Plan>
nb::class_<Plan>& bind_words(nb::class_<Plan>& bound) {
  return bound.def_prop_rw(
      "words", [](const Plan& plan) { return plan.words == nullptr ? std::string() : *plan.words; },
      [](Plan& plan, const std::string& words) {
        plan.words = std::make_shared<const std::string>(words);
      },
      "How a rank that has refused such a call makes it; set before a start. Empty: it cannot.");
}

}  // namespace commrt
