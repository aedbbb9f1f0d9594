// Collectives on tensors that lie in shared memory (shm/arena.h). In the first step each rank publishes the location of
// its input. Then each rank reads from, or writes to, the other ranks' tensors. A last step tells that all ranks have
// finished. Whether ranks try this depends on the call alone, so all ranks decide alike.
//
// A rank that was stopped may continue after the others have failed. They may then use their tensors for something
// else. So it checks for failures before each piece that it writes to them, and before it trusts what it has read. It
// may still write one piece.
#include <cstring>
#include <type_traits>

#include "muster/base/log.h"
#include "muster/collective/host/host_call.h"

namespace muster {
namespace {

/// The location of a rank's input, which the rank publishes in the payload of the first step.
struct Location {
  Arena::Location in_arena;
  uint32_t known = 0;  ///< 1 if the peers have mapped this segment before, and so can map it again
};
static_assert(sizeof(Location) <= kStepPayload && std::is_trivially_copyable_v<Location>);

/// Bytes at a rank's location.
size_t bytes_at(const HostCall& run, Rank rank) {
  const HostBlocks blocks(run.call.bytes(), run.operation.counts, run.element);
  if (has_input_blocks(run.call.collective)) return blocks.begin(run.size);
  return has_output_blocks(run.call.collective) ? blocks.bytes(rank) : run.call.bytes();
}

bool is_large_enough(const HostCall& run) {
  const Call& call = run.call;
  if (call.collective == Collective::kBarrier || (call.collective == Collective::kAllToAll && call.layout != 0)) {
    return false;
  }
  if (reduces(call.collective) && call.op == ReduceOp::kPremulSum) return false;
  size_t bytes = 0;
  for (Rank rank = 0; rank < run.size; ++rank) bytes = std::max(bytes, bytes_at(run, rank));
  return bytes >= kMinSharedTensorBytes;
}

/// True if other ranks read this rank's input.
bool needed(const HostCall& run, Rank rank) {
  const bool from_root = run.call.collective == Collective::kBroadcast || run.call.collective == Collective::kScatter;
  return !from_root || rank == run.call.root;
}

class Direct {
 public:
  explicit Direct(HostCall& run)
      : run_(run), blocks_(run.call.bytes(), run.operation.counts, run.element), at_(run.size, nullptr) {}

  Result<bool> execute() {
    MUSTER_TRY(exchange());
    if (!complete_) return false;
    if (fresh_) {
      MUSTER_ASSIGN(const bool confirmed, confirm());
      if (!confirmed) return false;
    }
    MUSTER_TRY(map());
    MUSTER_TRY(move());
    MUSTER_TRY(run_.comm.check());
    MUSTER_TRY(run_.begin(0));
    run_.comm.publish();
    MUSTER_TRY(run_.comm.wait_all(run_.comm.step(), run_.deadline));
    return true;
  }

 private:
  Location own_location() const {
    Location own;
    const BufferView& input = run_.operation.input;
    if (!needed(run_, run_.rank) || !input.contiguous() || run_.comm.arena() == nullptr) return own;
    const auto found = run_.comm.arena()->find(input.data(), bytes_at(run_, run_.rank));
    if (!found) return own;
    own.in_arena = *found;
    own.known = run_.comm.peer_memory().is_known(found->segment) ? 1 : 0;
    return own;
  }

  Result<> exchange() {
    MUSTER_TRY(run_.begin(sizeof(Location)));
    const Location own = own_location();
    std::memcpy(run_.comm.payload(), &own, sizeof(own));
    run_.comm.publish();
    const uint32_t step = run_.comm.step();
    MUSTER_TRY(run_.comm.wait_all(step, run_.deadline));
    for (Rank peer = 0; peer < run_.size; ++peer) {
      Location& location = locations_.emplace_back();
      std::memcpy(&location, run_.comm.payload(peer, step), sizeof(location));
      if (!needed(run_, peer)) continue;
      complete_ = complete_ && location.in_arena.segment != 0;
      fresh_ = fresh_ || location.known == 0;
    }
    return {};
  }

  /// Used if a rank publishes a segment for the first time. Each rank tells whether it could map all segments. No rank
  /// continues before it knows that all ranks could.
  Result<bool> confirm() {
    const auto mapped = map();
    MUSTER_TRY(run_.begin(1));
    run_.comm.payload()[0] = mapped ? 1 : 0;
    run_.comm.publish();
    const uint32_t step = run_.comm.step();
    MUSTER_TRY(run_.comm.wait_all(step, run_.deadline));
    bool all = true;
    for (Rank peer = 0; peer < run_.size; ++peer) all = all && run_.comm.payload(peer, step)[0] == 1;
    if (!all) run_.comm.disable_direct();
    if (!mapped) log(LogLevel::kDebug, "tensors in shared memory are copied: " + mapped.error().message);
    if (all && needed(run_, run_.rank)) run_.comm.peer_memory().add_known(locations_[run_.rank].in_arena.segment);
    return all;
  }

  Result<> map() {
    for (Rank peer = 0; peer < run_.size; ++peer) {
      if (!needed(run_, peer)) continue;
      if (peer == run_.rank) {
        at_[peer] = run_.operation.input.data();
        continue;
      }
      const Arena::Location& location = locations_[peer].in_arena;
      MUSTER_ASSIGN(at_[peer], run_.comm.peer_memory().map(run_.comm.pid(peer), location, bytes_at(run_, peer)));
    }
    return {};
  }

  Result<> move() {
    switch (run_.call.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        return combine_part();
      case Collective::kReduceScatter:
        combine_block();
        break;
      case Collective::kBroadcast:
        if (run_.rank != run_.call.root) run_.operation.output.write(0, at_[run_.call.root], run_.call.bytes());
        break;
      case Collective::kScatter:
        take_block();
        break;
      case Collective::kGather:
        if (run_.rank == run_.call.root) collect();
        break;
      default:
        collect();
    }
    return {};
  }

  /// Combines the own part of all ranks' tensors into the tensors of all ranks that need the result.
  Result<> combine_part() {
    const size_t bytes = run_.call.bytes(), grain = 64, grains = (bytes + grain - 1) / grain;
    const auto bound = [&](Rank rank) { return std::min(bytes, grains * rank / run_.size * grain); };
    const bool all = run_.call.collective == Collective::kAllReduce;
    const Rank target = all ? run_.rank : run_.call.root;
    auto& sources = run_.comm.pointers();
    for (size_t begin = bound(run_.rank), end = bound(run_.rank + 1); begin < end; begin += kCachedBytes) {
      const size_t here = std::min(kCachedBytes, end - begin);
      for (Rank peer = 0; peer < run_.size; ++peer) sources[peer] = at_[peer] + begin;
      MUSTER_TRY(run_.comm.check());
      run_.combine(at_[target] + begin, sources.data(), here);
      for (Rank peer = 0; all && peer < run_.size; ++peer) {
        if (peer != target) std::memcpy(at_[peer] + begin, at_[target] + begin, here);
      }
    }
    return {};
  }

  /// Copies the own block of the root's input. At the root, it may already be in place.
  void take_block() {
    const size_t begin = blocks_.begin(run_.rank), bytes = blocks_.bytes(run_.rank);
    if (run_.rank == run_.call.root) return run_.copy_own(begin, 0, bytes);
    run_.operation.output.write(0, at_[run_.call.root] + begin, bytes);
  }

  void combine_block() {
    auto& sources = run_.comm.pointers();
    const size_t begin = blocks_.begin(run_.rank);
    for (Rank peer = 0; peer < run_.size; ++peer) sources[peer] = at_[peer] + begin;
    run_.combine_out(0, sources.data(), blocks_.bytes(run_.rank));
  }

  /// Copies the blocks of all ranks to the output. The own block is copied only if it is not already in place.
  void collect() {
    const bool exchange = run_.call.collective == Collective::kAllToAll;
    for (Rank turn = 0; turn < run_.size; ++turn) {
      const Rank peer = (run_.rank + turn) % run_.size;
      const size_t from = exchange ? blocks_.begin(run_.rank) : 0, to = blocks_.begin(peer);
      if (peer == run_.rank) {
        run_.copy_own(from, to, blocks_.bytes(peer));
      } else {
        run_.operation.output.write(to, at_[peer] + from, blocks_.bytes(peer));
      }
    }
  }

  HostCall& run_;
  const HostBlocks blocks_;
  std::vector<Location> locations_;
  std::vector<uint8_t*> at_;  ///< the address of every needed rank's input in this process
  bool complete_ = true;      ///< all needed inputs lie in arenas
  bool fresh_ = false;
};

}  // namespace

Result<bool> run_on_shared_tensors(HostCall& run) {
  if (!is_large_enough(run)) return false;
  return Direct(run).execute();
}

}  // namespace muster
