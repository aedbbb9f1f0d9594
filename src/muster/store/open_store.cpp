#include <cstdlib>

#include "muster/io/connect/handshake.h"
#include "muster/store/etcd/etcd_store.h"
#include "muster/store/redis/redis_store.h"
#include "muster/store/remote_store.h"
#include "muster/store/store.h"
#include "muster/store/url.h"

namespace muster {

#ifndef MUSTER_WITH_REDIS
Result<std::unique_ptr<Store>> redis_store(const std::string&, const Deadline&) {
  return fail(ErrorCode::kUnsupported,
              "this build of muster has no Redis: install libhiredis-dev and build it again, or use tcp:// or etcd://");
}
#endif
#ifndef MUSTER_WITH_ETCD
Result<std::unique_ptr<Store>> etcd_store(const std::string&, const Deadline&) {
  return fail(ErrorCode::kUnsupported,
              "this build of muster has no etcd: install libcurl4-openssl-dev and build it again, or use tcp:// or "
              "redis://");
}
#endif

Result<std::unique_ptr<Store>> open_store(const std::string& url, ByteView secret, const Deadline& deadline) {
  MUSTER_TRY(check_secret(secret, "secret"));
  constexpr std::string_view kFileScheme = "file://";
  if (url == "memory:") return memory_store();
  if (url.starts_with(kFileScheme)) return file_store(url.substr(kFileScheme.size()));
  if (url.starts_with("tcp://") || url.starts_with("unix:")) {
    Credentials credentials{Bytes(secret.begin(), secret.end()), nullptr};
    MUSTER_ASSIGN(credentials.tls, TlsContext::from_environment());
    return remote_store(url, std::move(credentials), deadline);
  }
  for (const char* scheme : {"redis://", "rediss://", "redis+unix://"}) {
    if (url.starts_with(scheme)) return redis_store(url, deadline);
  }
  if (url.starts_with("etcd://") || url.starts_with("etcds://")) return etcd_store(url, deadline);
  return fail(ErrorCode::kInvalidArgument,
              "there is no store at \"" + without_password(url) +
                  "\"; a store's URL is tcp://host:port, unix:/path, unix:@name, redis[s]://host:port, "
                  "etcd[s]://host:port, file:///path or memory:");
}

Result<std::unique_ptr<Store>> store_from_environment(const Deadline& deadline) {
  const char* url = std::getenv("MUSTER_STORE");
  if (url == nullptr) {
    return fail(ErrorCode::kNotFound, "MUSTER_STORE is not set: this process was not started by `muster run`");
  }
  // Each generation of the job has its own keys, so a restarted job does not see the keys of the generation before.
  const char* generation = std::getenv("MUSTER_GENERATION");
  if (generation == nullptr && std::getenv("MUSTER_RUN_ID") != nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "MUSTER_GENERATION is not set, but MUSTER_RUN_ID is: a process that a worker starts needs all MUSTER_ "
                "variables that `muster run` sets");
  }
  MUSTER_ASSIGN(const Bytes secret, secret_from_environment());
  MUSTER_ASSIGN(std::unique_ptr<Store> store, open_store(url, secret, deadline));
  if (generation == nullptr) return store;
  return prefix_store("generation/" + std::string(generation), std::move(store));
}

}  // namespace muster
