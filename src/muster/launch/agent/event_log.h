#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"
#include "muster/launch/output/console.h"

namespace muster {

/// --event-log-handler: the events of this node's agent with their times. One JSON object per line:
///
///   {"time": <seconds since 1970>, "event": "...", "run_id": "...", "host": "...", "pid": <the agent's>, ...}
///
/// to a file that several nodes may share (each line is one append), or to the console. For one thread.
class EventLog {
 public:
  using Value = std::variant<int64_t, std::string>;
  using Field = std::pair<const char*, Value>;

  /// kIo names the file that cannot be written.
  static Result<EventLog> open(const RunOptions& options, std::string host, Console& console);
  void record(const char* event, std::initializer_list<Field> fields = {});

 private:
  EventLog(Console& console, std::string run_id, std::string host)
      : console_(&console), run_id_(std::move(run_id)), host_(std::move(host)) {}

  Console* console_;
  std::string run_id_, host_;
  bool to_console_ = false;
  Fd file_;
};

}  // namespace muster
