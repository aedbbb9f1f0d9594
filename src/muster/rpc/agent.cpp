#include "muster/rpc/agent.h"

#include <fmt/format.h>

namespace muster::rpc {

std::string WorkerInfo::to_string() const { return fmt::format("worker \"{}\" (id {})", name, id); }

Responder::~Responder() {
  if (sink_) finish(tl::unexpected(CallError{{ErrorCode::kInternal, "the function ended without a result"}, {}, {}}));
}

void Responder::finish(CallResult result) {
  if (const auto sink = std::exchange(sink_, nullptr)) sink->finish(std::move(result));
}

}  // namespace muster::rpc
