#include "serve.h"

#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "muster/store/server/server.h"
#include "root_work.h"

namespace muster::load {

Result<> serve(const ServeOptions& options) {
  const Deadline deadline = Deadline::after(std::chrono::minutes(1));
  MUSTER_ASSIGN(const Address any, Address::parse("127.0.0.1:0"));
  StoreServerOptions server;
  MUSTER_ASSIGN(server.credentials.secret, secret_of_job());
  server.torch_listen = server.muster_listen = {any};
  server.tiered = true;
  std::vector<std::unique_ptr<StoreServer>> servers;
  auto torch = nlohmann::json::array(), muster = nlohmann::json::array();
  for (size_t i = 0; i < options.count; ++i) {
    if (!options.upstreams.empty()) server.upstream = options.upstreams[i % options.upstreams.size()];
    MUSTER_ASSIGN(auto started, StoreServer::start(server, deadline));
    torch.push_back(started->torch_addresses()[0].to_string());
    muster.push_back("tcp://" + started->muster_addresses()[0].to_string());
    servers.push_back(std::move(started));
  }
  std::printf("%s\n", nlohmann::json{{"torch", torch}, {"muster", muster}}.dump().c_str());
  std::fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) continue;
  return {};
}

}  // namespace muster::load
