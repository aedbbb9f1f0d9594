#include "muster/cli/store_show.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace muster {
namespace {

using Json = nlohmann::ordered_json;

// JSON's text is UTF-8, and only nlohmann's own check says what it would take for that.
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
  return Json{{"clients", stat.clients},
              {"keys", stat.keys},
              {"queues", stat.queues},
              {"waiters", stat.waiters},
              {"operations", stat.operations},
              {"operations_by_kind", stat.operations_by_kind},
              {"messages_in", stat.messages_in},
              {"messages_out", stat.messages_out},
              {"bytes_in", stat.bytes_in},
              {"bytes_out", stat.bytes_out},
              {"threads", stat.threads},
              {"cpu_seconds", stat.cpu_seconds},
              {"uptime_seconds", stat.uptime_seconds}}
      .dump();
}

std::string as_text(const StoreStat& stat) {
  std::string text;
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("{:<16}{:>14}\n", name, value);
  };
  const auto number = [](uint64_t value) { return std::to_string(value); };
  line("clients", number(stat.clients));
  line("keys", number(stat.keys));
  line("queues", number(stat.queues));
  line("waiters", number(stat.waiters));
  line("operations", number(stat.operations));
  for (const auto& [kind, count] : stat.operations_by_kind) line("  " + kind, number(count));
  line("messages in", number(stat.messages_in));
  line("messages out", number(stat.messages_out));
  line("bytes in", format_bytes(stat.bytes_in));
  line("bytes out", format_bytes(stat.bytes_out));
  line("threads", number(stat.threads));
  line("CPU time", fmt::format("{:.3f} s", stat.cpu_seconds));
  line("up for", fmt::format("{:.1f} s", stat.uptime_seconds));
  return text;
}

}  // namespace muster
