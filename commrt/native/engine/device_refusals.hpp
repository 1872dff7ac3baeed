// SPDX-License-Identifier: Apache-2.0
// Refused calls whose others are on devices: all ranks make such a call, and nobody takes its result.
//
// A device gives no call back, and what waits there matches calls by their order. So the rank that has
// refused such a call makes it all the same, with memory of its own: a stand-in.
//
// - The rank asks all others what they have made of its next number, and begins no other operation of
//   the communicator until it knows.
// - A rank that has given the call to its device marks it as refused, and answers with what describes
//   it. One that has not come so far answers when it does.
// - A rank that makes a call of another kind, or waits for others in a meeting, says that. The rank that
//   has asked then refuses its call as any other (refusals.hpp).
// - Once all have said that they have given the call to their devices, or have refused it as well, those
//   that have refused it make their stand-ins. None is made where nobody has given it.
//
// A stand-in begins only when each rank with the call on its device has marked it. So no rank takes the
// bytes for a result, and all are in step whatever runs the call. A right call pays for a note.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace commrt {

class Comm;

class DeviceRefusals {
 public:
  // Another rank makes a call by them; Python writes and reads them. Null: none can make it.
  using Words = std::shared_ptr<const std::string>;
  enum class Part : uint8_t { Unheard, Refused, Given, Elsewhere };
  struct Said {
    Part part = Part::Unheard;
    std::string words;
  };

  explicit DeviceRefusals(Comm& comm) : comm_(comm) {}

  // A device is given operation `seq`. With `is_quiet` nobody asks for its end: the program hears in its
  // next call that others have refused it.
  void note(uint64_t seq, Words words, bool is_quiet);
  // This rank refuses its next operation, and asks the others about it.
  void ask(const std::string& reason);
  // By rank, all that the others have said to that.
  const std::vector<Said>& said() const { return said_; }
  // Nothing is asked any more.
  void end_question();
  // This rank waits for others that come to its next operation, which no device is given yet.
  void wait_elsewhere();
  // A rank has refused its operation `seq`, and asks; or answers.
  void hear_question(int rank, uint64_t seq, const std::string& reason);
  void hear_answer(int rank, uint64_t seq, Part part, std::string words);
  // Answers what can be answered.
  void look();
  bool is_busy() const { return !asked_.empty(); }

  // Says once why others have refused an operation that a device has done; empty: they have not.
  std::string take_refused(uint64_t seq);
  // A call that nobody asks for any more has failed by that; `why` is for the program's next call.
  void leave_untold(uint64_t seq, const std::string& why);
  void has_told(uint64_t seq);
  // Returns what the program has to be told of such calls, by their numbers, once.
  std::map<uint64_t, std::string> take_untold();

 private:
  struct Given {
    uint64_t seq = ~uint64_t{0};
    Words words;
    bool is_quiet = false;
  };
  struct Asked {
    int rank;
    uint64_t seq;
    std::string reason;
  };

  void answer(const Asked& one);
  const Given* find(uint64_t seq) const;

  static constexpr uint64_t kKept = 64;
  static constexpr std::size_t kMostReason = 1000;
  Comm& comm_;
  std::array<Given, kKept> given_;
  uint64_t num_given_ = 0;
  std::optional<uint64_t> asking_;
  std::vector<Said> said_;
  std::vector<Asked> asked_;                  // of operations that this rank has not come to
  std::map<uint64_t, std::string> refused_;   // of these it is on this rank's device
  std::mutex telling_;                        // guards what follows
  std::map<uint64_t, std::string> untold_;
  std::atomic<bool> has_refused_{false};
};

}  // namespace commrt
