#include "muster/mpi/bootstrap/job_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "muster/base/bytes.h"
#include "muster/base/environment.h"
#include "muster/base/host_name.h"
#include "muster/base/random.h"
#include "muster/io/host_identity.h"
#include "muster/store/job_store.h"

namespace muster::mpi {
namespace {

constexpr Duration kCheckTime = 1s;
constexpr const char* kName = "name";

Key key_of(int rank) { return fmt::format("rank {}", rank); }

/// "PID host-name host"
JobRank rank_from(std::string_view text) {
  JobRank rank;
  const size_t name = text.find(' ') + 1, host = text.find(' ', name) + 1;
  std::from_chars(text.data(), text.data() + text.size(), rank.pid);
  rank.host_name = text.substr(name, host - name - 1);
  rank.host = text.substr(host);
  return rank;
}

Result<std::unique_ptr<Store>> open_store(Duration timeout) {
  MUSTER_ASSIGN(auto opened, store_from_environment(Deadline::after(timeout)));
  return prefix_store("muster/mpi", std::move(opened));
}

Result<JobRanks> read_ranks(std::unique_ptr<Store> store, Duration timeout) {
  JobRanks ranks;
  ranks.store = std::move(store);
  MUSTER_ASSIGN(ranks.own, job_number("RANK"));
  MUSTER_ASSIGN(const int size, job_number("WORLD_SIZE"));
  std::vector<Key> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(key_of(rank));
  MUSTER_ASSIGN(const std::vector<Bytes> found, get_all(*ranks.store, keys, timeout));
  for (const Bytes& each : found) ranks.all.push_back(rank_from(to_string(each)));
  return ranks;
}

}  // namespace

bool started_by_muster() {
  constexpr std::array kMuster = {"MUSTER_STORE", "RANK", "WORLD_SIZE"};
  constexpr std::array kLaunchers = {"OMPI_COMM_WORLD_SIZE", "PMI_FD", "PMI_PORT", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"};
  return std::ranges::all_of(kMuster, is_set) && std::ranges::none_of(kLaunchers, is_set) &&
         environment("WORLD_SIZE") != "1";
}

Result<JobRanks> lookup_ranks(Duration timeout) {
  MUSTER_ASSIGN(auto store, open_store(timeout));
  return read_ranks(std::move(store), timeout);
}

Result<JobRanks> exchange_ranks(Duration timeout) {
  MUSTER_ASSIGN(auto store, open_store(timeout));
  MUSTER_ASSIGN(const int own, job_number("RANK"));
  const std::string text = fmt::format("{} {} {}-{}", getpid(), host_name(), shared_memory_domain(), process_domain());
  if (own == 0) {  // before the record of rank 0, for which all ranks wait
    std::array<uint8_t, 8> drawn;
    fill_secure_random(drawn);
    MUSTER_TRY(store->set(kName, as_bytes(to_hex(drawn)), Deadline::after(timeout)));
  }
  MUSTER_TRY(store->set(key_of(own), as_bytes(text), Deadline::after(timeout)));
  MUSTER_ASSIGN(JobRanks ranks, read_ranks(std::move(store), timeout));
  MUSTER_ASSIGN(const Bytes name, ranks.store->get(kName, Deadline::after(timeout)));
  ranks.name = to_string(name);
  return ranks;
}

Result<std::vector<Bytes>> get_all(Store& store, const std::vector<Key>& keys, Duration timeout) {
  auto found = store.multi_get(keys, Deadline::after(timeout));
  if (found || found.error().code != ErrorCode::kTimeout) return found;
  for (const Key& key : keys) {
    const Result<bool> came = store.check({key}, Deadline::after(kCheckTime));
    if (!came) break;
    if (!*came) return fail(ErrorCode::kTimeout, fmt::format("{} did not come in time while MPI started", key));
  }
  return found;
}

}  // namespace muster::mpi
