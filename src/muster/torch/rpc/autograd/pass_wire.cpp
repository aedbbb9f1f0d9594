#include "muster/torch/rpc/autograd/pass_wire.h"

#include <utility>

#include "muster/rpc/wire.h"

namespace muster::rpc {
namespace {

constexpr size_t kMessageIdBytes = sizeof(int32_t) + sizeof(uint64_t);

void put_pass(Writer& out, int64_t context, const PassId& pass) {
  out.put(context).put<int32_t>(pass.initiator).put(pass.number);
}
Result<> get_pass(Reader& in, int64_t& context, PassId& pass) {
  MUSTER_ASSIGN(context, in.get<int64_t>());
  MUSTER_ASSIGN(pass.initiator, in.get<int32_t>());
  MUSTER_ASSIGN(pass.number, in.get<uint64_t>());
  return {};
}

void put_id(Writer& out, const MessageId& id) { out.put<int32_t>(id.sender).put(id.number); }
Result<MessageId> get_id(Reader& in) {
  MessageId id;
  MUSTER_ASSIGN(id.sender, in.get<int32_t>());
  MUSTER_ASSIGN(id.number, in.get<uint64_t>());
  return id;
}

Result<bool> get_bool(Reader& in) {
  MUSTER_ASSIGN(const auto value, in.get<uint8_t>());
  if (value > 1) return fail(ErrorCode::kProtocol, "a part of a backward pass has an invalid flag");
  return value == 1;
}

}  // namespace

Message encode(PassPart part) {
  Writer out;
  put_pass(out, part.context, part.pass);
  out.put<uint8_t>(part.retain_graph ? 1 : 0).put<uint8_t>(part.answer ? 1 : 0);
  Message message;
  if (part.answer) {
    put_id(out, part.answer->message);
    out.put_bytes(part.answer->gradients.head);
    message.segments = std::move(part.answer->gradients.segments);
  }
  out.put(static_cast<uint32_t>(part.expected.size()));
  for (const MessageId& id : part.expected) put_id(out, id);
  message.head = out.take();
  return message;
}

Result<PassPart> decode_part(const Message& message) {
  Reader in(message.head);
  PassPart part;
  MUSTER_TRY(get_pass(in, part.context, part.pass));
  MUSTER_ASSIGN(part.retain_graph, get_bool(in));
  MUSTER_ASSIGN(const bool has_answer, get_bool(in));
  if (has_answer) {
    MUSTER_ASSIGN(const MessageId id, get_id(in));
    MUSTER_ASSIGN(const ByteView head, in.get_bytes());
    part.answer.emplace(LocalGraph::Gradients{id, {{head.begin(), head.end()}, message.segments}});
  }
  MUSTER_ASSIGN(const auto count, in.get<uint32_t>());
  if (count > in.remaining() / kMessageIdBytes)
    return fail(ErrorCode::kProtocol, "a part of a backward pass is cut off");
  for (uint32_t i = 0; i < count; ++i) {
    MUSTER_ASSIGN(const MessageId id, get_id(in));
    part.expected.push_back(id);
  }
  MUSTER_TRY(in.finish());
  return part;
}

Message encode(const PassAbort& abort) {
  Writer out;
  put_pass(out, abort.context, abort.pass);
  out.put_bytes(encode_error(abort.why).head);
  return {out.take(), {}};
}

Result<PassAbort> decode_abort(const Message& message) {
  Reader in(message.head);
  PassAbort abort;
  MUSTER_TRY(get_pass(in, abort.context, abort.pass));
  MUSTER_ASSIGN(const ByteView error, in.get_bytes());
  MUSTER_ASSIGN(abort.why, parse_error({{error.begin(), error.end()}, {}}));
  MUSTER_TRY(in.finish());
  return abort;
}

}  // namespace muster::rpc
