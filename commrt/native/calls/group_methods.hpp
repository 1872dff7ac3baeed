// SPDX-License-Identifier: Apache-2.0
// Two lists of Python methods that the engine calls: those of a group (a Communicator), and those
// of its service that sends buckets.
#pragma once

#include <string>
#include <vector>

namespace commrt::group_methods {

// Raises the error that a group says of itself where it is closed, broken or another process's.
inline constexpr char kCheckUsable[] = "check_usable";
inline constexpr char kCheckProcess[] = "check_process";
// Calls what looks at the values of a bound call, and refuses the call where that raises.
inline constexpr char kCheckBound[] = "check_bound";
// Raises an error where an array of a bound collective has other memory.
inline constexpr char kCheckPlaces[] = "check_places";
// Raises an error where a bound call would send NaN or infinity.
inline constexpr char kRefuseNotFinite[] = "refuse_not_finite";
// Arguments that are not plain.
inline constexpr char kCheckTimeout[] = "_check_timeout";
inline constexpr char kStreamOnHost[] = "_stream_on_host";
// Calls that the engine does not know.
inline constexpr char kCall[] = "_call";
// Errors of a call that has not begun.
inline constexpr char kRefuseCall[] = "refuse_call";
// Takes the place of a call that is refused, in the order of calls, whatever compares them.
inline constexpr char kRefuse[] = "refuse";
inline constexpr char kCheckFailed[] = "check_failed";
// Errors in words.
inline constexpr char kOperationError[] = "operation_error";
inline constexpr char kChangedInFlight[] = "changed_in_flight";
inline constexpr char kTimedOut[] = "timed_out";
inline constexpr char kWhoIsMissing[] = "who_is_missing";
// An attribute: what calls on device arrays ask.
inline constexpr char kDevices[] = "devices";
// An attribute: the service that has the methods of fusion_methods.
inline constexpr char kFusion[] = "fusion";

inline std::vector<std::string> names() {
  return {kCheckUsable, kCheckProcess, kCheckBound, kCheckPlaces, kRefuseNotFinite, kCheckTimeout, kStreamOnHost, kCall, kRefuseCall, kRefuse, kCheckFailed,
          kOperationError, kChangedInFlight, kTimedOut, kWhoIsMissing, kDevices, kFusion};
}

}  // namespace commrt::group_methods

// Methods of an open comm.fused(). A call that only goes into a bucket uses none of them.
namespace commrt::fusion_methods {

inline constexpr char kPlanBucket[] = "plan_bucket";
inline constexpr char kBucketFull[] = "bucket_full";
inline constexpr char kCutBucket[] = "cut_bucket";
inline constexpr char kAwaitCut[] = "await_cut";
inline constexpr char kRefuseBucket[] = "refuse_bucket";
inline constexpr char kRaiseLost[] = "raise_lost";

inline std::vector<std::string> names() {
  return {kPlanBucket, kBucketFull, kCutBucket, kAwaitCut, kRefuseBucket, kRaiseLost};
}

}  // namespace commrt::fusion_methods
