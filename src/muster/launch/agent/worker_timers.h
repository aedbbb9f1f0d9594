#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/options/options.h"
#include "muster/launch/timer.h"

namespace muster {

/// The timers of torch.distributed.elastic.timer. A worker that does not leave `with expires(after=60)` in time gets a
/// signal. Workers write their requests to a named pipe, one line of JSON each:
///
///     {"pid": 7, "scope_id": "step", "expiration_time": 1700000000.5, "signal": 9}
///
/// The time is in seconds since 1970; a negative one removes the timer.
class WorkerTimers {
 public:
  struct Expired {
    pid_t pid = 0;
    std::string scope;
    int signal = 0;  ///< that the process gets; 0: none, as it asked for
  };
  struct Events {
    std::function<void(const Expired&)> expired;     ///< called before the signal
    std::function<void(const std::string&)> notice;  ///< a request was refused
  };

  /// Makes the pipe if TORCHELASTIC_ENABLE_FILE_TIMER is 1; else null. It is at TORCHELASTIC_TIMER_FILE, or in the
  /// directory `scratch` if that is not set or is the pipe of another launcher that runs.
  static Result<std::unique_ptr<WorkerTimers>> from_environment(Loop& loop, const Environment& environment,
                                                                const std::string& scratch, Events events);
  ~WorkerTimers();
  WorkerTimers(const WorkerTimers&) = delete;
  WorkerTimers& operator=(const WorkerTimers&) = delete;

  const std::string& path() const { return path_; }

 private:
  struct Pending {
    Fd process;
    TimePoint at;
    int signal = 0;
  };

  WorkerTimers(Loop& loop, std::string path, Fd pipe, Events events);
  void read();
  void take(std::string_view line);
  void refuse(const std::string& why);
  void wait_for_next();
  void expire();

  Loop& loop_;
  const std::string path_;
  const Fd pipe_;
  Events events_;
  std::string text_;  // of a request that was not read to its end
  std::map<std::pair<pid_t, std::string>, Pending> timers_;
  Timer next_{loop_};
};

}  // namespace muster
