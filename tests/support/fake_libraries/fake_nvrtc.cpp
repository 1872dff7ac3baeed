// SPDX-License-Identifier: Apache-2.0
// A libnvrtc that compiles nothing: what it makes names what it was given. Built by
// tests/support/fake_nvrtc.py, with the version that it is to have.
#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <string>

namespace {

struct Program {
  std::string name, made, log;
};
std::mutex mutex;
int compiled = 0;
bool failing = false, needs_builtins = false;

void take(const std::string& text, char* out) { std::memcpy(out, text.c_str(), text.size() + 1); }

}  // namespace

extern "C" {

int fake_compiled() { return compiled; }
void fake_fail(int fails) { failing = fails != 0; }
void fake_need_builtins(int needs) { needs_builtins = needs != 0; }

int nvrtcVersion(int* major, int* minor) {
  *major = FAKE_NVRTC_VERSION / 10;
  *minor = FAKE_NVRTC_VERSION % 10;
  return 0;
}
const char* nvrtcGetErrorString(int result) {
  return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}
int nvrtcGetNumSupportedArchs(int* count) { return *count = 3, 0; }
int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 75, archs[1] = 80, archs[2] = 90;
  return 0;
}
int nvrtcCreateProgram(Program** out, const char* source, const char* name, int headers,
                       const char* const*, const char* const*) {
  if (headers || !std::strstr(source, "__global__")) return 3;
  *out = new Program{name, "", ""};
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::lock_guard<std::mutex> guard(mutex);
  ++compiled;
  if (needs_builtins) {  // by its name alone, as NVIDIA's does
    const std::string version = std::to_string(FAKE_NVRTC_VERSION / 10) + "." +
                                std::to_string(FAKE_NVRTC_VERSION % 10);
    const std::string name = "libnvrtc-builtins.so." + version;
    program->log = "nvrtc: error: failed to open " + name;
    if (!dlopen(name.c_str(), RTLD_NOW)) return 7;
  }
  program->log = "line 7: it was told to fail";
  if (failing) return 6;
  program->made = program->name;
  for (int i = 0; i < count; ++i) program->made += std::string(" ") + options[i];
  return 0;
}
int nvrtcGetProgramLogSize(Program* program, std::size_t* out) {
  return *out = program->log.size() + 1, 0;
}
int nvrtcGetProgramLog(Program* program, char* out) { return take(program->log, out), 0; }
int nvrtcGetCUBINSize(Program* program, std::size_t* out) {
  return *out = program->made.size() + 7, 0;
}
int nvrtcGetCUBIN(Program* program, char* out) { return take("cubin " + program->made, out), 0; }
int nvrtcGetPTXSize(Program* program, std::size_t* out) {
  return *out = program->made.size() + 5, 0;
}
int nvrtcGetPTX(Program* program, char* out) { return take("ptx " + program->made, out), 0; }

}  // extern "C"
