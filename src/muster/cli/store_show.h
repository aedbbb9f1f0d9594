#pragma once

#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/store/stat.h"

namespace muster {

/// How `muster store` shows what is in a store. Keys and values are any bytes.

/// For a terminal: what is no printable ASCII as \xNN, and a backslash twice.
std::string printable(std::string_view bytes);
/// A JSON object of one line: "key", and what is given beside it. Bytes that are no UTF-8 come as "key_hex".
struct ShownKey {
  std::string key;
  const Bytes* value = nullptr;  ///< null: not shown
  std::string change;            ///< empty: not shown
};
std::string as_json(const ShownKey& shown);
std::string as_json(const StoreStat& stat);
/// Lines of "name  number".
std::string as_text(const StoreStat& stat);

}  // namespace muster
