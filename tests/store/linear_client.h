#pragma once

#include <memory>
#include <string>

#include "muster/io/address.h"
#include "muster/store/store.h"
#include "store/linear_check.h"

namespace muster {

/// What a client learned of one call.
struct Learned {
  enum class What {
    kAnswer,   ///< `reply` came, which may be an error
    kNothing,  ///< the wait was given up, and took nothing
    kUnknown,  ///< it may have happened
  };
  What what = What::kUnknown;
  Reply reply{};
  bool lost = false;  ///< the client is of no more use
};

/// One client of a store whose calls go into a history: one at a time.
class RecordedClient {
 public:
  virtual ~RecordedClient() = default;
  /// Makes of the request what this client can ask for: a TCPStore client's get does not wait, and it
  /// lists all keys.
  virtual Request adapt(Request request) const { return request; }
  virtual Learned call(const Request& request, const Deadline& deadline) = 0;
};

/// `certain`: nothing interferes with its connections, so a pop or a barrier that timed out has taken no part, if the
/// server said so in time.
std::unique_ptr<RecordedClient> recorded(std::unique_ptr<Store> store, bool certain);
/// Speaks PyTorch's protocol; null if it cannot connect.
std::unique_ptr<RecordedClient> recorded_torch(const Address& address);
/// A process that dies while it asks: its request is sent, in muster's protocol, and its connection closed at once.
void die_asking(const std::string& url, ByteView secret, const Request& request);

}  // namespace muster
