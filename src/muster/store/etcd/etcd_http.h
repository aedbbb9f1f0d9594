#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"

namespace muster {

/// PEM files for https; all may be empty.
struct HttpFiles {
  std::string ca, certificate, key;
};

struct HttpRequest {
  std::string url, body;
  std::string authorization;  ///< the header of that name; empty: none
  HttpFiles files;
};

/// Why a request failed, and whether it can have reached the server.
struct HttpFailure {
  Error error;
  bool was_sent = false;
};

/// POSTs JSON by libcurl, which is loaded when the first object is made: programs that never open an etcd store do not
/// pay for the two dozen libraries that it brings. Keeps its connection for the next request. Not thread-safe.
class Http {
 public:
  /// kUnsupported when libcurl is not installed.
  static Result<std::unique_ptr<Http>> create();
  virtual ~Http() = default;

  struct Answer {
    long status = 0;
    std::string body;
  };
  /// `on_line`: given each line of a streamed answer as it comes; once it returns false the request is over, and so is
  /// the connection. Without it the whole body is collected.
  using OnLine = std::function<bool(std::string_view)>;
  virtual tl::expected<Answer, HttpFailure> post(const HttpRequest& request, const Deadline& deadline,
                                                 const OnLine& on_line = {}) = 0;
};

}  // namespace muster
