#include "muster/store/server/backend.h"

namespace muster {
namespace {

class LocalBackend : public Backend {
 public:
  LocalBackend(StoreState& state, Deliver deliver) : state_(state), deliver_(std::move(deliver)) {}

  void submit(Request request, ClientId client) override {
    state_.apply(std::move(request), client, replies_);
    if (!replies_.empty()) deliver_(std::move(replies_));
    replies_.clear();
  }
  void drop(ClientId client) override { state_.drop(client); }
  uint64_t revoke(ClientId client) override {
    Replies freed;
    const uint64_t revocations = state_.revoke(client, freed);
    if (!freed.empty()) deliver_(std::move(freed));
    return revocations;
  }
  uint64_t grants_ended() const override { return 0; }
  void serves_proxies(size_t) override {}
  Duration lease_left() const override { return Duration::max(); }

 private:
  StoreState& state_;
  Deliver deliver_;
  Replies replies_;  // kept, so that a request allocates none
};

}  // namespace

std::unique_ptr<Backend> local_backend(StoreState& state, Backend::Deliver deliver) {
  return std::make_unique<LocalBackend>(state, std::move(deliver));
}

}  // namespace muster
