#include "muster/store/job_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "muster/base/log.h"
#include "muster/io/address.h"
#include "muster/store/remote_store.h"

namespace muster {
namespace {

constexpr Duration kRetryInterval = 1s;
constexpr Duration kNoticeDelay = 3s;  // waiting time before the user is notified

/// Where rank 0 serves the store of a job that `muster run` did not start.
Result<HostPort> master_endpoint() {
  const char* host = std::getenv("MASTER_ADDR");
  if (host == nullptr || *host == '\0') {
    return fail(ErrorCode::kInvalidArgument,
                "neither MUSTER_STORE nor MASTER_ADDR is set: start this program with `muster run`");
  }
  const char* agent_store = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  if (agent_store != nullptr && std::string_view(agent_store) == "True") {
    return fail(ErrorCode::kUnsupported,
                "torchrun serves its own store at MASTER_ADDR, which does not speak muster's protocol: start this "
                "program with `muster run`, which takes the same options");
  }
  MUSTER_ASSIGN(const int port, job_number("MASTER_PORT"));
  if (port < 1 || port > 65535) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("MASTER_PORT={} is not a port", port));
  }
  return HostPort{host, static_cast<uint16_t>(port)};
}

std::string url_of(const HostPort& master) {
  const bool is_v6 = master.host.find(':') != std::string::npos;
  return fmt::format("tcp://{}{}{}:{}", is_v6 ? "[" : "", master.host, is_v6 ? "]" : "", master.port);
}

/// A name may become known only some time after its host has started, for example the name of a Kubernetes service.
Result<std::vector<Address>> resolve_with_retries(const HostPort& master, const Deadline& deadline) {
  const Deadline quiet = Deadline::after(kNoticeDelay);
  bool notified = false;
  while (true) {
    auto found = resolve(master.host, master.port);
    if (found || deadline.passed()) return found;
    if (quiet.passed() && !std::exchange(notified, true)) {
      log(LogLevel::kWarning, fmt::format("MASTER_ADDR: {} (retrying)", found.error().message));
    }
    // tidy: allow(sleep) there is no event for a name that becomes known
    std::this_thread::sleep_for(std::min(kRetryInterval, deadline.left()));
  }
}

void warn_of_endpoint(const HostPort& master, const Address& address, const Credentials& credentials) {
  if (address.is_loopback() && master.host != "localhost" && master.host != address.host()) {
    log(LogLevel::kWarning, fmt::format("MASTER_ADDR={} is {} here, which other hosts cannot reach; set MASTER_ADDR to "
                                        "an address of this host",
                                        master.host, address.host()));
  }
  if (credentials.secret.empty() && !credentials.tls && !address.is_loopback()) {
    log(LogLevel::kWarning, fmt::format("no secret was given, so anyone who can reach {} can join this job; set "
                                        "MUSTER_SECRET to the same hex digits at all ranks",
                                        address.to_string()));
  }
}

Result<std::unique_ptr<StoreServer>> serve_store(const HostPort& master, const Address& address,
                                                 const Credentials& credentials, const Deadline& deadline) {
  StoreServerOptions options;
  options.credentials = credentials;
  options.muster_listen = {address};
  auto started = StoreServer::start(std::move(options), deadline);
  if (!started) {
    return fail(started.error().code,
                fmt::format("rank 0 cannot serve the job's store at MASTER_ADDR: {}", started.error().message));
  }
  warn_of_endpoint(master, address, credentials);
  return started;
}

}  // namespace

Result<int> job_number(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} is not set: start this program with `muster run`", name));
  }
  const std::string_view text = value;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}='{}' is not a number", name, text));
  }
  return number;
}

Result<JobStore> open_job_store(const Credentials& credentials, bool serve, const Deadline& deadline) {
  JobStore job;
  if (std::getenv("MUSTER_STORE") != nullptr) {
    MUSTER_ASSIGN(job.store, store_from_environment(deadline));
    return job;
  }
  MUSTER_ASSIGN(const HostPort master, master_endpoint());
  MUSTER_ASSIGN(const auto addresses, resolve_with_retries(master, deadline));
  if (serve) {
    MUSTER_ASSIGN(job.server, serve_store(master, addresses.front(), credentials, deadline));
  }
  // The name, not the address: another rank's name server may put the addresses in another order.
  MUSTER_ASSIGN(job.store, remote_store(url_of(master), credentials, deadline));
  return job;
}

}  // namespace muster
