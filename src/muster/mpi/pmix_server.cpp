#include "muster/mpi/pmix_server.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <list>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/log.h"
#include "muster/base/random.h"
#include "muster/io/fd.h"
#include "muster/mpi/bootstrap/job_ranks.h"
#include "muster/mpi/bootstrap/pmix_abi.h"

namespace muster::mpi {
namespace {

using pmix::Type;

constexpr unsigned kFinalizeSeconds = 5;
/// MPI_Init() exchanges addresses, and then waits for all ranks.
constexpr int kFencesOfStart = 2;

/// What PMIx is told about the job, with the memory of its texts and lists.
class InfoList {
 public:
  void add(const char* key, std::string text) {
    texts_.push_back(std::move(text));
    append(key, {.type = Type::kString, .string = texts_.back().c_str()});
  }
  void add(const char* key, uint16_t number) { append(key, {.type = Type::kUint16, .uint16 = number}); }
  void add(const char* key, uint32_t number, Type type = Type::kUint32) {
    append(key, {.type = type, .uint32 = number});
  }
  void add(const char* key, InfoList list) {
    lists_.push_back(std::move(list));
    std::vector<pmix::Info>& infos = lists_.back().infos_;
    arrays_.push_back({Type::kInfo, infos.size(), infos.data()});
    append(key, {.type = Type::kDataArray, .array = &arrays_.back()});
  }

  pmix::Info* data() { return infos_.data(); }
  size_t size() const { return infos_.size(); }

 private:
  void append(const char* key, const pmix::Value& value) {
    pmix::Info info{.value = value};
    std::strncpy(info.key, key, sizeof info.key - 1);
    infos_.push_back(info);
  }

  std::vector<pmix::Info> infos_;
  std::list<std::string> texts_;
  std::list<InfoList> lists_;
  std::list<pmix::DataArray> arrays_;
};

/// The hosts of a job, in the order of their first rank.
struct Hosts {
  std::vector<std::vector<int>> ranks_of_host;
  std::vector<std::string> names;  ///< all different
  std::vector<size_t> host_of_rank, host_local_rank;

  explicit Hosts(const std::vector<JobRank>& ranks) {
    std::vector<std::string> known;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto found = std::ranges::find(known, ranks[rank].host);
      const auto host = static_cast<size_t>(found - known.begin());
      if (found == known.end()) {
        known.push_back(ranks[rank].host);
        const std::string& name = ranks[rank].host_name;
        names.push_back(std::ranges::count(names, name) == 0 ? name : fmt::format("{}-{}", name, host));
        ranks_of_host.emplace_back();
      }
      host_of_rank.push_back(host);
      host_local_rank.push_back(ranks_of_host[host].size());
      ranks_of_host[host].push_back(static_cast<int>(rank));
    }
  }
};

InfoList job_infos(const Hosts& hosts, size_t own_host, const std::string& nspace, const std::string& directory) {
  std::vector<std::string> ranks;
  for (const auto& each : hosts.ranks_of_host) ranks.push_back(fmt::format("{}", fmt::join(each, ",")));
  const auto size = static_cast<uint32_t>(hosts.host_of_rank.size());
  const auto local_size = static_cast<uint32_t>(hosts.ranks_of_host[own_host].size());
  InfoList infos;
  infos.add("pmix.nmap", fmt::format("{}", fmt::join(hosts.names, ",")));
  infos.add("pmix.pmap", fmt::format("{}", fmt::join(ranks, ";")));
  infos.add("pmix.jobid", nspace);
  for (const char* key : {"pmix.tmpdir", "pmix.nsdir", "pmix.pdir"}) infos.add(key, directory);
  for (const char* key : {"pmix.univ.size", "pmix.job.size", "pmix.app.size", "pmix.max.size"}) infos.add(key, size);
  for (const char* key : {"pmix.local.size", "pmix.node.size"}) infos.add(key, local_size);
  infos.add("pmix.num.nodes", static_cast<uint32_t>(hosts.names.size()));
  infos.add("pmix.lpeers", ranks[own_host]);
  for (uint32_t rank = 0; rank < size; ++rank) {
    InfoList of_rank;
    of_rank.add("pmix.rank", rank, Type::kRank);
    of_rank.add("pmix.appnum", uint32_t{0});
    of_rank.add("pmix.hname", hosts.names[hosts.host_of_rank[rank]]);
    of_rank.add("pmix.nodeid", static_cast<uint32_t>(hosts.host_of_rank[rank]));
    for (const char* key : {"pmix.lrank", "pmix.nrank"}) {
      of_rank.add(key, static_cast<uint16_t>(hosts.host_local_rank[rank]));
    }
    infos.add("pmix.pdata", std::move(of_rank));
  }
  return infos;
}

class PmixServer {
 public:
  PmixServer(const pmix::Functions& functions, JobRanks ranks, Duration timeout)
      : functions_(functions),
        ranks_(std::move(ranks)),
        hosts_(ranks_.all),
        own_host_(hosts_.host_of_rank[static_cast<size_t>(ranks_.own)]),
        timeout_(timeout) {
    current_ = this;
  }

  Result<> start(const std::string& directory) {
    MUSTER_ASSIGN(const std::string nspace, agree_on_name());
    InfoList own;
    own.add("pmix.srvr.tmpdir", directory);
    own.add("pmix.sys.tmpdir", directory);
    own.add("pmix.hname", hosts_.names[own_host_]);
    pmix::ServerModule module = callbacks();
    MUSTER_TRY(check(functions_.server_init(&module, own.data(), own.size()), "PMIx_server_init"));
    InfoList infos = job_infos(hosts_, own_host_, nspace, directory);
    const int local_size = static_cast<int>(local_ranks().size());
    MUSTER_TRY(wait_for("PMIx_server_register_nspace", [&](pmix::OpDone* done, void* data) {
      return functions_.server_register_nspace(nspace.c_str(), local_size, infos.data(), infos.size(), done, data);
    }));
    for (const int rank : local_ranks()) MUSTER_TRY(add_client(nspace, rank));
    return {};
  }

  /// Until all ranks of this host have ended.
  void run() const {
    for (const int rank : local_ranks()) {
      const pid_t pid = ranks_.all[static_cast<size_t>(rank)].pid;
      const Fd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
      pollfd ended{process.get(), POLLIN, 0};
      while (process && poll(&ended, 1, -1) <= 0) {
      }
    }
    signal(SIGALRM, SIG_DFL);
    alarm(kFinalizeSeconds);
    (void)functions_.server_finalize();
  }

 private:
  const std::vector<int>& local_ranks() const { return hosts_.ranks_of_host[own_host_]; }

  /// A name that no other job on these hosts has: Open MPI names its files after it.
  Result<std::string> agree_on_name() const {
    if (own_host_ == 0) {
      std::array<uint8_t, 8> drawn;
      fill_secure_random(drawn);
      MUSTER_TRY(ranks_.store->set("the job's name", as_bytes("muster-" + to_hex(drawn)), Deadline::after(timeout_)));
    }
    MUSTER_ASSIGN(const auto found, get_all(*ranks_.store, {"the job's name"}, timeout_));
    return to_string(found.front());
  }

  static pmix::ServerModule callbacks() {
    pmix::ServerModule module{};
    module.client_finalized = [](const pmix::Proc*, void*, pmix::OpDone* done, void* data) {
      return finish(done, data);
    };
    module.abort = [](const pmix::Proc*, void*, int, const char*, pmix::Proc*, size_t, pmix::OpDone* done, void* data) {
      return finish(done, data);
    };
    module.fence = [](const pmix::Proc* procs, size_t count, const pmix::Info*, size_t, char* bytes, size_t size,
                      pmix::ModexDone* done, void* data) {
      return current_->fence(procs, count, {bytes, size}, done, data);
    };
    // PMIx itself keeps lists of files that it must remove after a rank, but only if this function is there.
    module.job_control = [](const pmix::Proc*, const pmix::Proc*, size_t, const pmix::Info*, size_t, void*, void*) {
      return pmix::kNotSupported;
    };
    return module;
  }

  static int finish(pmix::OpDone* done, void* data) {
    if (done != nullptr) done(pmix::kSuccess, data);
    return pmix::kSuccess;
  }

  Result<> add_client(const std::string& nspace, int rank) const {
    pmix::Proc proc{.rank = static_cast<uint32_t>(rank)};
    std::strncpy(proc.nspace, nspace.c_str(), sizeof proc.nspace - 1);
    MUSTER_TRY(wait_for("PMIx_server_register_client", [&](pmix::OpDone* done, void* data) {
      return functions_.server_register_client(&proc, getuid(), getgid(), nullptr, done, data);
    }));
    char** variables = nullptr;
    MUSTER_TRY(check(functions_.server_setup_fork(&proc, &variables), "PMIx_server_setup_fork"));
    std::string text;
    for (; *variables != nullptr; ++variables) text += fmt::format("{}\n", *variables);
    return ranks_.store->set(pmix_variables_key(rank), as_bytes(text), Deadline::after(timeout_));
  }

  Result<> check(int status, const char* call) const {
    if (status == pmix::kSuccess || status == pmix::kOperationSucceeded) return {};
    return fail(ErrorCode::kUnavailable, fmt::format("{} says: {}", call, functions_.Error_string(status)));
  }

  /// A call that reports its end, in a thread of PMIx. One that fails never reports.
  template <typename Call>
  Result<> wait_for(const char* name, Call call) const {
    auto* const result = new std::promise<int>;  // PMIx may report later than `timeout_`
    pmix::OpDone* const done = [](int status, void* data) { static_cast<std::promise<int>*>(data)->set_value(status); };
    const int begun = call(done, result);
    if (begun != pmix::kSuccess) return check(begun, name);
    auto ended = result->get_future();
    if (ended.wait_for(timeout_) == std::future_status::timeout) {
      return fail(ErrorCode::kTimeout, fmt::format("{} did not end in time", name));
    }
    return check(ended.get(), name);
  }

  /// All ranks give some bytes and get those of all. PMIx has collected those of this host. Its thread must not wait.
  int fence(const pmix::Proc* procs, size_t count, std::string_view bytes, pmix::ModexDone* done, void* data) {
    const bool all = count == hosts_.host_of_rank.size() || (count == 1 && procs->rank == pmix::kAllRanks);
    if (!all) return pmix::kNotSupported;
    try {
      // tidy: allow(detach) the ranks may end before the fence does
      std::thread([this, number = fences_++, own = std::string(bytes), done, data] {
        end_fence(exchange(number, own), done, data);
      }).detach();
    } catch (const std::system_error&) {
      return pmix::kError;
    }
    return pmix::kSuccess;
  }

  void end_fence(Result<std::string> result, pmix::ModexDone* done, void* data) const {
    if (!result) {
      log(LogLevel::kError, fmt::format("the ranks cannot go on with MPI: {}", result.error().to_string()));
      // Open MPI would go on without the addresses, and hang.
      for (const int rank : local_ranks()) kill(ranks_.all[static_cast<size_t>(rank)].pid, SIGKILL);
      return;
    }
    auto* const kept = new std::string(std::move(*result));
    done(
        pmix::kSuccess, kept->data(), kept->size(), data, [](void* text) { delete static_cast<std::string*>(text); },
        kept);
  }

  Result<std::string> exchange(int number, const std::string& own) const {
    std::vector<Key> keys;
    for (const std::string& host : hosts_.names) keys.push_back(fmt::format("host {} in fence {}", host, number));
    MUSTER_TRY(ranks_.store->set(keys[own_host_], as_bytes(own), Deadline::after(timeout_)));
    MUSTER_ASSIGN(const auto found, get_all(*ranks_.store, keys, number < kFencesOfStart ? timeout_ : kNoLimit));
    std::string all;
    for (const Bytes& each : found) all += to_string(each);
    return all;
  }

  static inline PmixServer* current_ = nullptr;  ///< for PMIx's callbacks

  const pmix::Functions& functions_;
  const JobRanks ranks_;
  const Hosts hosts_;
  const size_t own_host_;
  const Duration timeout_;
  int fences_ = 0;  ///< only PMIx's thread uses it
};

Result<pmix::Functions> load_pmix(const std::string& file) {
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return fail(ErrorCode::kUnavailable, dlerror());
  pmix::Functions functions{};
  std::string missing;
#define MUSTER_PMIX_FUNCTION(name)                                                            \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(library, "PMIx_" #name)); \
  if (functions.name == nullptr) missing = "PMIx_" #name;
  MUSTER_PMIX_FUNCTION(server_init)
  MUSTER_PMIX_FUNCTION(server_register_nspace)
  MUSTER_PMIX_FUNCTION(server_register_client)
  MUSTER_PMIX_FUNCTION(server_setup_fork)
  MUSTER_PMIX_FUNCTION(server_finalize)
  MUSTER_PMIX_FUNCTION(Error_string)
#undef MUSTER_PMIX_FUNCTION
  if (!missing.empty()) return fail(ErrorCode::kUnavailable, fmt::format("{} has no {}", file, missing));
  return functions;
}

/// For PMIx's files and those of its clients.
Result<std::string> make_directory() {
  std::error_code ignored;
  auto parent = std::filesystem::temp_directory_path(ignored);
  if (ignored) parent = "/tmp";
  auto directory = (parent / "muster-pmix-XXXXXX").string();
  if (mkdtemp(directory.data()) == nullptr) {
    return fail(ErrorCode::kIo, fmt::format("no directory {}: {}", directory, std::strerror(errno)));
  }
  setenv("TMPDIR", directory.c_str(), 1);
  return directory;
}

Result<> serve(const std::string& library, Duration timeout, const std::string& directory) {
  static pmix::Functions functions;
  MUSTER_ASSIGN(functions, load_pmix(library));
  MUSTER_ASSIGN(JobRanks ranks, lookup_ranks(timeout));
  static PmixServer server(functions, std::move(ranks), timeout);
  MUSTER_TRY(server.start(directory));
  (void)!write(STDOUT_FILENO, kPmixServes, std::strlen(kPmixServes));
  close(STDOUT_FILENO);
  server.run();
  return {};
}

}  // namespace

Key pmix_variables_key(int rank) { return fmt::format("variables of rank {}", rank); }

int run_pmix_server(const std::string& library, Duration timeout) {
  if (fork() != 0) _exit(0);  // the rank must not have a child that it does not know
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(number, SIG_IGN);  // it ends after the ranks
  const auto directory = make_directory();
  const Result<> served = directory ? serve(library, timeout, *directory) : tl::unexpected(directory.error());
  if (!served) {
    const std::string text = served.error().to_string();
    (void)!write(STDOUT_FILENO, text.data(), text.size());
  }
  std::error_code ignored;
  if (directory) std::filesystem::remove_all(*directory, ignored);
  _exit(served ? 0 : 1);  // not exit(): threads of PMIx may run
}

}  // namespace muster::mpi
