#pragma once

#include "muster/store/state/state.h"

namespace muster {

/// One request of a client of PyTorch's TCPStore. The grammar is at the head of protocol_torch.cpp.
struct TorchRequest {
  static constexpr uint8_t kValidate = 0, kPing = 13;
  uint8_t query = 0;    ///< its first byte
  Request request{};    ///< not used by validate and ping; each key starts with the prefix
  uint32_t number = 0;  ///< validate: the magic number; ping: the nonce
};

/// Parses a client's bytes into requests. The first request must be a validate. A list is parsed item by item as it
/// arrives, so each byte is parsed about once, even if the request arrives in many pieces. Not thread-safe.
class TorchRequestReader {
 public:
  explicit TorchRequestReader(Key prefix) : prefix_(std::move(prefix)) {}
  void feed(ByteView bytes);
  /// Returns true and sets `out` to the next whole request, or false if more bytes are needed. kProtocol if the grammar
  /// does not allow the bytes.
  Result<bool> next(TorchRequest& out);
  const Key& prefix() const { return prefix_; }
  /// True while a request is incomplete, or while the first request has not arrived.
  bool midway() const { return !begun_ || buffer_.size() > consumed_ || items_left_ > 0; }

 private:
  class Cursor;
  bool read_head(Cursor& in);
  bool read_item(Cursor& in);

  const Key prefix_;
  Bytes buffer_;
  size_t consumed_ = 0;
  bool begun_ = false;        // the first request has arrived
  size_t wanted_ = 1;         // bytes needed before another attempt can succeed
  TorchRequest partial_;      // the list request that is being read
  size_t partial_bytes_ = 0;  // bytes of partial_ that were read
  uint64_t items_left_ = 0;
};

}  // namespace muster
