// The launcher's job board in a store that anyone with the secret can write to: the first byte says under which key the
// rest is found. The board takes it or refuses it, within the bounds that it promises.
#include "muster/base/check.h"
#include "muster/launch/job.h"

namespace muster {
namespace {

const NodeInfo kSelf{"here", 7, 2, 2};

void join(Store& store) {
  JobBoard board(store, "run");
  const auto placement = board.join(kSelf, 0, std::chrono::milliseconds(0));
  if (!placement) return;
  MUSTER_CHECK(placement->node_rank == 0 && placement->first_rank == 0, "the first node is not the first");
  MUSTER_CHECK(placement->world_size > kSelf.nproc && placement->world_size <= kSelf.nproc + (1 << 16),
               "a node brings an impossible number of workers");
}

void hear_outcome(Store& store, const Deadline& deadline) {
  JobBoard board(store, "run");
  const auto heard = board.await_outcome(deadline);
  const auto held = board.conclude(Outcome{3, "a report", 1}, deadline);
  MUSTER_CHECK(heard.has_value() == held.has_value(), "one outcome is good and bad");
  if (heard) MUSTER_CHECK(heard->status == held->status && heard->report == held->report, "one outcome is read as two");
}

void read_board(uint8_t where, ByteView value) {
  static constexpr const char* kKeys[] = {"job", "node/0", "node/1", "outcome"};
  const Deadline deadline = Deadline::after(std::chrono::seconds(30));
  const auto store = memory_store();
  const auto put = [&](const std::string& key, ByteView bytes) {
    MUSTER_CHECK(store->set("muster/run/run/" + key, bytes, deadline).has_value(), "the memory store refuses a value");
  };
  put("node/1", as_bytes(R"({"host":"there","pid":8,"nproc":3,"nnodes":2})"));
  put(kKeys[where % 4], value);
  if (where % 4 == 3) return hear_outcome(*store, deadline);
  join(*store);
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // No value at all counts as no key: then the board's own stands.
  if (size > 1) muster::read_board(data[0], {data + 1, size - 1});
  return 0;
}
