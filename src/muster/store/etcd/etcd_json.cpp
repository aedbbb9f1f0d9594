#include <openssl/evp.h>

#include <algorithm>
#include <charconv>

#include "muster/store/etcd/etcd_client.h"

namespace muster {
namespace {

using etcd::Json;

std::string to_base64(ByteView bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');
  const int size =
      EVP_EncodeBlock(reinterpret_cast<uint8_t*>(text.data()), bytes.data(), static_cast<int>(bytes.size()));
  text.resize(static_cast<size_t>(size));
  return text;
}

Bytes from_base64(const std::string& text) {
  Bytes bytes(text.size() / 4 * 3 + 1);
  const int size =
      EVP_DecodeBlock(bytes.data(), reinterpret_cast<const uint8_t*>(text.data()), static_cast<int>(text.size()));
  // EVP_DecodeBlock() counts the padding as bytes.
  const auto padding = std::count(text.end() - std::min<std::ptrdiff_t>(2, std::ssize(text)), text.end(), '=');
  bytes.resize(size < padding ? 0 : static_cast<size_t>(size - padding));
  return bytes;
}

std::string to_base64(std::string_view text) { return to_base64(as_bytes(text)); }

Json ranged(const EtcdRange& range, Json object) {
  object["key"] = to_base64(range.key);
  if (!range.end.empty()) object["range_end"] = to_base64(range.end);
  return object;
}

}  // namespace

EtcdRange keys_below(std::string prefix) {
  std::string end = prefix;
  end.back() = static_cast<char>(end.back() + 1);
  return {std::move(prefix), std::move(end)};
}

namespace etcd {

Json range(const EtcdRange& range, Json options) { return {{"request_range", ranged(range, std::move(options))}}; }

Json put(const std::string& key, ByteView value, int64_t lease) {
  Json body = {{"key", to_base64(key)}, {"value", to_base64(value)}};
  if (lease != 0) body["lease"] = std::to_string(lease);
  return {{"request_put", std::move(body)}};
}

Json remove(const EtcdRange& range) { return {{"request_delete_range", ranged(range, Json::object())}}; }

Json unchanged(const std::string& key, int64_t revision) {
  return {{"key", to_base64(key)}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", std::to_string(revision)}};
}

Json empty(const EtcdRange& range) {
  return ranged(range, {{"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}});
}

Json holds(const std::string& key, ByteView value) {
  return {{"key", to_base64(key)}, {"target", "VALUE"}, {"result", "EQUAL"}, {"value", to_base64(value)}};
}

const Json& part(const Json& object, const char* name) {
  static const Json kNothing;
  const auto found = object.is_object() ? object.find(name) : object.end();
  return object.is_object() && found != object.end() ? *found : kNothing;
}

// The gateway writes 64-bit numbers as text, and omits zeros.
int64_t number(const Json& object, const char* name) {
  const Json& found = part(object, name);
  if (found.is_number_integer()) return found.get<int64_t>();
  int64_t value = 0;
  if (!found.is_string()) return value;
  const auto& digits = found.get_ref<const std::string&>();
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

std::string text(const Json& object, const char* name) {
  const Json& found = part(object, name);
  return found.is_string() ? found.get<std::string>() : std::string();
}

bool succeeded(const Json& answer) { return part(answer, "succeeded").is_boolean(); }

std::vector<EtcdKey> keys_of(const Json& answer) {
  std::vector<EtcdKey> keys;
  for (const Json& kv : part(answer, "kvs")) {
    keys.push_back(
        {true, to_string(from_base64(text(kv, "key"))), from_base64(text(kv, "value")), number(kv, "mod_revision")});
  }
  return keys;
}

EtcdKey key_of(const Json& answer) {
  std::vector<EtcdKey> keys = keys_of(answer);
  return keys.empty() ? EtcdKey{} : std::move(keys.front());
}

const Json& response(const Json& answer, size_t index, const char* kind) {
  static const Json kNothing;
  const Json& all = part(answer, "responses");
  return all.is_array() && index < all.size() ? part(all[index], kind) : kNothing;
}

int64_t revision(const Json& answer) { return number(part(answer, "header"), "revision"); }

}  // namespace etcd
}  // namespace muster
