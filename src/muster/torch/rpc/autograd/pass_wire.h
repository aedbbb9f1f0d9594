#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/rpc/backward_pass.h"
#include "muster/torch/rpc/autograd/pass_runner.h"

/// The arguments of the functions of a backward pass. Numbers are little-endian.
///
///   part   := pass retain_graph:u8 has_answer:u8 [ message gradients:bytes ] count:u32 message[count]
///   abort  := pass error:bytes (rpc/wire.h)
///   pass   := context:i64 initiator:i32 number:u64       message := sender:i32 number:u64
///   bytes  := length:u32 byte[length]
///
/// The segments of a part are those of the gradients (write_gradients()). The result of a part is empty, or a part.
namespace muster::rpc {

struct PassPart {
  int64_t context = 0;
  PassId pass;
  bool retain_graph = false;
  std::optional<LocalGraph::Gradients> answer;
  std::vector<MessageId> expected;
};
Message encode(PassPart part);
Result<PassPart> decode_part(const Message& message);

struct PassAbort {
  int64_t context = 0;
  PassId pass;
  CallError why;
};
Message encode(const PassAbort& abort);
Result<PassAbort> decode_abort(const Message& message);

}  // namespace muster::rpc
