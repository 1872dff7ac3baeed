// SPDX-License-Identifier: Apache-2.0
// Methods that the engine calls on the Python object of a group, a Communicator: one list.
#pragma once

#include <string>
#include <vector>

namespace commrt::group_methods {

// Raises the error that a group says of itself where it is closed, broken or another process's.
inline constexpr char kCheckUsable[] = "check_usable";
inline constexpr char kCheckProcess[] = "check_process";
// Arguments that are not plain.
inline constexpr char kCheckTimeout[] = "_check_timeout";
inline constexpr char kStreamOnHost[] = "_stream_on_host";
// Calls that the engine does not know.
inline constexpr char kCall[] = "_call";
// Errors in words.
inline constexpr char kOperationError[] = "operation_error";
inline constexpr char kTimedOut[] = "timed_out";
inline constexpr char kWhoIsMissing[] = "who_is_missing";
// Buckets of an open comm.fused().
inline constexpr char kPlanBucket[] = "_plan_bucket";
inline constexpr char kBucketFull[] = "_bucket_full";
inline constexpr char kCutBucket[] = "_cut_bucket";
inline constexpr char kAwaitCut[] = "_await_cut";
// An attribute: what calls on device arrays ask.
inline constexpr char kDevices[] = "devices";

inline std::vector<std::string> names() {
  return {kCheckUsable, kCheckProcess, kCheckTimeout, kStreamOnHost, kCall,
          kOperationError, kTimedOut, kWhoIsMissing, kPlanBucket, kBucketFull,
          kCutBucket, kAwaitCut, kDevices};
}

}  // namespace commrt::group_methods
