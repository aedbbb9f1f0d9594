#pragma once

#include <memory>
#include <string>

#include "muster/io/address.h"
#include "muster/store/store.h"
#include "store/linear_check.h"

namespace muster {

/// What a client knows about one call after it.
struct CallOutcome {
  enum class What {
    kAnswer,   ///< `reply` came, which may be an error
    kNothing,  ///< the wait was given up and had no effect
    kUnknown,  ///< the call may have taken effect
  };
  What what = What::kUnknown;
  Reply reply{};
  bool lost = false;  ///< the client cannot be used any more
};

/// A client of a store whose calls are recorded in a history. It makes one call at a time.
class RecordedClient {
 public:
  virtual ~RecordedClient() = default;
  /// Changes the request to one that this client can make. For example, the get of a TCPStore client does not wait, and
  /// its list_keys has no prefix.
  virtual Request adapt(Request request) const { return request; }
  virtual CallOutcome call(const Request& request, const Deadline& deadline) = 0;
};

/// `certain` means that nothing interferes with the client's connections. Then a pop or a barrier that timed out had no
/// effect, if the server confirmed this in time.
std::unique_ptr<RecordedClient> recorded(std::unique_ptr<Store> store, bool certain);
/// A client of PyTorch's protocol. Null if it cannot connect.
std::unique_ptr<RecordedClient> recorded_torch(const Address& address);
/// Simulates a process that dies during a request: sends the request in muster's protocol and closes the connection at
/// once.
void send_and_die(const std::string& url, ByteView secret, const Request& request);

}  // namespace muster
