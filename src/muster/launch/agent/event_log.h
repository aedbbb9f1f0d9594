#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"
#include "muster/launch/output/console.h"

namespace muster {

/// --event-log-handler: writes the events of this node's agent to a file or to the console. Several nodes may share the
/// file, because each line is one append. One JSON object per line:
///
///   {"time": <seconds since 1970>, "event": "...", "run_id": "...", "host": "...", "pid": <the agent's>, ...}
///
/// For one thread.
class EventLog {
 public:
  /// kIo if the file cannot be written; the message names it.
  static Result<EventLog> open(const RunOptions& options, std::string host, Console& console);
  void record(const char* event, const nlohmann::ordered_json& fields);

 private:
  EventLog(Console& console, std::string run_id, std::string host)
      : console_(&console), run_id_(std::move(run_id)), host_(std::move(host)) {}

  Console* console_;
  std::string run_id_, host_;
  bool to_console_ = false;
  Fd file_;
};

}  // namespace muster
