#include "muster/collective/host/host_collectives.h"

#include <fmt/format.h>

#include <cstring>

#include "muster/collective/host/host_call.h"
#include "muster/kernels/reduce.h"

namespace muster {

void HostCall::read_in(size_t offset, void* to, size_t bytes) const {
  if (call.op != ReduceOp::kPremulSum || !reduces(call.collective)) return operation.input.read(offset, to, bytes);
  operation.input.visit(offset, bytes, [&](const uint8_t* from, size_t here) {
    scale(to, from, here / element, call.dtype, operation.factor);
    to = static_cast<uint8_t*>(to) + here;
  });
}

void HostCall::combine(void* out, const void* const* sources, size_t bytes) const {
  const size_t count = bytes / element;
  if (call.op == ReduceOp::kAverage) return average_many(out, sources, size, count, call.dtype);
  reduce_many(out, sources, size, count, call.dtype, call.op);
}

void HostCall::combine_out(size_t offset, const void** sources, size_t bytes) const {
  operation.output.visit(offset, bytes, [&](uint8_t* out, size_t here) {
    combine(out, sources, here);
    for (int i = 0; i < size; ++i) sources[i] = static_cast<const uint8_t*>(sources[i]) + here;
  });
}

void HostCall::copy_own(size_t from, size_t to, size_t bytes) const {
  operation.input.visit(from, bytes, [&](const uint8_t* source, size_t here) {
    operation.output.visit(to, here, [&](uint8_t* target, size_t now) {
      if (target != source) std::memcpy(target, source, now);
      source += now;
    });
    to += here;
  });
}

Result<> host_barrier(HostCall& run) {
  MUSTER_TRY(run.begin(0));
  run.comm.publish();
  return run.comm.wait_all(run.comm.step(), run.deadline);
}

namespace {

/// In the order of Collective, which begins with 1.
constexpr Result<> (*kForms[kCollectiveCount])(HostCall&) = {
    nullptr,         host_all_reduce, host_broadcast, host_all_gather,     host_barrier,
    host_all_reduce, host_scatter,    host_gather,    host_reduce_scatter, host_all_to_all};

Result<> dispatch(HostCall& run) {
  if (run.comm.all_direct()) {
    MUSTER_ASSIGN(const bool done, run_on_shared_tensors(run));
    if (done) return {};
  }
  const auto form = kForms[static_cast<size_t>(run.call.collective)];
  if (form != nullptr) return form(run);
  return fail(ErrorCode::kUnsupported, "this collective has no form in shared memory");
}

/// Adds both calls to the message of a mismatch.
void annotate_mismatch(const HostComm& comm, const Call& mine, Error& error) {
  if (error.code != ErrorCode::kMismatch || !comm.foreign_tag()) return;
  const Rank peer = error.rank;
  const std::string theirs = Call::unpack(*comm.foreign_tag()).to_string();
  // A scatter, for example, ends before all ranks have compared it; then the next call finds the mismatch.
  const std::string what =
      *comm.foreign_tag() == mine.pack()
          ? fmt::format("rank {} and rank {} made different calls before {}", peer, comm.rank(), theirs)
          : fmt::format("rank {} called {} where rank {} called {}", peer, theirs, comm.rank(), mine.to_string());
  error = {ErrorCode::kMismatch, what + "; all ranks must make the same calls in the same order", peer, {}};
}

}  // namespace

Result<> run_on_host(HostComm& comm, const Operation& operation, const Deadline& deadline) {
  comm.open(operation.reported_call().pack());
  HostCall run{comm, operation, deadline};
  auto result = dispatch(run);
  if (!result) annotate_mismatch(comm, operation.reported_call(), result.error());
  return result;
}

}  // namespace muster
