// SPDX-License-Identifier: Apache-2.0
// A libnvrtc for the driver on the host (tests/support/cuda_on_host): it compiles nothing, as
// tests/support/kernels_on_cpu.py has compiled all of commrt's kernels into one library before.
// What it makes of a module names this library, and the kernels that the module's text has.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <string>

#define CALL extern "C" __attribute__((visibility("default")))

namespace {

enum : int { kOk = 0, kInvalidInput = 3, kInvalidOption = 5, kCompilation = 6 };

struct Program {
  std::string source, made, log;
};

int put(const std::string& text, char* out) {
  std::memcpy(out, text.c_str(), text.size() + 1);
  return kOk;
}

}  // namespace

CALL int nvrtcVersion(int* major, int* minor) {
  *major = 12, *minor = 8;
  return kOk;
}
CALL const char* nvrtcGetErrorString(int result) {
  return result == kOk            ? "NVRTC_SUCCESS"
         : result == kCompilation ? "NVRTC_ERROR_COMPILATION"
                                  : "NVRTC_ERROR_INVALID_INPUT";
}
CALL int nvrtcGetNumSupportedArchs(int* count) {
  *count = 4;
  return kOk;
}
CALL int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 75, archs[1] = 80, archs[2] = 90, archs[3] = 100;
  return kOk;
}
CALL int nvrtcCreateProgram(Program** out, const char* source, const char*, int num_headers,
                            const char* const*, const char* const*) {
  if (num_headers) return kInvalidInput;
  *out = new Program{source, "", ""};
  return kOk;
}
CALL int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kOk;
}
CALL int nvrtcCompileProgram(Program* program, int, const char* const*) {
  const char* const library = std::getenv("CUDA_ON_HOST_KERNELS");
  if (!library) {
    program->log = "CUDA_ON_HOST_KERNELS does not name the library of the kernels";
    return kCompilation;
  }
  program->made = std::string("commrt's kernels on the host\n") + library + "\n";
  static const std::regex kernel("^COMMRT_KERNEL (\\w+)\\(");
  std::size_t begin = 0;
  while (begin < program->source.size()) {
    const std::size_t end = std::min(program->source.find('\n', begin), program->source.size());
    const std::string line = program->source.substr(begin, end - begin);
    std::smatch found;
    if (std::regex_search(line, found, kernel)) program->made += found[1].str() + "\n";
    begin = end + 1;
  }
  return kOk;
}
CALL int nvrtcGetProgramLogSize(Program* program, std::size_t* out) {
  *out = program->log.size() + 1;
  return kOk;
}
CALL int nvrtcGetProgramLog(Program* program, char* out) { return put(program->log, out); }
CALL int nvrtcGetCUBINSize(Program* program, std::size_t* out) {
  *out = program->made.size() + 1;
  return kOk;
}
CALL int nvrtcGetCUBIN(Program* program, char* out) { return put(program->made, out); }
CALL int nvrtcGetPTXSize(Program* program, std::size_t* out) {
  return nvrtcGetCUBINSize(program, out);
}
CALL int nvrtcGetPTX(Program* program, char* out) { return put(program->made, out); }
