// SPDX-License-Identifier: Apache-2.0
// Work that goes on by itself, and that the engine only looks at in its passes: who ends it is a
// device. It needs to be seen that it ended, came too late, or failed.
#pragma once

#include <string>

namespace commrt {

class Watched {
 public:
  virtual ~Watched() = default;
  // One look; true if anything has changed. Of several threads one at a time. Takes no lock that
  // anybody holds while it waits for a peer or the device.
  virtual bool look() = 0;
  // What is under way that the host has not seen the end of.
  virtual int outstanding() const = 0;
  // The communicator goes away: nothing of it may be touched any more.
  virtual void abandon() = 0;
};

}  // namespace commrt
