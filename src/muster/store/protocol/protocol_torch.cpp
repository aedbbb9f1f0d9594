// PyTorch's TCPStore protocol of torch 2.11 to 2.15, checked against its clients byte by byte with use_libuv on and
// off. Numbers are little-endian; the first byte of a request is its operation:
//
//   request := 0 VALIDATE magic:u32(0x3C85F7CE)                first of all, no reply
//            | 1 SET key value                                  no reply
//            | 2 COMPARE_SET key expected:bytes desired:bytes   -> bytes
//            | 3 GET key                                        -> bytes, empty when missing
//            | 4 ADD key amount:i64                             -> i64
//            | 5 CHECK keys                                     -> u8: 0 ready, 1 not ready
//            | 6 WAIT keys                                      -> u8: 0 stop waiting
//            | 7 GETNUMKEYS                                     -> i64
//            | 8 DELETE_KEY key                                 -> i64
//            | 9 APPEND key value                               no reply
//            | 10 MULTI_GET keys                                -> bytes each, empty when missing
//            | 11 MULTI_SET count:u64 (key value)*              no reply
//            | 12 CANCEL_WAIT                                   -> u8: 1 wait canceled
//            | 13 PING nonce:u32                                -> the nonce
//            | 14 QUEUE_PUSH key value                          no reply
//            | 15 QUEUE_POP key                                 -> length before:i64, then bytes unless it was 0
//            | 16 QUEUE_LEN key                                 -> i64
//            | 17 LIST_KEYS                                     -> count:i64 bytes*
//            | 18 BARRIER key count:i64                         -> u8: 0 stop waiting
//   keys    := count:u64 key*
//   key, value, bytes := length:u64 u8[length]
//
// A client has one request at a time. It sends WAIT before GET, MULTI_GET and a blocking QUEUE_POP. The client measures
// the timeout itself, and sends CANCEL_WAIT to end a WAIT or BARRIER that took too long. The server confirms the
// cancellation at once. If the release of the wait crosses the cancellation, the server drops the release. The protocol
// has no error replies: the server closes the connection instead.

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "muster/store/protocol/protocol.h"
#include "muster/store/protocol/torch_request.h"

namespace muster {
namespace {

constexpr uint32_t kTorchMagic = 0x3C85F7CE;
constexpr uint8_t kStopWaiting = 0;
constexpr uint8_t kWaitCancelled = 1;

template <class T>
void put(Bytes& out, T value) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), p, p + sizeof(T));
}

void put_bytes(Bytes& out, ByteView bytes) {
  put(out, static_cast<uint64_t>(bytes.size()));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

class TorchProtocol : public Protocol {
 public:
  explicit TorchProtocol(Key prefix) : reader_(std::move(prefix)) {}

  void feed(ByteView bytes) override { reader_.feed(bytes); }
  bool midway() const override { return reader_.midway(); }

  Result<std::optional<Request>> next(Bytes& out) override {
    TorchRequest read;
    while (true) {
      MUSTER_ASSIGN(const bool whole, reader_.next(read));
      if (!whole) return std::nullopt;
      if (read.query == TorchRequest::kValidate && read.number != kTorchMagic) {
        return fail(ErrorCode::kProtocol,
                    fmt::format("a client sent {:#010x} instead of TCPStore's magic number", read.number));
      }
      if (!translate(read, out)) continue;  // answered here
      Request& request = read.request;
      if (request.operation != StoreOperation::kCancel) {
        request.id = next_id_++;
        outstanding_.push_back({request.id, request.operation});
        if (request.operation == StoreOperation::kWait || request.operation == StoreOperation::kBarrier)
          waiting_ = request.id;
      }
      return std::move(request);
    }
  }

  Result<> encode(const Reply& reply, Bytes& out) override {
    const auto found = find_outstanding(reply.id);
    if (found == outstanding_.end()) return {};  // the request was canceled
    const StoreOperation operation = found->operation;
    outstanding_.erase(found);
    MUSTER_TRY(reply.status);
    switch (operation) {
      case StoreOperation::kAdd:
      case StoreOperation::kNumKeys:
      case StoreOperation::kDelete:
      case StoreOperation::kQueueLength:
      case StoreOperation::kQueuePop:
        put(out, reply.number);
        [[fallthrough]];  // a pop has a value too, unless the queue was empty
      case StoreOperation::kGet:
      case StoreOperation::kCompareSet:
      case StoreOperation::kMultiGet:
        for (const Bytes& value : reply.values) put_bytes(out, value);
        return {};
      case StoreOperation::kCheck:
        put(out, static_cast<uint8_t>(reply.number == 0));
        return {};
      case StoreOperation::kWait:
      case StoreOperation::kBarrier:
        put(out, kStopWaiting);
        return {};
      case StoreOperation::kListKeys:
        put(out, static_cast<int64_t>(reply.keys.size()));
        for (const Key& key : reply.keys)
          put_bytes(out, as_bytes(key).subspan(std::min(reader_.prefix().size(), key.size())));
        return {};
      default:
        return {};  // no reply
    }
  }

 private:
  struct Outstanding {
    RequestId id;
    StoreOperation operation;
  };

  std::vector<Outstanding>::iterator find_outstanding(RequestId id) {
    const auto found = std::lower_bound(outstanding_.begin(), outstanding_.end(), id,
                                        [](const Outstanding& one, RequestId number) { return one.id < number; });
    return found == outstanding_.end() || found->id != id ? outstanding_.end() : found;
  }

  // Completes the request for the store. False if it was answered here.
  bool translate(TorchRequest& read, Bytes& out) {
    Request& request = read.request;
    if (read.query == TorchRequest::kPing) put(out, read.number);
    if (read.query == TorchRequest::kPing || read.query == TorchRequest::kValidate) return false;
    switch (request.operation) {
      case StoreOperation::kCancel:
        return cancel(request, out);
      case StoreOperation::kGet:
      case StoreOperation::kMultiGet:
      case StoreOperation::kQueuePop:
        request.immediate = true;
        return true;
      case StoreOperation::kNumKeys:
        if (!reader_.prefix().empty()) request.keys.push_back(reader_.prefix());
        return true;
      case StoreOperation::kListKeys:
        request.keys.push_back(reader_.prefix());
        return true;
      default:
        return true;
    }
  }

  bool cancel(Request& request, Bytes& out) {
    put(out, kWaitCancelled);
    const auto found = find_outstanding(waiting_);
    if (found == outstanding_.end()) return false;
    outstanding_.erase(found);
    request.id = waiting_;
    return true;
  }

  TorchRequestReader reader_;
  RequestId next_id_ = 1;
  RequestId waiting_ = 0;                 // the latest wait or barrier
  std::vector<Outstanding> outstanding_;  // few, in the order of their numbers
};

}  // namespace

std::unique_ptr<Protocol> torch_protocol(Key prefix) { return std::make_unique<TorchProtocol>(std::move(prefix)); }

}  // namespace muster
