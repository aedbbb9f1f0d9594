#include "muster/mpi/pmi_server.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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
#include "muster/io/host_identity.h"
#include "muster/mpi/environment.h"
#include "muster/store/job_store.h"
#include "muster/store/store.h"

namespace muster::mpi {
namespace {

// What MPICH may send. It asks for these limits first.
constexpr size_t kNameBytes = 64, kKeyBytes = 64, kValueBytes = 1024;
constexpr size_t kLineBytes = 2 * kValueBytes;
constexpr Duration kCheckTime = 1s;
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
std::string mapping_of(const std::vector<std::string>& host_of_rank) {
  struct Block {
    size_t host, hosts, ranks;
  };
  std::map<std::string, size_t> numbers;
  std::vector<Block> blocks;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const size_t host = numbers.emplace(host_of_rank[rank], numbers.size()).first->second;
    const bool same_host = rank > 0 && host_of_rank[rank] == host_of_rank[rank - 1];
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

Key host_key(int rank) { return fmt::format("host/{}", rank); }

class PmiServer {
 public:
  PmiServer(Fd socket, std::unique_ptr<Store> store, int rank, int size, Duration timeout)
      : socket_(std::move(socket)), store_(std::move(store)), rank_(rank), size_(size), timeout_(timeout) {}

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
    if (command == "get_universe_size") return fmt::format("cmd=universe_size size={}\n", size_);
    if (command == "get_my_kvsname") return "cmd=my_kvsname kvsname=muster\n";
    if (command == "put") {
      MUSTER_TRY(store_->set("key/" + field(line, "key"), as_bytes(field(line, "value")), deadline()));
      return "cmd=put_result rc=0 msg=success\n";
    }
    if (command == "get") {
      MUSTER_ASSIGN(const std::string value, get(field(line, "key")));
      if (value.empty()) return "cmd=get_result rc=-1 msg=key_not_found value=unknown\n";
      return fmt::format("cmd=get_result rc=0 msg=success value={}\n", value);
    }
    if (command == "barrier_in") {
      MUSTER_TRY(store_->barrier("barrier", size_, deadline()));
      return "cmd=barrier_out rc=0 msg=success\n";
    }
    if (command == "finalize") return "cmd=finalize_ack rc=0 msg=success\n";
    if (command == "abort") return "";  // MPI ends the process next
    // Such as MPI_Comm_spawn(), which sends several lines.
    return fail(ErrorCode::kUnsupported, fmt::format("`muster run` cannot do what it asks for: {}", line));
  }

  /// Empty: there is no such key. MPICH asks for a key of another rank only after a barrier.
  Result<std::string> get(const std::string& key) {
    if (key == kMapping) {
      std::vector<Key> hosts;
      for (int rank = 0; rank < size_; ++rank) hosts.push_back(host_key(rank));
      const auto found = store_->multi_get(hosts, deadline());
      if (!found) return tl::unexpected(with_first_absent(found.error(), hosts));
      std::vector<std::string> host_of_rank;
      for (const Bytes& each : *found) host_of_rank.push_back(to_string(each));
      return mapping_of(host_of_rank);
    }
    MUSTER_ASSIGN(const bool exists, store_->check({"key/" + key}, deadline()));
    if (!exists) return "";
    MUSTER_ASSIGN(const Bytes value, store_->get("key/" + key, deadline()));
    return to_string(value);
  }

  Error with_first_absent(const Error& why, const std::vector<Key>& hosts) const {
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      const Result<bool> came = store_->check({hosts[rank]}, Deadline::after(kCheckTime));
      if (!came) return why;
      if (!*came) return {ErrorCode::kTimeout, fmt::format("rank {} has not begun to start MPI in time", rank)};
    }
    return why;
  }

  /// MPI waits for the answer, and has no deadline.
  [[noreturn]] void give_up(const std::string& why) const {
    log(LogLevel::kError, fmt::format("rank {} of {} cannot go on with MPI: {}", rank_, size_, why));
    _exit(1);
  }

  Deadline deadline() const { return Deadline::after(timeout_); }

  const Fd socket_;
  const std::unique_ptr<Store> store_;
  const int rank_, size_;
  const Duration timeout_;
};

}  // namespace

bool started_by_muster() {
  const auto is_set = [](const char* variable) { return !environment(variable).empty(); };
  constexpr std::array kMuster = {"MUSTER_STORE", "RANK", "WORLD_SIZE"};
  constexpr std::array kLaunchers = {"OMPI_COMM_WORLD_SIZE", "PMI_FD", "PMI_PORT", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"};
  return std::ranges::all_of(kMuster, is_set) && std::ranges::none_of(kLaunchers, is_set) &&
         environment("WORLD_SIZE") != "1";
}

Result<> serve_pmi(Duration timeout) {
  MUSTER_ASSIGN(const int rank, job_number("RANK"));
  MUSTER_ASSIGN(const int size, job_number("WORLD_SIZE"));
  MUSTER_ASSIGN(auto opened, store_from_environment(Deadline::after(timeout)));
  auto store = prefix_store("muster/pmi", std::move(opened));
  MUSTER_TRY(store->set(host_key(rank), as_bytes(shared_memory_domain()), Deadline::after(timeout)));
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail(ErrorCode::kIo, fmt::format("no socket for MPI: {}", std::strerror(errno)));
  }
  Fd for_mpi(ends[0]);
  // Both live as long as the process: MPI_Finalize() is later than the destructors of static objects.
  auto* const server = new PmiServer(Fd(ends[1]), std::move(store), rank, size, timeout);
  try {
    std::thread([server] { server->run(); }).detach();  // tidy: allow(detach) it runs until MPI_Finalize()
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kUnavailable, fmt::format("no thread for MPI: {}", error.what()));
  }
  setenv("PMI_FD", std::to_string(for_mpi.release()).c_str(), 1);
  setenv("PMI_RANK", std::to_string(rank).c_str(), 1);
  setenv("PMI_SIZE", std::to_string(size).c_str(), 1);
  return {};
}

}  // namespace muster::mpi
