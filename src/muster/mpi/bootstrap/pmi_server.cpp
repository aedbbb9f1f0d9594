#include "muster/mpi/bootstrap/pmi_server.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "muster/base/log.h"
#include "muster/io/fd.h"
#include "muster/store/store.h"

namespace muster::mpi {
namespace {

// What MPICH may send. It asks for these limits first.
constexpr size_t kNameBytes = 64, kKeyBytes = 64, kValueBytes = 1024;
constexpr size_t kLineBytes = 2 * kValueBytes;
constexpr const char* kMapping = "PMI_process_mapping";

/// "key=value" pairs between blanks. The value of the last one may have blanks.
std::string field(std::string_view line, std::string_view key) {
  const std::string sought = fmt::format(" {}=", key);
  const std::string padded = fmt::format(" {}", line);
  const size_t at = padded.find(sought);
  if (at == std::string::npos) return "";
  const std::string value = padded.substr(at + sought.size());
  return key == "value" ? value : value.substr(0, value.find(' '));
}

/// Which ranks share a host, as MPICH writes it: "(vector,(first host,hosts,ranks of each),...)".
std::string mapping_of(const std::vector<JobRank>& ranks) {
  struct Block {
    size_t host, hosts, ranks;
  };
  std::map<std::string, size_t> numbers;
  std::vector<Block> blocks;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const size_t host = numbers.emplace(ranks[rank].host, numbers.size()).first->second;
    const bool same_host = rank > 0 && ranks[rank].host == ranks[rank - 1].host;
    if (same_host) {
      ++blocks.back().ranks;
    } else {
      blocks.push_back({host, 1, 1});
    }
  }
  std::string text = "(vector";
  for (size_t i = 0; i < blocks.size();) {
    Block block = blocks[i++];
    for (; i < blocks.size() && blocks[i].ranks == block.ranks && blocks[i].host == block.host + block.hosts; ++i) {
      ++block.hosts;
    }
    text += fmt::format(",({},{},{})", block.host, block.hosts, block.ranks);
  }
  return text + ")";
}

std::atomic<bool> mpi_initialized = false;

class PmiServer {
 public:
  PmiServer(Fd socket, JobRanks ranks, Duration timeout)
      : socket_(std::move(socket)), ranks_(std::move(ranks)), timeout_(timeout) {}

  /// Answers until MPI ends or closes the socket.
  void run() {
    std::string text;
    std::array<char, kLineBytes> part;
    for (;;) {
      const ssize_t got = ::read(socket_.get(), part.data(), part.size());
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return;
      text.append(part.data(), static_cast<size_t>(got));
      for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n')) {
        const std::string line = text.substr(0, end);
        text.erase(0, end + 1);
        if (!answer(line)) return;
      }
      if (text.size() > kLineBytes) return give_up("a line that is too long came from MPI");
    }
  }

 private:
  bool answer(const std::string& line) {
    const std::string command = field(line, "cmd");
    const Result<std::string> reply = reply_to(command, line);
    if (!reply) give_up(reply.error().to_string());
    std::string_view left = *reply;
    while (!left.empty()) {
      const ssize_t sent = ::send(socket_.get(), left.data(), left.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return false;
      left.remove_prefix(static_cast<size_t>(sent));
    }
    return command != "finalize";
  }

  Result<std::string> reply_to(const std::string& command, const std::string& line) {
    if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
    if (command == "get_maxes") {
      return fmt::format("cmd=maxes kvsname_max={} keylen_max={} vallen_max={}\n", kNameBytes, kKeyBytes, kValueBytes);
    }
    if (command == "get_appnum") return "cmd=appnum appnum=0\n";
    if (command == "get_universe_size") return fmt::format("cmd=universe_size size={}\n", ranks_.size());
    // MPICH 5 names its shared memory by this. Ranks that are killed leave theirs.
    if (command == "get_my_kvsname") return fmt::format("cmd=my_kvsname kvsname=muster-{}\n", ranks_.name);
    if (command == "put") {
      MUSTER_TRY(ranks_.store->set("key/" + field(line, "key"), as_bytes(field(line, "value")), deadline()));
      return "cmd=put_result rc=0 msg=success\n";
    }
    if (command == "get") {
      MUSTER_ASSIGN(const std::string value, get(field(line, "key")));
      if (value.empty()) return "cmd=get_result rc=-1 msg=key_not_found value=unknown\n";
      return fmt::format("cmd=get_result rc=0 msg=success value={}\n", value);
    }
    if (command == "barrier_in") {
      MUSTER_TRY(
          ranks_.store->barrier("barrier", ranks_.size(), Deadline::after(mpi_initialized ? kNoLimit : timeout_)));
      return "cmd=barrier_out rc=0 msg=success\n";
    }
    if (command == "finalize") return "cmd=finalize_ack rc=0 msg=success\n";
    if (command == "abort") return "";  // MPI ends the process next
    // Such as MPI_Comm_spawn(), which sends several lines.
    return fail(ErrorCode::kUnsupported, fmt::format("`muster run` cannot do what it asks for: {}", line));
  }

  /// Empty: there is no such key. MPICH asks for a key of another rank only after a barrier.
  Result<std::string> get(const std::string& key) {
    if (key == kMapping) return mapping_of(ranks_.all);
    MUSTER_ASSIGN(const bool exists, ranks_.store->check({"key/" + key}, deadline()));
    if (!exists) return "";
    MUSTER_ASSIGN(const Bytes value, ranks_.store->get("key/" + key, deadline()));
    return to_string(value);
  }

  /// MPI waits for the answer, and has no deadline.
  [[noreturn]] void give_up(const std::string& why) const {
    log(LogLevel::kError, fmt::format("rank {} of {} cannot go on with MPI: {}", ranks_.own, ranks_.size(), why));
    _exit(1);
  }

  Deadline deadline() const { return Deadline::after(timeout_); }

  const Fd socket_;
  const JobRanks ranks_;
  const Duration timeout_;
};

}  // namespace

void mark_mpi_initialized() { mpi_initialized = true; }

Result<> serve_pmi(JobRanks ranks, Duration timeout) {
  setenv("PMI_RANK", std::to_string(ranks.own).c_str(), 1);
  setenv("PMI_SIZE", std::to_string(ranks.size()).c_str(), 1);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail(ErrorCode::kIo, fmt::format("no socket for MPI: {}", std::strerror(errno)));
  }
  Fd for_mpi(ends[0]);
  // Both live as long as the process: MPI_Finalize() is later than the destructors of static objects.
  auto* const server = new PmiServer(Fd(ends[1]), std::move(ranks), timeout);
  try {
    std::thread([server] { server->run(); }).detach();  // tidy: allow(detach) it runs until MPI_Finalize()
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kUnavailable, fmt::format("no thread for MPI: {}", error.what()));
  }
  setenv("PMI_FD", std::to_string(for_mpi.release()).c_str(), 1);
  return {};
}

}  // namespace muster::mpi
