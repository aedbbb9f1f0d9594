#pragma once

#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// What a client of PyTorch's TCPStore asks for: the first byte of its requests. The grammar heads protocol_torch.cpp.
enum class TorchQuery : uint8_t {
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

struct TorchRequest {
  TorchQuery query{};
  Request request{};    ///< keys, values and number as they came, each key after the prefix
  uint32_t number = 0;  ///< validate: the magic number; ping: the nonce
};

/// Cuts a client's bytes into requests, of which the first must be a validate. A list is read item by item as it comes,
/// so that however a request is cut, each of its bytes is looked at about once. Not thread-safe.
class TorchRequestReader {
 public:
  explicit TorchRequestReader(Key prefix) : prefix_(std::move(prefix)) {}
  void feed(ByteView bytes);
  /// True when `out` holds the next whole request, false when more bytes are needed; kProtocol for what the grammar
  /// does not allow.
  Result<bool> next(TorchRequest& out);
  const Key& prefix() const { return prefix_; }
  /// Whether bytes are missing that the client must send: of a request that has begun, or the very first one.
  bool midway() const { return !begun_ || buffer_.size() > consumed_ || items_left_ > 0; }

 private:
  class Cursor;
  bool read_head(Cursor& in);
  bool read_item(Cursor& in);

  const Key prefix_;
  Bytes buffer_;
  size_t consumed_ = 0;
  bool begun_ = false;        // its first request came
  size_t wanted_ = 1;         // bytes without which another attempt is in vain
  TorchRequest partial_;      // a list of which some items are here
  size_t partial_bytes_ = 0;  // that they took
  uint64_t items_left_ = 0;
};

}  // namespace muster
