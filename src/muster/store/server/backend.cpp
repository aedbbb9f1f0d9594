#include "muster/store/server/backend.h"

#include <deque>

namespace muster {
namespace {

class LocalBackend : public Backend {
 public:
  LocalBackend(StoreState& state, Loop& loop, Deliver deliver)
      : state_(state), loop_(loop), deliver_(std::move(deliver)) {}

  void submit(Request request, ClientId client) override {
    if (is_scan(request) && validate(request)) {
      scans_.emplace_back(std::move(request), client);
      if (scans_.size() == 1) continue_scan();
      return;
    }
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
  // Runs one step of one scan in each turn of the loop, so that other clients are served in between.
  void continue_scan() {
    const bool done = state_.scan(scans_.front());
    if (done) {
      replies_.push_back(std::move(scans_.front().reply));
      scans_.pop_front();
    }
    if (!scans_.empty()) loop_.post([this] { continue_scan(); });
    if (!done) return;
    deliver_(std::move(replies_));
    replies_.clear();
  }

  StoreState& state_;
  Loop& loop_;
  Deliver deliver_;
  std::deque<Scan> scans_;  // the first scan has begun
  Replies replies_;         // a member, so that not every request allocates a vector
};

}  // namespace

std::unique_ptr<Backend> local_backend(StoreState& state, Loop& loop, Backend::Deliver deliver) {
  return std::make_unique<LocalBackend>(state, loop, std::move(deliver));
}

}  // namespace muster
