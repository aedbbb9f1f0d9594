// The record, as a file and between ranks: {"tcp": {"latency": seconds, "overhead": seconds, "bytes_per_second": b},
// "unix": ..., "shm": ..., "memory": {"wait": seconds, "turn": seconds, "cached_bytes_per_second": b,
// "bytes_per_second": b}, "reduce_bytes_per_second": b, "cores": n, "measured": true, "algo": "all_reduce=ring"}. Older
// versions wrote no "memory"; then this part is a guess.
#include "muster/collective/cost/tuning.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "muster/base/host_name.h"
#include "muster/base/log.h"

namespace muster {
namespace {

using nlohmann::json;

constexpr size_t kMaxRecordBytes = 4096;

struct LinkEntry {
  const char* name;
  LinkCost MachineCosts::*cost;
};
constexpr LinkEntry kLinks[] = {
    {"tcp", &MachineCosts::tcp}, {"unix", &MachineCosts::local}, {"shm", &MachineCosts::shm}};

struct MemoryEntry {
  const char* name;
  double MemoryCosts::*cost;
};
constexpr MemoryEntry kMemoryCosts[] = {{"wait", &MemoryCosts::wait},
                                        {"turn", &MemoryCosts::turn},
                                        {"cached_bytes_per_second", &MemoryCosts::cached_bytes_per_second},
                                        {"bytes_per_second", &MemoryCosts::bytes_per_second}};

MachineCosts guess() {
  MachineCosts machine;
  machine.tcp = {.latency = 25e-6, .overhead = 6e-6, .bytes_per_second = 1.5e9};
  machine.shm = {.latency = 3e-6, .overhead = 1e-6, .bytes_per_second = 4e9};
  machine.cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return machine;
}

json to_json(const MachineCosts& machine) {
  json record;
  for (const auto& [name, cost] : kLinks) {
    const LinkCost& values = machine.*cost;
    record[name] = {
        {"latency", values.latency}, {"overhead", values.overhead}, {"bytes_per_second", values.bytes_per_second}};
  }
  if (machine.memory.measured) {
    for (const auto& [name, cost] : kMemoryCosts) record["memory"][name] = machine.memory.*cost;
  }
  record["reduce_bytes_per_second"] = machine.reduce_bytes_per_second;
  record["cores"] = machine.cores;
  record["measured"] = machine.measured;
  return record;
}

/// Reads a positive number in the range of plausible measurements; false otherwise.
bool read(const json& record, const char* name, double& value) {
  const auto found = record.find(name);
  if (found == record.end() || !found->is_number()) return false;
  value = found->get<double>();
  return value > 1e-12 && value < 1e15;
}

Result<MachineCosts> from_json(const json& record) {
  MachineCosts machine;
  double cores = 0;
  bool good = record.is_object() && read(record, "reduce_bytes_per_second", machine.reduce_bytes_per_second) &&
              read(record, "cores", cores) && cores < 1e6;
  for (const auto& [name, cost] : kLinks) {
    good = good && record.contains(name) && record[name].is_object() &&
           read(record[name], "latency", (machine.*cost).latency) &&
           read(record[name], "overhead", (machine.*cost).overhead) &&
           read(record[name], "bytes_per_second", (machine.*cost).bytes_per_second);
  }
  if (good && record.contains("memory")) {
    machine.memory.measured = true;
    good = record["memory"].is_object();
    for (const auto& [name, cost] : kMemoryCosts) good = good && read(record["memory"], name, machine.memory.*cost);
  }
  if (!good) return fail(ErrorCode::kProtocol, "this is not a record of a machine");
  machine.cores = std::max(1, static_cast<int>(cores));
  machine.measured = record.value("measured", json(false)) == json(true);
  return machine;
}

json parse(std::string_view text) { return json::parse(text, nullptr, /*allow_exceptions=*/false); }

MachineCosts measured_or_default() {
  const std::string path = machine_path();
  std::ifstream file(path);
  if (path.empty() || !file) return guess();
  std::string text(kMaxRecordBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (auto machine = from_json(parse(text))) return *machine;
  log(LogLevel::kWarning, path + " is not what `muster tune` writes: run it again; default costs are used meanwhile");
  return guess();
}

}  // namespace

void Tuning::apply(CollectiveSpec& spec, std::string_view kind, int ranks_per_host) const {
  const auto* entry = std::ranges::find(kLinks, kind, &LinkEntry::name);
  const LinkCost& link = machine.*(entry == std::end(kLinks) ? &MachineCosts::tcp : entry->cost);
  spec.costs = {.link = link,
                .reduce_bytes_per_second = machine.reduce_bytes_per_second,
                .load = static_cast<double>(ranks_per_host) / machine.cores};
  spec.algorithm = wanted[static_cast<size_t>(spec.collective)];
}

std::string Tuning::encode() const {
  json record = to_json(machine);
  std::string algorithms;
  for (const Algorithm* algorithm : wanted) {
    if (algorithm == nullptr) continue;
    algorithms += fmt::format("{}{}={}", algorithms.empty() ? "" : ",", name(algorithm->collective), algorithm->name);
  }
  record["algo"] = algorithms;
  return record.dump();
}

Result<Tuning> Tuning::decode(std::string_view text) {
  if (text.size() > kMaxRecordBytes) return fail(ErrorCode::kProtocol, "this is not a record of a machine");
  const json record = parse(text);
  Tuning tuning;
  MUSTER_ASSIGN(tuning.machine, from_json(record));
  if (!record.contains("algo") || !record["algo"].is_string()) {
    return fail(ErrorCode::kProtocol, "this record of a machine names no algorithms");
  }
  MUSTER_ASSIGN(tuning.wanted, parse_wanted(record["algo"].get<std::string>()));
  return tuning;
}

Result<std::array<const Algorithm*, kCollectiveCount>> parse_wanted(std::string_view text) {
  std::array<const Algorithm*, kCollectiveCount> wanted{};
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const std::string_view collective = word.substr(0, word.find('='));
    const std::string_view algorithm = word.substr(std::min(word.size(), collective.size() + 1));
    const auto all = algorithms();
    const auto known =
        std::ranges::find_if(all, [&](const Algorithm& entry) { return collective == name(entry.collective); });
    if (known == all.end()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("MUSTER_ALGO: '{}' names no collective; write for example all_reduce=ring", word));
    }
    const Algorithm* found = find_algorithm(known->collective, algorithm);
    if (found == nullptr) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("MUSTER_ALGO: {} has no algorithm '{}': choose from {}",
                                                           collective, algorithm, algorithm_names(known->collective)));
    }
    wanted[static_cast<size_t>(known->collective)] = found;
  }
  return wanted;
}

Result<Tuning> load_tuning() {
  Tuning tuning;
  tuning.machine = measured_or_default();
  if (const char* text = std::getenv("MUSTER_ALGO")) {
    MUSTER_ASSIGN(tuning.wanted, parse_wanted(text));
  }
  return tuning;
}

std::string machine_path() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::string folder;
  if (cache != nullptr && cache[0] == '/') {
    folder = cache;
  } else if (home != nullptr && home[0] == '/') {
    folder = std::string(home) + "/.cache";
  } else {
    return {};
  }
  // The name includes the host, because hosts may share a home directory.
  return fmt::format("{}/muster/machine-{}.json", folder, host_name());
}

Result<> save_machine(const MachineCosts& machine) {
  const std::filesystem::path path = machine_path();
  if (path.empty()) return fail(ErrorCode::kNotFound, "neither XDG_CACHE_HOME nor HOME says where to keep the record");
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  const std::filesystem::path fresh = fmt::format("{}.{}", path.string(), ::getpid());
  std::ofstream file(fresh);
  file << to_json(machine).dump(2) << '\n';
  file.close();
  if (!file.fail()) std::filesystem::rename(fresh, path, failed);
  if (!file.fail() && !failed) return {};
  std::error_code gone;
  std::filesystem::remove(fresh, gone);
  return fail(ErrorCode::kIo, fmt::format("cannot write {}{}", path.string(), failed ? ": " + failed.message() : ""));
}

}  // namespace muster
