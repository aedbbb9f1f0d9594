#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "muster/io/loop_driver.h"
#include "muster/rpc/directory.h"

namespace muster::rpc {

/// Asks the directory which workers have given names, again and again until the user has enough. It does so on a thread
/// of its own, because the store may have to be asked over the network, and functions may use all threads of the
/// driver. Not thread-safe: guarded by the driver's lock.
class NameLookUp {
 public:
  /// Called with the lock held, with the worker that has the name now, if any, or with the store's error. Returns true
  /// if the name must be looked up again.
  using Found = std::function<bool(const std::string& name, const Result<std::optional<WorkerRecord>>& worker)>;

  NameLookUp(LoopDriver& driver, Directory& directory, Found found);

  /// Looks the name up soon. kResourceExhausted if there can be no thread.
  Result<> add(const std::string& name);
  /// Looks no further names up.
  void end();
  /// Waits for the thread. Must be called after end(), and without the lock.
  void join();

 private:
  struct Name {
    std::string name;
    Duration pause;  ///< before the next look-up
  };

  void run();

  LoopDriver& driver_;
  Directory& directory_;
  const Found found_;
  std::multimap<TimePoint, Name> names_;  ///< by the time of their next look-up
  bool ended_ = false;
  std::condition_variable changed_;
  std::thread thread_;  ///< started by the first name
};

}  // namespace muster::rpc
