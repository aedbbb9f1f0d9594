#include "muster/store/backend.h"

namespace muster {
namespace {

class LocalBackend : public Backend {
 public:
  explicit LocalBackend(Deliver deliver) : deliver_(std::move(deliver)) {}
  void submit(Request request, ClientId client) override { deliver_(state_.apply(std::move(request), client)); }
  void drop(ClientId client) override { state_.drop(client); }

 private:
  StoreState state_;
  Deliver deliver_;
};

}  // namespace

std::unique_ptr<Backend> local_backend(Backend::Deliver deliver) {
  return std::make_unique<LocalBackend>(std::move(deliver));
}

}  // namespace muster
