#pragma once

#include <optional>

#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "muster/store/state/state.h"

namespace muster {

/// What a stock TCPStore client sends for a request; nothing for what its protocol has not. Shares no code with the
/// protocol. A get, multi_get or queue_pop is what a stock client sends after its WAIT: it does not wait.
std::optional<Bytes> torch_request(const Request& request);
/// Whether the protocol answers the request at all.
bool torch_answers(StoreOperation operation);
inline constexpr uint8_t kTorchCancelWait = 12;
/// What a client says first of all.
Bytes torch_hello();

/// A blocking client of PyTorch's TCPStore protocol, one request at a time.
class TorchClient {
 public:
  explicit TorchClient(const Address& address);

  struct Outcome {
    std::optional<Reply> reply;
    bool withdrawn = false;  ///< the time was up, and the server confirmed that the wait is over
    bool lost = false;       ///< the connection broke
  };
  /// A request that has no answer is followed by one that has: its return is when that one returns.
  Outcome call(const Request& request, const Deadline& deadline);
  bool connected() const { return connected_; }

  /// For those who want no answer.
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
