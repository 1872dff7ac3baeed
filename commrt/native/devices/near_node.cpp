// SPDX-License-Identifier: Apache-2.0
// The system's own calls: libnuma is not everywhere.
#include "devices/near_node.hpp"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <fstream>
#include <sstream>

namespace commrt {
namespace {

constexpr std::size_t kBits = 8 * sizeof(unsigned long);

// The first line of a file; empty where there is none.
std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string nodes_folder(const std::string& sysfs) { return sysfs + "/devices/system/node/"; }

// Reads a list such as 0-3,8, and sets the bits of those numbers that there is room for.
template <class Mask>
void fill(const std::string& list, Mask* mask) {
  std::istringstream text(list);
  std::string range;
  while (std::getline(text, range, ',')) {
    std::istringstream ends(range);
    std::size_t first = 0, last = 0;
    char dash = 0;
    if (!(ends >> first)) continue;
    if (!(ends >> dash >> last)) last = first;
    for (; first <= std::min(last, mask->size() * kBits - 1); ++first) {
      (*mask)[first / kBits] |= 1ul << first % kBits;
    }
  }
}

}  // namespace

int node_of_device(const std::string& sysfs, const std::string& bus_id) {
  if (line_of(nodes_folder(sysfs) + "online").find_first_of(",-") == std::string::npos) return -1;
  // The driver writes hexadecimal digits in capitals, the system does not.
  std::string id = bus_id;
  std::transform(id.begin(), id.end(), id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::istringstream text(line_of(sysfs + "/bus/pci/devices/" + id + "/numa_node"));
  int node = -1;
  return text >> node ? std::max(node, -1) : -1;
}

NearNode::NearNode(const std::string& sysfs, int node) {
  if (node < 0 || static_cast<std::size_t>(node) >= Mask().size() * kBits) return;
  bool chosen = false;
  if (say_policy(node, &chosen)) {
    by_ = By::Policy;
  } else if (!chosen && go_there(sysfs, node)) {
    by_ = By::Cpus;
  }
}

// `chosen`: somebody else has said where memory is to be.
bool NearNode::say_policy(int node, bool* chosen) {
  int mode = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return false;
  *chosen = mode != MPOL_DEFAULT;
  if (*chosen) return false;
  Mask nodes{};
  nodes[static_cast<std::size_t>(node) / kBits] = 1ul << static_cast<std::size_t>(node) % kBits;
  // Preferred: where that node is full, another one's memory does as well.
  return syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), nodes.size() * kBits) == 0;
}

bool NearNode::go_there(const std::string& sysfs, int node) {
  Mask cpus{};
  fill(line_of(nodes_folder(sysfs) + "node" + std::to_string(node) + "/cpulist"), &cpus);
  auto* before = reinterpret_cast<cpu_set_t*>(cpus_before_.data());
  if (sched_getaffinity(0, sizeof cpus_before_, before) != 0) return false;
  // Use only cores that this thread may use anyway.
  bool any = false;
  for (std::size_t i = 0; i < cpus.size(); ++i) {
    cpus[i] &= cpus_before_[i];
    any = any || cpus[i] != 0;
  }
  return any && sched_setaffinity(0, sizeof cpus, reinterpret_cast<cpu_set_t*>(cpus.data())) == 0;
}

NearNode::~NearNode() {
  if (by_ == By::Policy) syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
  if (by_ == By::Cpus) {
    sched_setaffinity(0, sizeof cpus_before_, reinterpret_cast<cpu_set_t*>(cpus_before_.data()));
  }
}

}  // namespace commrt
