// SPDX-License-Identifier: Apache-2.0
// Messages of an operation that go over MPI, until they have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/call_mark.hpp"
#include "engine/mpi_api.hpp"

namespace commrt {

struct MpiEnd {  // how a receive has ended
  bool known = false;
  bool may_be_cancelled = false;
  bool cancelled = false;
  int code = 0;        // of MPI_Test
  int count_code = 0;  // of MPI_Get_count
  int count = -1;
};

bool has_ended(const MpiApi& api, MpiRequest& request, MpiEnd& end);

struct MpiInput {  // one message of an instruction that comes over MPI
  MpiRequest request;
  MpiEnd end;
  size_t index = 0;  // of the instruction's inputs
  bool posted = false, done = false;
  bool is_empty = false;  // its sender has left the call
  MpiRequest stamp_request;  // of the stamp before it; `stamp` is null where there is none
  MpiEnd stamp_end;
  std::unique_ptr<Stamp> stamp;
  bool stamp_posted = false, stamp_done = false;
  std::unique_ptr<unsigned char[]> staging;  // null: received where it belongs
};

struct MpiStep {  // an instruction with MPI's messages, until it has run
  std::vector<MpiInput> inputs;
  std::vector<unsigned char*> sources;  // per input of the instruction
};

struct MpiSend {  // a message on its way; nothing but the end of the operation waits for it
  MpiRequest request;
  int peer = 0;
  int64_t fragment = 0;
  std::unique_ptr<unsigned char[]> staging;  // null: sent from where it lies
};

}  // namespace commrt
