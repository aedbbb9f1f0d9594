#include "muster/store/etcd/etcd_http.h"

#define CURL_DISABLE_TYPECHECK  // the macros do not work with function pointers
#include <curl/curl.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace muster {
namespace {

constexpr size_t kMaxAnswer = size_t{2} << 30;
constexpr size_t kMaxLine = size_t{64} << 20;

struct Curl {
  decltype(&::curl_global_init) global_init;
  decltype(&::curl_easy_init) init;
  decltype(&::curl_easy_setopt) setopt;
  decltype(&::curl_easy_perform) perform;
  decltype(&::curl_easy_getinfo) getinfo;
  decltype(&::curl_easy_cleanup) cleanup;
  decltype(&::curl_easy_strerror) strerror;
  decltype(&::curl_slist_append) append;
  decltype(&::curl_slist_free_all) free_all;
  bool loaded = false;
};

Curl load() {
  Curl curl{};
  void* library = nullptr;
  for (const char* name : {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl.so"}) {
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) return curl;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
  curl.loaded = find(curl.global_init, "curl_global_init") && find(curl.init, "curl_easy_init") &&
                find(curl.setopt, "curl_easy_setopt") && find(curl.perform, "curl_easy_perform") &&
                find(curl.getinfo, "curl_easy_getinfo") && find(curl.cleanup, "curl_easy_cleanup") &&
                find(curl.strerror, "curl_easy_strerror") && find(curl.append, "curl_slist_append") &&
                find(curl.free_all, "curl_slist_free_all") && curl.global_init(CURL_GLOBAL_ALL) == CURLE_OK;
  return curl;
}

const Curl& curl() {
  static const Curl loaded = load();
  return loaded;
}

// Receives the answer to one request: collects its bytes, or passes each line to `on_line`.
struct Sink {
  std::string bytes;
  const Http::OnLine& on_line;
  bool enough = false;

  bool take(std::string_view more) {
    bytes += more;
    if (!on_line) return bytes.size() <= kMaxAnswer;
    size_t begin = 0;
    for (size_t end; !enough && (end = bytes.find('\n', begin)) != std::string::npos; begin = end + 1) {
      enough = !on_line(std::string_view(bytes).substr(begin, end - begin));
    }
    bytes.erase(0, begin);
    return !enough && bytes.size() <= kMaxLine;
  }
};

size_t write_to_sink(char* data, size_t size, size_t count, void* sink) {
  return static_cast<Sink*>(sink)->take({data, size * count}) ? size * count : 0;
}

ErrorCode code_of(CURLcode code) {
  switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
      return ErrorCode::kTimeout;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CERTPROBLEM:
      return ErrorCode::kAuthentication;
    case CURLE_SSL_CACERT_BADFILE:
      return ErrorCode::kInvalidArgument;
    default:
      return ErrorCode::kPeerLost;
  }
}

class CurlHttp : public Http {
 public:
  explicit CurlHttp(CURL* handle) : handle_(handle) {
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_PROXY, "");  // etcd is inside the cluster, so ignore the proxies of the environment
    set(CURLOPT_ERRORBUFFER, error_.data());
    set(CURLOPT_WRITEFUNCTION, &write_to_sink);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
  }
  /// In a forked child the connection is still the parent's. libcurl would end its TLS session.
  ~CurlHttp() override {
    if (getpid() == process_) curl().cleanup(handle_);
  }
  CurlHttp(const CurlHttp&) = delete;
  CurlHttp& operator=(const CurlHttp&) = delete;

  tl::expected<Answer, HttpFailure> post(const HttpRequest& request, const Deadline& deadline,
                                         const OnLine& on_line) override {
    Sink sink{{}, on_line};
    const long left = std::max(1, deadline.poll_timeout_ms());
    set(CURLOPT_URL, request.url.c_str());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    set(CURLOPT_POSTFIELDS, request.body.data());
    set(CURLOPT_WRITEDATA, &sink);
    set(CURLOPT_TIMEOUT_MS, left);
    if (!request.files.ca.empty()) set(CURLOPT_CAINFO, request.files.ca.c_str());
    if (!request.files.certificate.empty()) set(CURLOPT_SSLCERT, request.files.certificate.c_str());
    if (!request.files.key.empty()) set(CURLOPT_SSLKEY, request.files.key.c_str());
    curl_slist* headers = curl().append(nullptr, "Content-Type: application/json");
    // Without this header, libcurl may wait for "100 Continue" before it sends a large body.
    headers = curl().append(headers, "Expect:");
    if (!request.authorization.empty()) {
      headers = curl().append(headers, ("Authorization: " + request.authorization).c_str());
    }
    set(CURLOPT_HTTPHEADER, headers);
    error_[0] = '\0';
    const CURLcode outcome = curl().perform(handle_);
    set(CURLOPT_HTTPHEADER, nullptr);
    curl().free_all(headers);
    Answer answer;
    curl().getinfo(handle_, CURLINFO_RESPONSE_CODE, &answer.status);
    if (outcome != CURLE_OK && !sink.enough) return tl::unexpected(failure(outcome));
    answer.body = std::move(sink.bytes);
    return answer;
  }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    curl().setopt(handle_, option, value);
  }

  HttpFailure failure(CURLcode outcome) {
    curl_off_t sending = 0, greeted = 0;  // in us; `greeted`: end of the TLS handshake, 0 without one
    curl().getinfo(handle_, CURLINFO_PRETRANSFER_TIME_T, &sending);
    curl().getinfo(handle_, CURLINFO_APPCONNECT_TIME_T, &greeted);
    std::string text = error_[0] != '\0' ? error_.data() : curl().strerror(outcome);
    // In TLS 1.3 a server checks the client's certificate after the client has finished its side of the handshake. So a
    // refused certificate looks like a connection that ends right after the handshake.
    const bool ended = outcome == CURLE_RECV_ERROR || outcome == CURLE_SEND_ERROR || outcome == CURLE_GOT_NOTHING;
    if (ended && greeted > 0)
      text +=
          "; the server may not accept the client's certificate, as the connection ended right after the TLS handshake";
    return {Error{code_of(outcome), text}, sending > 0};
  }

  const pid_t process_ = getpid();
  CURL* handle_;
  std::array<char, CURL_ERROR_SIZE> error_{};
};

}  // namespace

Result<std::unique_ptr<Http>> Http::create() {
  CURL* handle = curl().loaded ? curl().init() : nullptr;
  if (handle == nullptr) {
    return fail(ErrorCode::kUnsupported, "etcd:// stores need libcurl, which is not installed: install libcurl4");
  }
  return std::make_unique<CurlHttp>(handle);
}

}  // namespace muster
