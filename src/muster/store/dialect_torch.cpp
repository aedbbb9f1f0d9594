// PyTorch's TCPStore protocol, as its clients of torch 2.11 to 2.13 speak it (checked against them byte by byte, with
// use_libuv on and off). Numbers are little-endian; the first byte of a request is its operation:
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
//            | 12 CANCEL_WAIT                                   -> u8: 1 wait cancelled
//            | 13 PING nonce:u32                                -> the nonce
//            | 14 QUEUE_PUSH key value                          no reply
//            | 15 QUEUE_POP key                                 -> length before:i64, then bytes unless it was 0
//            | 16 QUEUE_LEN key                                 -> i64
//            | 17 LIST_KEYS                                     -> count:i64 bytes*
//            | 18 BARRIER key count:i64                         -> u8: 0 stop waiting
//   keys    := count:u64 key*
//   key, value, bytes := length:u64 u8[length]
//
// A client waits for one thing at a time: it sends WAIT before GET, MULTI_GET and a blocking QUEUE_POP, keeps the
// time itself, and ends a WAIT or a BARRIER that took too long with CANCEL_WAIT. The cancellation is confirmed at once;
// a release that crosses it is swallowed. The protocol has no errors: a request that fails costs the connection.

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "muster/store/dialect.h"
#include "muster/store/messages.h"

namespace muster {
namespace {

constexpr size_t kKeptCapacity = 512;  // of an idle client's buffer
constexpr uint32_t kMagic = 0x3C85F7CE;
constexpr uint8_t kStopWaiting = 0;
constexpr uint8_t kWaitCancelled = 1;

enum class Query : uint8_t {
  kValidate,
  kSet,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kGetNumKeys,
  kDeleteKey,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancelWait,
  kPing,
  kQueuePush,
  kQueuePop,
  kQueueLength,
  kListKeys,
  kBarrier,
};

// Reads one request from the bytes that are there. take() and its kin return false when the bytes do not reach, and
// wanted() then says how many would; or when a length is over its cap, and error() then says which.
class Cursor {
 public:
  Cursor(ByteView bytes, const Key& prefix) : bytes_(bytes), prefix_(prefix) {}

  template <class T>
  bool take(T& value) {
    if (!reach(sizeof(T))) return false;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return true;
  }
  bool take_key(Request& request) {
    ByteView view;
    if (!take_counted(view, kMaxKeyBytes, "a key")) return false;
    Key& key = request.keys.emplace_back();
    key.reserve(prefix_.size() + view.size());
    key.append(prefix_).append(reinterpret_cast<const char*>(view.data()), view.size());
    return true;
  }
  bool take_value(Request& request) {
    ByteView view;
    if (!take_counted(view, kMaxValueBytes, "a value")) return false;
    request.values.emplace_back(view.begin(), view.end());
    return true;
  }
  bool take_count(uint64_t& count) { return take(count) && within(count, kMaxKeysPerRequest, "a list of keys"); }
  bool take_keys(Request& request) {
    uint64_t count = 0;
    if (!take_count(count)) return false;
    while (count > 0 && take_key(request)) --count;
    return count == 0;
  }

  size_t position() const { return position_; }
  size_t wanted() const { return wanted_; }
  const std::string& error() const { return error_; }

 private:
  bool take_counted(ByteView& view, size_t cap, const char* what) {
    uint64_t length = 0;
    if (!take(length) || !within(length, cap, what) || !reach(length)) return false;
    view = bytes_.subspan(position_, length);
    position_ += length;
    return true;
  }
  bool within(uint64_t length, uint64_t cap, const char* what) {
    if (length > cap) error_ = fmt::format("announces {} of length {}, the limit is {}", what, length, cap);
    return error_.empty();
  }
  bool reach(size_t count) {
    wanted_ = position_ + count;
    return within(wanted_, kMaxMessageBytes, "a request") && wanted_ <= bytes_.size();
  }

  ByteView bytes_;
  const Key& prefix_;
  size_t position_ = 0;
  size_t wanted_ = 0;
  std::string error_;
};

template <class T>
void put(Bytes& out, T value) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), p, p + sizeof(T));
}

void put_bytes(Bytes& out, ByteView bytes) {
  put(out, static_cast<uint64_t>(bytes.size()));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

class TorchDialect : public Dialect {
 public:
  explicit TorchDialect(Key prefix) : prefix_(std::move(prefix)) {}

  void feed(ByteView bytes) override {
    if (consumed_ > 0 && (consumed_ == buffer_.size() || buffer_.size() + bytes.size() > buffer_.capacity())) {
      buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<ptrdiff_t>(consumed_));
      consumed_ = 0;
    }
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }

  Result<std::optional<Request>> next(Bytes& out) override {
    while (buffer_.size() - consumed_ >= wanted_) {
      Cursor cursor(ByteView(buffer_).subspan(consumed_), prefix_);
      Request request;
      const bool whole = parse(cursor, request, out);
      if (!cursor.error().empty()) return fail(ErrorCode::kProtocol, "a TCPStore client " + cursor.error());
      if (!protocol_error_.empty()) return fail(ErrorCode::kProtocol, protocol_error_);
      wanted_ = whole ? 1 : cursor.wanted();
      if (!whole) return std::nullopt;
      consumed_ += cursor.position();
      if (request.operation == Operation{}) continue;  // answered here
      if (request.operation != Operation::kCancel) {
        request.id = next_id_++;
        outstanding_.push_back({request.id, request.operation});
        if (request.operation == Operation::kWait || request.operation == Operation::kBarrier) waiting_ = request.id;
      }
      return request;
    }
    if (consumed_ == buffer_.size() && buffer_.capacity() > kKeptCapacity) {
      Bytes().swap(buffer_);
      consumed_ = 0;
    }
    return std::nullopt;
  }

  Result<> encode(const Reply& reply, Bytes& out) override {
    const auto found = find_outstanding(reply.id);
    if (found == outstanding_.end()) return {};  // cancelled
    const Operation operation = found->operation;
    outstanding_.erase(found);
    MUSTER_TRY(reply.status);
    switch (operation) {
      case Operation::kGet:
      case Operation::kCompareSet:
      case Operation::kMultiGet:
        for (const Bytes& value : reply.values) put_bytes(out, value);
        return {};
      case Operation::kAdd:
      case Operation::kNumKeys:
      case Operation::kDelete:
      case Operation::kQueueLength:
        put(out, reply.number);
        return {};
      case Operation::kCheck:
        put(out, static_cast<uint8_t>(reply.number == 0));
        return {};
      case Operation::kWait:
      case Operation::kBarrier:
        put(out, kStopWaiting);
        return {};
      case Operation::kQueuePop:
        put(out, reply.number);
        for (const Bytes& value : reply.values) put_bytes(out, value);
        return {};
      case Operation::kListKeys:
        put(out, static_cast<int64_t>(reply.keys.size()));
        for (const Key& key : reply.keys) put_bytes(out, as_bytes(key).subspan(std::min(prefix_.size(), key.size())));
        return {};
      default:
        return {};  // no reply
    }
  }

 private:
  struct Outstanding {
    RequestId id;
    Operation operation;
  };

  std::vector<Outstanding>::iterator find_outstanding(RequestId id) {
    const auto found = std::lower_bound(outstanding_.begin(), outstanding_.end(), id,
                                        [](const Outstanding& one, RequestId number) { return one.id < number; });
    return found == outstanding_.end() || found->id != id ? outstanding_.end() : found;
  }

  // True when the request is whole. One that the dialect answers by itself keeps no operation.
  bool parse(Cursor& in, Request& request, Bytes& out) {
    Query query{};
    if (!in.take(query)) return false;
    if (!validated_ && query != Query::kValidate) {
      protocol_error_ = "a client does not begin as a TCPStore client does; it is none, or older than torch 2.0";
      return false;
    }
    switch (query) {
      case Query::kValidate:
        return parse_validate(in);
      case Query::kPing:
        return parse_ping(in, out);
      case Query::kCancelWait:
        cancel(request, out);
        return true;
      case Query::kSet:
        return parse_key_value(in, request, Operation::kSet);
      case Query::kAppend:
        return parse_key_value(in, request, Operation::kAppend);
      case Query::kQueuePush:
        return parse_key_value(in, request, Operation::kQueuePush);
      case Query::kCompareSet:
        return parse_key_value(in, request, Operation::kCompareSet) && in.take_value(request);
      case Query::kGet:
        return parse_key(in, request, Operation::kGet);
      case Query::kDeleteKey:
        return parse_key(in, request, Operation::kDelete);
      case Query::kQueuePop:
        return parse_key(in, request, Operation::kQueuePop);
      case Query::kQueueLength:
        return parse_key(in, request, Operation::kQueueLength);
      case Query::kAdd:
        return parse_key(in, request, Operation::kAdd) && in.take(request.number);
      case Query::kBarrier:
        return parse_key(in, request, Operation::kBarrier) && in.take(request.number);
      case Query::kCheck:
        return parse_keys(in, request, Operation::kCheck);
      case Query::kWait:
        return parse_keys(in, request, Operation::kWait);
      case Query::kMultiGet:
        return parse_keys(in, request, Operation::kMultiGet);
      case Query::kMultiSet:
        return parse_multi_set(in, request);
      case Query::kGetNumKeys:
        request.operation = Operation::kNumKeys;
        if (!prefix_.empty()) request.keys.push_back(prefix_);
        return true;
      case Query::kListKeys:
        request.operation = Operation::kListKeys;
        request.keys.push_back(prefix_);
        return true;
    }
    protocol_error_ =
        fmt::format("a TCPStore client asks for operation {}, which torch 2.13 does not have", static_cast<int>(query));
    return false;
  }

  bool parse_validate(Cursor& in) {
    uint32_t magic = 0;
    if (!in.take(magic)) return false;
    validated_ = magic == kMagic;
    if (!validated_) protocol_error_ = fmt::format("a client shows {:#010x} instead of TCPStore's magic number", magic);
    return validated_;
  }

  static bool parse_ping(Cursor& in, Bytes& out) {
    uint32_t nonce = 0;
    if (!in.take(nonce)) return false;
    put(out, nonce);
    return true;
  }

  void cancel(Request& request, Bytes& out) {
    put(out, kWaitCancelled);
    const auto found = find_outstanding(waiting_);
    if (found == outstanding_.end()) return;
    outstanding_.erase(found);
    request.operation = Operation::kCancel;
    request.id = waiting_;
  }

  static bool parse_key(Cursor& in, Request& request, Operation operation) {
    request.operation = operation;
    request.immediate = operation == Operation::kGet || operation == Operation::kQueuePop;
    return in.take_key(request);
  }

  static bool parse_key_value(Cursor& in, Request& request, Operation operation) {
    return parse_key(in, request, operation) && in.take_value(request);
  }

  static bool parse_keys(Cursor& in, Request& request, Operation operation) {
    request.operation = operation;
    request.immediate = operation == Operation::kMultiGet;
    return in.take_keys(request);
  }

  static bool parse_multi_set(Cursor& in, Request& request) {
    request.operation = Operation::kMultiSet;
    uint64_t count = 0;
    if (!in.take_count(count)) return false;
    while (count > 0 && in.take_key(request) && in.take_value(request)) --count;
    return count == 0;
  }

  const Key prefix_;
  Bytes buffer_;
  size_t consumed_ = 0;
  size_t wanted_ = 1;  // bytes without which another attempt is in vain
  bool validated_ = false;
  std::string protocol_error_;
  RequestId next_id_ = 1;
  RequestId waiting_ = 0;                 // the latest wait or barrier
  std::vector<Outstanding> outstanding_;  // few, in the order of their numbers
};

}  // namespace

std::unique_ptr<Dialect> torch_dialect(Key prefix) { return std::make_unique<TorchDialect>(std::move(prefix)); }

}  // namespace muster
