// The statistics of a server in a reply:
//
//   keys[i]   := "clients" | "keys" | ... | "operation/" name(StoreOperation)
//   values[i] := u64, little-endian; times are microseconds

#include "muster/store/stat.h"

#include <utility>

namespace muster {
namespace {

constexpr std::string_view kByKind = "operation/";
constexpr double kMicroseconds = 1e6;

constexpr std::pair<const char*, uint64_t StoreStat::*> kCounters[] = {
    {"clients", &StoreStat::clients},
    {"keys", &StoreStat::keys},
    {"queues", &StoreStat::queues},
    {"waiters", &StoreStat::waiters},
    {"operations", &StoreStat::operations},
    {"bytes in", &StoreStat::bytes_in},
    {"bytes out", &StoreStat::bytes_out},
    {"messages in", &StoreStat::messages_in},
    {"messages out", &StoreStat::messages_out},
    {"threads", &StoreStat::threads},
};
constexpr std::pair<const char*, double StoreStat::*> kTimes[] = {{"cpu", &StoreStat::cpu_seconds},
                                                                  {"uptime", &StoreStat::uptime_seconds}};

void put(Reply& reply, std::string name, uint64_t value) {
  reply.keys.push_back(std::move(name));
  reply.values.push_back(Writer().put(value).take());
}

void take(StoreStat& stat, const Key& name, uint64_t value) {
  if (name.starts_with(kByKind)) stat.operations_by_kind[name.substr(kByKind.size())] = value;
  for (const auto& [known, field] : kCounters) {
    if (name == known) stat.*field = value;
  }
  for (const auto& [known, field] : kTimes) {
    if (name == known) stat.*field = static_cast<double>(value) / kMicroseconds;
  }
}

}  // namespace

void put_stat(const StoreStat& stat, Reply& reply) {
  for (const auto& [name, field] : kCounters) put(reply, name, stat.*field);
  for (const auto& [name, field] : kTimes) put(reply, name, static_cast<uint64_t>(stat.*field * kMicroseconds));
  for (const auto& [kind, count] : stat.operations_by_kind) put(reply, std::string(kByKind) + kind, count);
}

Result<StoreStat> stat_of(const Reply& reply) {
  if (reply.keys.size() != reply.values.size()) {
    return fail(ErrorCode::kProtocol, "the store's figures have different numbers of names and values");
  }
  StoreStat stat;
  for (size_t i = 0; i < reply.keys.size(); ++i) {
    Reader value(reply.values[i]);
    MUSTER_ASSIGN(const auto number, value.get<uint64_t>());
    take(stat, reply.keys[i], number);
  }
  return stat;
}

}  // namespace muster
