#include "muster/mpi/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/environment.h"
#include "muster/base/host_name.h"
#include "muster/base/random.h"
#include "muster/io/host_identity.h"
#include "muster/io/outward_address.h"
#include "muster/mpi/watchdog.h"
#include "muster/mpi/world.h"
#include "muster/store/server/server.h"

namespace muster::mpi {
namespace {

using Variables = std::map<std::string, std::string>;

/// What rank 0 tells the others: "host port torch_port secret", "-" if it has a store already, or "!" and an error.
constexpr size_t kMessageBytes = 512;
constexpr size_t kSecretBytes = 32;

/// Serves until all ranks have ended: World::after_finalize() runs later than the destructors of static objects.
std::unique_ptr<StoreServer>& server() {
  static auto& running = *new std::unique_ptr<StoreServer>();
  return running;
}

Result<std::string> serve(const Deadline& deadline) {
  StoreServerOptions options;
  std::string secret;
  if (is_set("MUSTER_SECRET")) {
    secret = environment("MUSTER_SECRET");
  } else {
    std::array<uint8_t, kSecretBytes> drawn;
    fill_secure_random(drawn);
    secret = to_hex(drawn);
  }
  MUSTER_ASSIGN(options.credentials.secret, from_hex(secret));
  const Address address = outward_address();
  options.muster_listen = {address};
  options.torch_listen = {address};
  MUSTER_ASSIGN(server(), StoreServer::start(std::move(options), deadline));
  World::after_finalize([] { server().reset(); });
  return fmt::format("{} {} {} {}", address.host(), server()->muster_addresses().front().port(),
                     server()->torch_addresses().front().port(), secret);
}

/// The place of this rank among those of its host.
Result<> add_local_rank(const World& world, Variables& variables) {
  std::array<char, 64> own{};
  const std::string host = fmt::format("{:.63}", boot_id().empty() ? host_name() : boot_id());
  std::copy(host.begin(), host.end(), own.begin());
  std::vector<char> all(own.size() * static_cast<size_t>(world.size));
  const auto length = static_cast<int>(own.size());
  MUSTER_TRY(world.mpi.check(
      world.mpi.Allgather(own.data(), length, world.mpi.byte, all.data(), length, world.mpi.byte, world.mpi.comm_world),
      "MPI_Allgather"));
  int local_rank = 0, local_size = 0;
  for (int rank = 0; rank < world.size; ++rank) {
    const std::string_view other(all.data() + own.size() * static_cast<size_t>(rank), own.size());
    if (other != std::string_view(own.data(), own.size())) continue;
    ++local_size;
    if (rank < world.rank) ++local_rank;
  }
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(local_size);
  return {};
}

Result<> add_store(const World& world, Variables& variables, const Deadline& deadline) {
  std::array<char, kMessageBytes> message{};
  if (world.rank == 0) {
    const Result<std::string> served = is_set("MUSTER_STORE") ? Result<std::string>("-") : serve(deadline);
    std::string text = served ? *served : "!" + served.error().message;
    if (served && text.size() >= message.size()) text = "!the secret, MUSTER_SECRET, is too long";
    std::copy_n(text.begin(), std::min(text.size(), message.size() - 1), message.begin());
  }
  MUSTER_TRY(world.mpi.check(
      world.mpi.Bcast(message.data(), static_cast<int>(message.size()), world.mpi.byte, 0, world.mpi.comm_world),
      "MPI_Bcast"));
  std::string_view text(message.data());
  if (text.starts_with('!')) {
    return fail(ErrorCode::kUnavailable, fmt::format("rank 0 cannot serve the job's store: {}", text.substr(1)), 0);
  }
  if (text == "-") {
    if (is_set("MUSTER_STORE")) return {};
    return fail(ErrorCode::kInvalidArgument, "MUSTER_STORE is set at rank 0 only: the launcher must pass it on", 0);
  }
  const auto next = [&text] {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string word(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    return word;
  };
  const std::string host = next(), port = next();
  const bool is_v6 = host.find(':') != std::string::npos;
  variables["MUSTER_STORE"] = fmt::format("tcp://{}{}{}:{}", is_v6 ? "[" : "", host, is_v6 ? "]" : "", port);
  variables["MASTER_ADDR"] = host;
  variables["MASTER_PORT"] = next();
  variables["MUSTER_SECRET"] = next();
  return {};
}

Result<Variables> make_environment(const Deadline& deadline) {
  MUSTER_ASSIGN(const World* const world, World::get());
  Watchdog watchdog(*world);
  const Watchdog::Guard guard(watchdog, deadline.left(), [] { return "the exchange of the store's address"; });
  Variables variables;
  variables["RANK"] = std::to_string(world->rank);
  variables["WORLD_SIZE"] = std::to_string(world->size);
  MUSTER_TRY(add_local_rank(*world, variables));
  MUSTER_TRY(add_store(*world, variables, deadline));
  std::erase_if(variables, [](const auto& each) { return is_set(each.first.c_str()); });
  return variables;
}

}  // namespace

Result<Variables> job_environment(const Deadline& deadline) {
  static const Result<Variables> made = make_environment(deadline);
  return made;
}

}  // namespace muster::mpi
