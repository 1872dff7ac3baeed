// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "memory.hpp"

namespace cuda_on_host {
namespace {

constexpr char kMark[] = "commrt's kernels on the host";
constexpr unsigned kThreads = 256;  // of a block, as cuda_as_cpp.hpp has them

struct Kernel {
  std::string name;
  void* library;
  void* address;
};
struct Module {
  void* library = nullptr;
  std::set<std::string> names;
  std::map<std::string, std::unique_ptr<Kernel>> found;
};

std::mutex mutex;
std::map<Handle, std::unique_ptr<Module>>& modules() {
  static auto* const all = new std::map<Handle, std::unique_ptr<Module>>;
  return *all;
}

bool begins(const std::string& text, const char* with) {
  return text.compare(0, std::strlen(with), with) == 0;
}

// The parameters of kernels, as commrt/kernels/text has them.
struct Arrays {
  Pointer first[16];
};
struct Table {
  Pointer boxes, terms;
  std::uint32_t num_boxes;
  std::uint64_t units;
};
struct Factor {
  double real;
  std::int64_t integer;
};

template <class T>
T parameter(void** parameters, int number) {
  T value;
  std::memcpy(&value, parameters[number], sizeof value);
  return value;
}
void* address(void** parameters, int number) {
  return memory().at(parameter<Pointer>(parameters, number));
}

// Calls a function of cuda_as_cpp_launches.hpp.
template <class... Arguments>
std::function<void()> call(const Kernel* kernel, const char* launch, unsigned blocks,
                           Arguments... arguments) {
  using Launch = void (*)(void*, unsigned, Arguments...);
  const auto function = reinterpret_cast<Launch>(dlsym(kernel->library, launch));
  if (!function) return nullptr;
  void* const code = kernel->address;
  return [=] { function(code, blocks, arguments...); };
}

}  // namespace

Result load_module(const void* image, Handle* out) {
  const char* const text = static_cast<const char*>(image);
  if (!text || std::strncmp(text, kMark, sizeof kMark - 1) != 0) return kInvalidImage;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  auto made = std::make_unique<Module>();
  if (!std::getline(lines, line)) return kInvalidImage;
  made->library = dlopen(line.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!made->library) return kInvalidImage;
  while (std::getline(lines, line)) made->names.insert(line);
  std::lock_guard<std::mutex> guard(mutex);
  *out = made.get();
  modules()[*out] = std::move(made);
  return kSuccess;
}

Result unload_module(Handle module) {
  std::lock_guard<std::mutex> guard(mutex);
  return modules().erase(module) ? kSuccess : kInvalidHandle;  // its library stays
}

Result find_kernel(Handle module, const char* name, Handle* out) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto in = modules().find(module);
  if (in == modules().end()) return kInvalidHandle;
  if (!in->second->names.count(name)) return kNotFound;
  auto& kernel = in->second->found[name];
  if (!kernel) {
    void* const code = dlsym(in->second->library, name);
    if (!code) return kNotFound;
    kernel.reset(new Kernel{name, in->second->library, code});
  }
  *out = kernel.get();
  return kSuccess;
}

Result launch_of(Handle handle, unsigned blocks, unsigned threads, void** parameters,
                 std::function<void()>* out) {
  if (!handle) return kInvalidHandle;
  if (!blocks || threads != kThreads) return kInvalidValue;
  const auto* const kernel = static_cast<const Kernel*>(handle);
  if (kernel->name == "commrt_pack" || kernel->name == "commrt_unpack" ||
      begins(kernel->name, "commrt_boxes_")) {
    auto arrays = std::make_shared<Arrays>(parameter<Arrays>(parameters, 1));
    auto table = std::make_shared<Table>(parameter<Table>(parameters, 2));
    for (Pointer& each : arrays->first) each = reinterpret_cast<Pointer>(memory().at(each));
    for (Pointer* each : {&table->boxes, &table->terms})
      *each = reinterpret_cast<Pointer>(memory().at(*each));
    void* const buffer = address(parameters, 0);
    std::function<void()> run =
        begins(kernel->name, "commrt_boxes_")
            ? call(kernel, "launch_combine", blocks, buffer, arrays.get(), table.get(),
                   parameter<std::uint32_t>(parameters, 3))
            : call(kernel, "launch_boxes", blocks, buffer, arrays.get(), table.get());
    if (!run) return kNotFound;
    *out = [run, arrays, table] { run(); };
  } else if (begins(kernel->name, "commrt_scaled_sum_")) {
    const auto factor = parameter<Factor>(parameters, 4);
    *out = call(kernel, "launch_scaled", blocks, address(parameters, 0), address(parameters, 1),
                parameter<std::uint64_t>(parameters, 2), parameter<std::uint32_t>(parameters, 3),
                factor.real, factor.integer);
  } else if (begins(kernel->name, "commrt_divide_")) {
    *out = call(kernel, "launch_divide", blocks, address(parameters, 0),
                parameter<std::uint64_t>(parameters, 1), parameter<std::int64_t>(parameters, 2));
  } else {
    *out = call(kernel, "launch_reduce", blocks, address(parameters, 0), address(parameters, 1),
                parameter<std::uint64_t>(parameters, 2));
  }
  return *out ? kSuccess : kNotFound;
}

}  // namespace cuda_on_host
