#pragma once

#include <optional>

#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "muster/store/state/state.h"

namespace muster {

/// The bytes that a stock TCPStore client sends for a request. Returns nothing if the protocol has no such request.
/// Shares no code with the server's protocol. A get, multi_get or queue_pop does not wait, because a stock client sends
/// a WAIT before it.
std::optional<Bytes> torch_request(const Request& request);
/// True if the protocol has a reply to the request.
bool torch_answers(StoreOperation operation);
inline constexpr uint8_t kTorchCancelWait = 12;
/// The first bytes of a client.
Bytes torch_hello();

/// A blocking client of PyTorch's TCPStore protocol, one request at a time.
class TorchClient {
 public:
  explicit TorchClient(const Address& address);

  struct Outcome {
    std::optional<Reply> reply;
    bool withdrawn = false;  ///< the deadline passed, and the server confirmed the cancellation
    bool lost = false;       ///< the connection broke
  };
  /// If a request has no reply, the client sends a second request that has one, and returns when that reply comes.
  Outcome call(const Request& request, const Deadline& deadline);
  bool connected() const { return connected_; }

  /// Sends bytes without waiting for an answer.
  void send(ByteView bytes);

 private:
  bool receive(void* into, size_t count, const Deadline& deadline);
  template <class T>
  T get(const Deadline& deadline);
  Bytes get_bytes(const Deadline& deadline);
  Reply read_reply(const Request& request, const Deadline& deadline);
  Outcome wait(const Request& request, const Deadline& deadline);

  Fd fd_;
  bool connected_ = false;
};

}  // namespace muster
