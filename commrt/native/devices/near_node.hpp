// SPDX-License-Identifier: Apache-2.0
// Finds the NUMA node that a device's bus is connected to, and takes host memory from that node.
#pragma once

#include <array>
#include <string>

namespace commrt {

// The node (of NUMA) of a PCI device, by its bus id; -1 where that is not known, or where the
// machine has one node only. `sysfs` is /sys, but in tests.
int node_of_device(const std::string& sysfs, const std::string& bus_id);

// While it lives, this thread gets memory from a node, where that may be said: by its memory policy,
// else, as containers forbid that, by running on the node's own CPUs. Afterwards all is as before.
// A choice by the program or by numactl takes precedence.
class NearNode {
 public:
  enum class By { Nothing, Policy, Cpus };

  NearNode(const std::string& sysfs, int node);
  ~NearNode();
  NearNode(const NearNode&) = delete;
  NearNode& operator=(const NearNode&) = delete;
  By by() const { return by_; }

 private:
  using Mask = std::array<unsigned long, 128>;  // of nodes or CPUs, up to 8192
  bool say_policy(int node, bool* chosen);
  bool go_there(const std::string& sysfs, int node);

  By by_ = By::Nothing;
  Mask cpus_before_{};
};

}  // namespace commrt
