// SPDX-License-Identifier: Apache-2.0
// The kernel lists the addresses of this machine's interfaces.
#include "engine/addresses.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

namespace commrt {

namespace {

std::string text_of(int family, const void* address) {
  char text[INET6_ADDRSTRLEN];
  return inet_ntop(family, address, text, sizeof text) != nullptr ? text : "";
}

std::string usable(const ifaddrs& one) {
  if (one.ifa_addr == nullptr || (one.ifa_flags & IFF_UP) == 0) return "";
  if ((one.ifa_flags & IFF_LOOPBACK) != 0) return "";
  if (one.ifa_addr->sa_family == AF_INET) {
    return text_of(AF_INET, &reinterpret_cast<const sockaddr_in*>(one.ifa_addr)->sin_addr);
  }
  if (one.ifa_addr->sa_family != AF_INET6) return "";
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(one.ifa_addr)->sin6_addr;
  return IN6_IS_ADDR_LINKLOCAL(&address) ? "" : text_of(AF_INET6, &address);
}

}  // namespace

std::vector<std::string> own_addresses() {
  std::vector<std::string> found;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return found;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, &freeifaddrs);
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (auto text = usable(*one); !text.empty()) found.push_back(std::move(text));
  }
  return found;
}

}  // namespace commrt
