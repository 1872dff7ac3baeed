// SPDX-License-Identifier: Apache-2.0
// Runs instructions between boxes and messages.
#include "engine/comm.hpp"

namespace commrt {

// One message holds the values of its boxes one after another.
void Op::pack_boxes(const Instr& ins, unsigned char* to, bool streaming) const {
  const Ref& source = ins.inputs[0];
  const auto& boxes = plan->spaces[source.space].boxes;
  for (int i = source.lo; i < source.hi; ++i) {
    const Box& box = boxes[i];
    if (i + 1 < source.hi && are_twins(box, boxes[i + 1])) {
      pack_twins(to, array_of(box), box, boxes[i + 1], streaming);
      to += box.nbytes;
      ++i;
    } else {
      pack_box(to, array_of(box), box, streaming);
    }
    to += box.nbytes;
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
  const Box* const boxes = plan->spaces[target.space].boxes.data();  // null where there are none
  const Ref& source = ins.inputs[0];
  const bool combines = ins.inputs.size() > 1;
  if (source.is_message) {
    unpack_boxes(boxes + target.lo, target.hi - target.lo, messages[0], combines);
  } else {
    copy_boxes(boxes + target.lo, target.hi - target.lo, boxes + source.lo, combines);
  }
}

void Op::unpack_boxes(const Box* boxes, int count, const unsigned char* message,
                      bool combines) const {
  for (int i = 0; i < count; ++i) {
    const Box& box = boxes[i];
    if (combines) {
      combine_box(array_of(box), box, message);
    } else if (i + 1 < count && are_twins(box, boxes[i + 1])) {
      unpack_twins(array_of(box), box, boxes[++i], message);
      message += box.nbytes;
    } else {
      unpack_box(array_of(box), box, message);
    }
    message += box.nbytes;
  }
}

void Op::copy_boxes(const Box* boxes, int count, const Box* from, bool combines) const {
  for (int i = 0; i < count; ++i) {
    unsigned char* const array = array_of(boxes[i]);
    const unsigned char* const from_array = array_of(from[i]);
    if (combines) {
      combine_boxes(array, boxes[i], from_array, from[i]);
    } else if (i + 1 < count && are_twins(boxes[i], boxes[i + 1]) &&
               are_twins(from[i], from[i + 1])) {
      copy_twins(array, boxes[i], boxes[i + 1], from_array, from[i], from[i + 1]);
      ++i;
    } else {
      copy_box(array, boxes[i], from_array, from[i]);
    }
  }
}

}  // namespace commrt
