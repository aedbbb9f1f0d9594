#include "muster/launch/agent/event_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <system_error>

namespace muster {

Result<EventLog> EventLog::open(const RunOptions& options, std::string host, Console& console) {
  EventLog log(console, options.run_id, std::move(host));
  log.to_console_ = options.event_log == "console";
  if (options.event_log.empty() || log.to_console_) return log;
  log.file_.reset(::open(options.event_log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (log.file_) return log;
  return fail(ErrorCode::kIo, "--event-log-handler " + options.event_log +
                                  ": the file cannot be written: " + std::generic_category().message(errno));
}

void EventLog::record(const char* event, const nlohmann::ordered_json& fields) {
  if (!file_ && !to_console_) return;
  // tidy: allow(clock) readers compare the time with that of other logs
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  nlohmann::ordered_json line = {
      {"time", now.count()}, {"event", event}, {"run_id", run_id_}, {"host", host_}, {"pid", ::getpid()}};
  line.update(fields);
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (to_console_) return console_->err().line(this, "", std::string_view(text).substr(0, text.size() - 1));
  if (::write(file_.get(), text.data(), text.size()) >= 0) return;
  console_->notice(std::string("the event log cannot be written any more: ") + std::generic_category().message(errno));
  file_.reset();
}

}  // namespace muster
