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

/// Why a request failed, and whether the server may have received it.
struct HttpFailure {
  Error error;
  bool was_sent = false;
};

/// POSTs JSON with libcurl. libcurl is loaded with the first object, because it loads two dozen other libraries, which
/// most programs do not need. Keeps its connection for the next request. Not thread-safe.
class Http {
 public:
  /// kUnsupported if libcurl is not installed.
  static Result<std::unique_ptr<Http>> create();
  virtual ~Http() = default;

  struct Answer {
    long status = 0;
    std::string body;
  };
  /// `on_line` gets each line of a streamed answer when it comes. If it returns false, the request ends and the
  /// connection is closed. Without it the whole body is collected.
  using OnLine = std::function<bool(std::string_view)>;
  virtual tl::expected<Answer, HttpFailure> post(const HttpRequest& request, const Deadline& deadline,
                                                 const OnLine& on_line = {}) = 0;
};

}  // namespace muster
