#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "muster/base/clock.h"
#include "muster/mpi/world.h"

namespace muster::mpi {

/// Ends the job if a call of MPI that cannot be interrupted does not return in time. Watches one call at a time.
class Watchdog {
 public:
  explicit Watchdog(const World& world);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// While it exists, a call is watched. `what` names the call. What it refers to must outlive this object.
  class Guard {
   public:
    Guard(Watchdog& watchdog, Duration timeout, const std::function<std::string()>& what);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Watchdog& watchdog_;
  };

  /// The call that is watched now, if any, must return within `timeout` from now, if not sooner.
  void shorten_deadline(Duration timeout, const std::string& why);

 private:
  void run();

  const World& world_;
  std::mutex mutex_;  ///< guards all fields below
  std::condition_variable stop_;
  bool stopping_ = false;
  std::optional<TimePoint> expires_;  ///< empty: no call is watched
  std::function<std::string()> what_;
  std::string why_;
  std::thread thread_;
};

}  // namespace muster::mpi
