#include "muster/store/url.h"

#include <fmt/format.h>

#include "muster/base/bytes.h"

namespace muster {
namespace {

constexpr size_t kMaxUrl = 4096;

// Removes and returns the text before `mark`, or the whole text if there is no mark. Also removes the mark.
std::string_view cut(std::string_view& rest, char mark) {
  const size_t at = rest.find(mark);
  const std::string_view head = rest.substr(0, at);
  rest.remove_prefix(at == std::string_view::npos ? rest.size() : at + 1);
  return head;
}

Result<std::string> decode(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    const auto byte = from_hex(text.substr(i + 1, 2));
    if (!byte || byte->size() != 1) {
      return fail(ErrorCode::kInvalidArgument,
                  "two hexadecimal digits must follow % in a URL; write %25 for a % character");
    }
    decoded += static_cast<char>(byte->front());
    i += 2;
  }
  return decoded;
}

Result<> parse_authority(std::string_view text, uint16_t default_port, Url& url) {
  if (const size_t at = text.rfind('@'); at != std::string_view::npos) {
    std::string_view login = text.substr(0, at);
    text.remove_prefix(at + 1);
    MUSTER_ASSIGN(url.user, decode(cut(login, ':')));
    MUSTER_ASSIGN(url.password, decode(login));
  }
  while (!text.empty()) {
    MUSTER_ASSIGN(HostPort host, parse_host_port(cut(text, ','), default_port));
    if (host.host.empty()) return fail(ErrorCode::kInvalidArgument, "it names no host");
    url.hosts.push_back(std::move(host));
  }
  return {};
}

Result<Url> parse_parts(std::string_view text, uint16_t default_port) {
  if (text.size() > kMaxUrl) return fail(ErrorCode::kInvalidArgument, fmt::format("it is over {} bytes", kMaxUrl));
  Url url;
  const size_t scheme = text.find("://");
  if (scheme == std::string_view::npos) return fail(ErrorCode::kInvalidArgument, "it has no ://");
  url.scheme = text.substr(0, scheme);
  text.remove_prefix(scheme + 3);
  std::string_view before_query = cut(text, '?');
  MUSTER_TRY(parse_authority(cut(before_query, '/'), default_port, url));
  MUSTER_ASSIGN(url.path, decode(before_query));
  while (!text.empty()) {
    std::string_view pair = cut(text, '&');
    MUSTER_ASSIGN(const std::string name, decode(cut(pair, '=')));
    MUSTER_ASSIGN(url.query[name], decode(pair));
  }
  return url;
}

}  // namespace

Result<Url> Url::parse(std::string_view text, uint16_t default_port) {
  auto url = parse_parts(text, default_port);
  if (url) return url;
  return fail(url.error().code, fmt::format("cannot read the URL \"{}\": {}", without_password(text.substr(0, 200)),
                                            url.error().message));
}

std::string Url::take(const std::string& name, const std::string& otherwise) {
  const auto found = query.extract(name);
  return found.empty() ? otherwise : found.mapped();
}

Result<> Url::finish(std::string_view known) const {
  if (query.empty()) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("a {}:// URL takes no \"{}\"; it takes {}", scheme, query.begin()->first, known));
}

std::string without_password(std::string_view url) {
  const size_t begin = url.find("://");
  if (begin == std::string_view::npos) return std::string(url);
  const size_t at = url.substr(0, url.find('?', begin)).rfind('@');
  const size_t colon = url.find(':', begin + 3);
  if (at == std::string_view::npos || colon > at) return std::string(url);
  return fmt::format("{}:***{}", url.substr(0, colon), url.substr(at));
}

}  // namespace muster
