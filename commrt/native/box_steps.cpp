// SPDX-License-Identifier: Apache-2.0
// What running an instruction between boxes and a message means.
#include "comm.hpp"

namespace commrt {

// One message holds the values of its boxes one after another.
void Op::pack_boxes(const Instr& ins, unsigned char* to, bool streaming) const {
  const Ref& source = ins.inputs[0];
  const auto& boxes = plan->spaces[source.space].boxes;
  for (int i = source.lo; i < source.hi; ++i) {
    pack_box(to, array_of(boxes[i]), boxes[i], streaming);
    to += boxes[i].nbytes;
  }
}

// `slot` is where the value is written for shared-memory peers, or null.
void Op::move_boxes(const Instr& ins, const unsigned char* const* messages,
                    unsigned char* slot) {
  if (ins.local_outs.empty()) {
    if (slot != nullptr) pack_boxes(ins, slot, streams_second(store));
    return;
  }
  const Ref& target = ins.local_outs[0];
  const auto& boxes = plan->spaces[target.space].boxes;
  const Ref& source = ins.inputs[0];
  const bool combines = ins.inputs.size() > 1;
  const unsigned char* message = source.is_message ? messages[0] : nullptr;
  for (int i = target.lo; i < target.hi; ++i) {
    const Box& box = boxes[i];
    unsigned char* const array = array_of(box);
    if (message != nullptr) {
      (combines ? combine_box : unpack_box)(array, box, message);
      message += box.nbytes;
    } else {
      const Box& from = boxes[source.lo + (i - target.lo)];
      (combines ? combine_boxes : copy_box)(array, box, array_of(from), from);
    }
  }
}

}  // namespace commrt
