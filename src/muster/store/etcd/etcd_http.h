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
  std::string authorization;  ///< value of the Authorization header; empty: no such header
  HttpFiles files;
};

/// Why a request failed, and whether the server may have received it.
struct HttpFailure {
  Error error;
  bool was_sent = false;
};

/// POSTs JSON with libcurl. create() loads libcurl at run time, because libcurl loads two dozen other libraries, which
/// most programs do not need. An object keeps its connection for the next request. Not thread-safe.
class Http {
 public:
  /// kUnsupported if libcurl is not installed.
  static Result<std::unique_ptr<Http>> create();
  virtual ~Http() = default;

  struct Answer {
    long status = 0;
    std::string body;
  };
  /// `on_line` gets each line of a streamed answer as soon as it arrives. If it returns false, the request ends and the
  /// connection is closed. Without `on_line`, the whole body is collected.
  using OnLine = std::function<bool(std::string_view)>;
  virtual tl::expected<Answer, HttpFailure> post(const HttpRequest& request, const Deadline& deadline,
                                                 const OnLine& on_line = {}) = 0;
};

}  // namespace muster
