#include "store/torch_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "muster/base/bytes.h"

namespace muster {
namespace {

constexpr Duration kAnswerTime = 60s;  // for answers that a live server gives at once

uint8_t code_of(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kSet:
      return 1;
    case StoreOperation::kCompareSet:
      return 2;
    case StoreOperation::kGet:
      return 3;
    case StoreOperation::kAdd:
      return 4;
    case StoreOperation::kCheck:
      return 5;
    case StoreOperation::kWait:
      return 6;
    case StoreOperation::kNumKeys:
      return 7;
    case StoreOperation::kDelete:
      return 8;
    case StoreOperation::kAppend:
      return 9;
    case StoreOperation::kMultiGet:
      return 10;
    case StoreOperation::kMultiSet:
      return 11;
    case StoreOperation::kQueuePush:
      return 14;
    case StoreOperation::kQueuePop:
      return 15;
    case StoreOperation::kQueueLength:
      return 16;
    case StoreOperation::kListKeys:
      return 17;
    case StoreOperation::kBarrier:
      return 18;
    default:
      return 0;
  }
}

void put_text(Writer& out, ByteView bytes) { out.put(uint64_t{bytes.size()}).put_raw(bytes); }

bool takes_list(StoreOperation operation) {
  return operation == StoreOperation::kCheck || operation == StoreOperation::kWait ||
         operation == StoreOperation::kMultiGet || operation == StoreOperation::kMultiSet;
}

}  // namespace

Bytes torch_hello() { return Writer().put(uint8_t{0}).put(uint32_t{0x3C85F7CE}).take(); }

std::optional<Bytes> torch_request(const Request& request) {
  const uint8_t code = code_of(request.operation);
  if (code == 0) return std::nullopt;
  Writer out;
  out.put(code);
  if (request.operation == StoreOperation::kListKeys || request.operation == StoreOperation::kNumKeys)
    return out.take();
  if (takes_list(request.operation)) out.put(uint64_t{request.keys.size()});
  for (size_t i = 0; i < request.keys.size(); ++i) {
    put_text(out, as_bytes(request.keys[i]));
    if (request.operation == StoreOperation::kMultiSet) put_text(out, request.values[i]);
  }
  if (request.operation == StoreOperation::kAdd || request.operation == StoreOperation::kBarrier)
    out.put(request.number);
  if (request.operation == StoreOperation::kMultiSet) return out.take();
  for (const Bytes& value : request.values) put_text(out, value);
  return out.take();
}

bool torch_answers(StoreOperation operation) {
  return operation != StoreOperation::kSet && operation != StoreOperation::kAppend &&
         operation != StoreOperation::kMultiSet && operation != StoreOperation::kQueuePush;
}

TorchClient::TorchClient(const Address& address) : fd_(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  connected_ = connect(fd_.get(), address.raw(), address.raw_length()) == 0;
  send(torch_hello());
}

void TorchClient::send(ByteView bytes) {
  while (connected_ && !bytes.empty()) {
    const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    connected_ = n > 0;
    if (connected_) bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

bool TorchClient::receive(void* into, size_t count, const Deadline& deadline) {
  auto* at = static_cast<uint8_t*>(into);
  while (connected_ && count > 0) {
    pollfd poll{fd_.get(), POLLIN, 0};
    if (::poll(&poll, 1, deadline.poll_timeout_ms()) == 0) return false;
    const ssize_t n = recv(fd_.get(), at, count, 0);
    if (n < 0 && errno == EINTR) continue;
    connected_ = n > 0;
    if (!connected_) return false;
    at += n;
    count -= static_cast<size_t>(n);
  }
  return connected_;
}

template <class T>
T TorchClient::get(const Deadline& deadline) {
  T value{};
  if (!receive(&value, sizeof value, deadline)) connected_ = false;
  return value;
}

Bytes TorchClient::get_bytes(const Deadline& deadline) {
  Bytes bytes(get<uint64_t>(deadline) & 0xffffff);
  if (!receive(bytes.data(), bytes.size(), deadline)) connected_ = false;
  return bytes;
}

Reply TorchClient::read_reply(const Request& request, const Deadline& deadline) {
  Reply reply{0, request.id};
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kCompareSet:
      reply.values = {get_bytes(deadline)};
      break;
    case StoreOperation::kMultiGet:
      for (size_t i = 0; i < request.keys.size(); ++i) reply.values.push_back(get_bytes(deadline));
      break;
    case StoreOperation::kCheck:
      reply.number = get<uint8_t>(deadline) == 0;
      break;
    case StoreOperation::kQueuePop:
      reply.number = get<int64_t>(deadline);
      if (reply.number > 0) reply.values = {get_bytes(deadline)};
      break;
    case StoreOperation::kListKeys:
      for (auto left = get<int64_t>(deadline); connected_ && left > 0; --left) {
        reply.keys.push_back(to_string(get_bytes(deadline)));
      }
      break;
    default:
      reply.number = get<int64_t>(deadline);
  }
  return reply;
}

TorchClient::Outcome TorchClient::wait(const Request& request, const Deadline& deadline) {
  uint8_t word = 0;
  if (!receive(&word, 1, deadline)) {
    if (!connected_) return {.lost = true};
    send(Bytes{kTorchCancelWait});
    word = get<uint8_t>(Deadline::after(kAnswerTime));
    if (!connected_) return {.lost = true};
    if (word == 1) return {.withdrawn = true};
    get<uint8_t>(Deadline::after(kAnswerTime));  // the release crossed the cancellation, whose confirmation follows
  }
  return {.reply = Reply{0, request.id}};
}

TorchClient::Outcome TorchClient::call(const Request& request, const Deadline& deadline) {
  send(*torch_request(request));
  if (request.operation == StoreOperation::kWait || request.operation == StoreOperation::kBarrier)
    return wait(request, deadline);
  const Deadline answer = Deadline::after(kAnswerTime);
  Reply reply{0, request.id};
  if (torch_answers(request.operation)) {
    reply = read_reply(request, answer);
  } else {
    const Request probe{StoreOperation::kQueueLength, 0, {"no such queue"}};
    send(*torch_request(probe));
    read_reply(probe, answer);
  }
  if (!connected_) return {.lost = true};
  return {.reply = std::move(reply)};
}

}  // namespace muster
