// SPDX-License-Identifier: Apache-2.0
// The addresses at which other machines may reach this one.
#pragma once

#include <string>
#include <vector>

namespace commrt {

// Numeric, of interfaces that are up; without loopback and addresses that hold on one link only.
std::vector<std::string> own_addresses();

}  // namespace commrt
