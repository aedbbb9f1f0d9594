#pragma once

#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// One request of a client of PyTorch's TCPStore. The grammar heads protocol_torch.cpp.
struct TorchRequest {
  static constexpr uint8_t kValidate = 0, kPing = 13;
  uint8_t query = 0;    ///< its first byte
  Request request{};    ///< not for validate and ping; each key comes after the prefix
  uint32_t number = 0;  ///< validate: the magic number; ping: the nonce
};

/// Cuts a client's bytes into requests, of which the first must be a validate. A list is read item by item as it comes,
/// so each byte is read about once, however the request is cut. Not thread-safe.
class TorchRequestReader {
 public:
  explicit TorchRequestReader(Key prefix) : prefix_(std::move(prefix)) {}
  void feed(ByteView bytes);
  /// True when `out` holds the next whole request, false when more bytes are needed; kProtocol for what the grammar
  /// does not allow.
  Result<bool> next(TorchRequest& out);
  const Key& prefix() const { return prefix_; }
  /// True while a request is incomplete, or the first one has not come.
  bool midway() const { return !begun_ || buffer_.size() > consumed_ || items_left_ > 0; }

 private:
  class Cursor;
  bool read_head(Cursor& in);
  bool read_item(Cursor& in);

  const Key prefix_;
  Bytes buffer_;
  size_t consumed_ = 0;
  bool begun_ = false;        // the first request came
  size_t wanted_ = 1;         // bytes needed before another attempt can succeed
  TorchRequest partial_;      // a list of which some items have come
  size_t partial_bytes_ = 0;  // that these items took
  uint64_t items_left_ = 0;
};

}  // namespace muster
