#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"

namespace muster::bench {

/// A process that calls an echo function in another process, over one library. Ends the program with a message if a
/// call fails.
class Caller {
 public:
  virtual ~Caller() = default;
  /// Makes the messages of the next calls: `count` of them, in turn, so that none is in a cache when its turn comes.
  virtual void prepare(size_t bytes, int count) = 0;
  /// A call, from its beginning until its result is here. `index`: of the message.
  virtual void echo(int index) = 0;
  /// Makes `calls` calls with the first message, at most `in_flight` at a time. `times`, if given, gets the
  /// microseconds from the beginning of each call until the caller took its result.
  virtual void echo_many(size_t in_flight, int calls, std::vector<double>* times = nullptr) = 0;
};

/// serve_...() serves until the process is killed. It must be called in a child of its own, forked before this process
/// starts threads. `path`: a file that does not exist yet, by which the two processes find each other.
[[noreturn]] void serve_muster(const std::string& path, const std::string& transports);
std::unique_ptr<Caller> connect_muster(const std::string& path, const std::string& transports);
#ifdef MUSTER_WITH_GRPC
[[noreturn]] void serve_grpc(const std::string& path);
std::unique_ptr<Caller> connect_grpc(const std::string& path);
#endif

[[noreturn]] void fail_benchmark(const std::string& why);

/// Since `begin`.
inline double microseconds_since(TimePoint begin) {
  return std::chrono::duration<double, std::micro>(steady_clock().now() - begin).count();
}

}  // namespace muster::bench
