#include "muster/cli/store/store_show.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace muster {
namespace {

using Json = nlohmann::ordered_json;

// JSON's text is UTF-8; nlohmann's own check decides what is valid.
bool is_utf8(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::ignore) ==
         Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

void put(Json& object, const std::string& name, const std::string& bytes) {
  if (is_utf8(bytes)) {
    object[name] = bytes;
  } else {
    object[name + "_hex"] = to_hex(as_bytes(bytes));
  }
}

// The names as in JSON. The text output replaces underscores by spaces.
std::vector<std::pair<std::string, uint64_t>> counters(const StoreStat& stat) {
  return {{"clients", stat.clients},
          {"keys", stat.keys},
          {"queues", stat.queues},
          {"waiters", stat.waiters},
          {"operations", stat.operations},
          {"messages_in", stat.messages_in},
          {"messages_out", stat.messages_out},
          {"bytes_in", stat.bytes_in},
          {"bytes_out", stat.bytes_out},
          {"threads", stat.threads}};
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    if (c == '\\') {
      text += "\\\\";
    } else if (c >= ' ' && c <= '~') {
      text += c;
    } else {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  return text;
}

std::string as_json(const ShownKey& shown) {
  Json object;
  if (!shown.change.empty()) object["change"] = shown.change;
  put(object, "key", shown.key);
  if (shown.value != nullptr) put(object, "value", to_string(*shown.value));
  return object.dump();
}

std::string as_json(const StoreStat& stat) {
  Json object;
  for (const auto& [name, value] : counters(stat)) object[name] = value;
  object["operations_by_kind"] = stat.operations_by_kind;
  object["cpu_seconds"] = stat.cpu_seconds;
  object["uptime_seconds"] = stat.uptime_seconds;
  return object.dump();
}

std::string as_text(const ShownKey& shown) {
  const std::string change = shown.change.empty() ? "" : shown.change + "  ";
  const std::string value = shown.value == nullptr ? "" : "  " + printable(to_string(*shown.value));
  return change + printable(shown.key) + value;
}

std::string as_text(const StoreStat& stat) {
  std::string text;
  const auto line = [&](std::string name, const std::string& value) {
    std::replace(name.begin(), name.end(), '_', ' ');
    text += fmt::format("{:<16}{:>14}\n", name, value);
  };
  for (const auto& [name, value] : counters(stat)) {
    line(name, name.starts_with("bytes") ? format_bytes(value) : std::to_string(value));
    if (name != "operations") continue;
    for (const auto& [kind, count] : stat.operations_by_kind) line("  " + kind, std::to_string(count));
  }
  line("CPU time", fmt::format("{:.3f} s", stat.cpu_seconds));
  line("up for", fmt::format("{:.1f} s", stat.uptime_seconds));
  return text;
}

}  // namespace muster
