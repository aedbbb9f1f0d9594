#include "floors.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "muster/base/check.h"

namespace muster::bench {
namespace {

void read_all(int fd, std::vector<char>& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got = read(fd, bytes.data() + done, bytes.size() - done);
    if (got <= 0) _exit(0);
    done += static_cast<size_t>(got);
  }
}

void write_all(int fd, const std::vector<char>& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t put = write(fd, bytes.data() + done, bytes.size() - done);
    if (put <= 0) _exit(0);
    done += static_cast<size_t>(put);
  }
}

double microseconds(Duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

}  // namespace

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double socket_round_trip(size_t bytes, int rounds, Duration pause) {
  int ends[2];
  MUSTER_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "cannot make a pair of sockets");
  std::vector<char> message(bytes, 1);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    for (;;) {
      read_all(ends[1], message);
      write_all(ends[1], message);
    }
  }
  close(ends[1]);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    if (pause > Duration::zero()) std::this_thread::sleep_for(pause);  // tidy: allow(sleep) the peer must sleep, too
    const TimePoint begin = steady_clock().now();
    write_all(ends[0], message);
    read_all(ends[0], message);
    times.push_back(microseconds(steady_clock().now() - begin));
  }
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return median(std::move(times));
}

double copy_twice(size_t bytes, int rounds) {
  constexpr int kBuffers = 4;  // so that none is in a cache when its turn comes
  std::vector<std::vector<char>> from(kBuffers, std::vector<char>(bytes, 1)), into(kBuffers, std::vector<char>(bytes));
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const TimePoint begin = steady_clock().now();
    std::memcpy(into[i % kBuffers].data(), from[i % kBuffers].data(), bytes);
    std::memcpy(from[(i + 1) % kBuffers].data(), into[(i + 1) % kBuffers].data(), bytes);
    times.push_back(microseconds(steady_clock().now() - begin));
  }
  return median(std::move(times));
}

}  // namespace muster::bench
