#include "root_work.h"

#include <cstdlib>

#include "muster/store/stat.h"

namespace muster::load {

Figures figures_of(const RootWork& work, Duration time) {
  Figures figures{{"time", std::chrono::duration<double>(time).count()},
                  {"cpu", work.cpu},
                  {"messages", work.messages_in + work.messages_out}};
  if (work.bytes_in > 0) figures["bytes"] = work.bytes_in + work.bytes_out;
  return figures;
}

Result<Bytes> secret_of_job() {
  const char* hex = std::getenv("MUSTER_SECRET");
  return from_hex(hex != nullptr ? hex : "");
}

Result<RootMeter> RootMeter::create(const std::string& url, pid_t pid, const Deadline& deadline) {
  std::unique_ptr<Store> store;
  if (!url.empty()) {
    MUSTER_ASSIGN(const Bytes secret, secret_of_job());
    MUSTER_ASSIGN(store, open_store(url, secret, deadline));
  }
  RootMeter meter(std::move(store), pid, deadline);
  MUSTER_ASSIGN(meter.before_, meter.since_the_beginning());
  return meter;
}

Result<RootWork> RootMeter::since_the_beginning() {
  RootWork work;
  work.cpu = server_.cpu_seconds();
  if (!store_) return work;
  MUSTER_ASSIGN(const StoreStat stat, store_->stat(deadline_));
  work.messages_in = static_cast<double>(stat.messages_in);
  work.messages_out = static_cast<double>(stat.messages_out);
  work.bytes_in = static_cast<double>(stat.bytes_in);
  work.bytes_out = static_cast<double>(stat.bytes_out);
  return work;
}

Result<RootWork> RootMeter::work() {
  MUSTER_ASSIGN(RootWork now, since_the_beginning());
  now.cpu -= before_.cpu;
  now.messages_in -= before_.messages_in;
  now.messages_out -= before_.messages_out;
  now.bytes_in -= before_.bytes_in;
  now.bytes_out -= before_.bytes_out;
  return now;
}

}  // namespace muster::load
