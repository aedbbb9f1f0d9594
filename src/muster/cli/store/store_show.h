#pragma once

#include <string>

#include "muster/base/bytes.h"
#include "muster/store/stat.h"

namespace muster {

/// How `muster store` prints the contents of a store. Keys and values are arbitrary bytes.

/// For a terminal: bytes other than printable ASCII as \xNN, and a backslash doubled.
std::string printable(std::string_view bytes);
struct ShownKey {
  std::string key;
  const Bytes* value = nullptr;  ///< null: not shown
  std::string change{};          ///< empty: not shown
};
/// A JSON object on one line with "key" and the fields that are set. Bytes that are not UTF-8 become "key_hex".
std::string as_json(const ShownKey& shown);
std::string as_json(const StoreStat& stat);
/// "change  key  value".
std::string as_text(const ShownKey& shown);
/// Lines of "name  number".
std::string as_text(const StoreStat& stat);

}  // namespace muster
