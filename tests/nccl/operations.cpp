#include "nccl/operations.h"

#include <cstring>

#include "muster/kernels/reduce.h"

namespace muster::fake_nccl {
namespace {

using Bytes = std::vector<uint8_t>;

/// An operation while it runs: the inputs of the ranks that this rank reduces, and what it does with them at the end.
class Running {
 public:
  Running(const Communicator& communicator, const Operation& operation, std::vector<Transfer>& transfers)
      : communicator_(communicator), operation_(operation), bytes_(operation.count * size_of(operation.dtype)) {
    const auto* const from = static_cast<const uint8_t*>(operation.from);
    auto* const to = static_cast<uint8_t*>(operation.to);
    const bool is_root = operation.peer == communicator.rank;
    switch (operation.kind) {
      case Kind::kAllReduce:
        keep_input(from, bytes_);
        for_peers([&](int peer) { exchange(transfers, peer, input_.data(), block(peer)); });
        break;
      case Kind::kReduce:
        keep_input(from, bytes_);
        if (is_root) {
          for_peers([&](int peer) { transfers.push_back({false, peer, block(peer), bytes_}); });
        } else {
          transfers.push_back({true, operation.peer, input_.data(), bytes_});
        }
        break;
      case Kind::kReduceScatter:
        keep_input(from, bytes_ * static_cast<size_t>(communicator.size));
        for_peers([&](int peer) {
          exchange(transfers, peer, input_.data() + static_cast<size_t>(peer) * bytes_, block(peer));
        });
        break;
      case Kind::kBroadcast:
        keep_input(is_root ? from : nullptr, bytes_);
        if (is_root) {
          for_peers([&](int peer) { transfers.push_back({true, peer, input_.data(), bytes_}); });
        } else {
          transfers.push_back({false, operation.peer, to, bytes_});
        }
        break;
      case Kind::kAllGather:
        keep_input(from, bytes_);
        for_peers([&](int peer) { exchange(transfers, peer, input_.data(), to + static_cast<size_t>(peer) * bytes_); });
        break;
      case Kind::kSend:
        keep_input(from, bytes_);
        transfers.push_back({true, operation.peer, input_.data(), bytes_});
        break;
      case Kind::kReceive:
        transfers.push_back({false, operation.peer, to, bytes_});
        break;
    }
  }

  void finish() {
    if (bytes_ == 0) return;
    auto* const to = static_cast<uint8_t*>(operation_.to);
    const auto self = static_cast<size_t>(communicator_.rank);
    switch (operation_.kind) {
      case Kind::kAllReduce:
        return reduce(input_.data());
      case Kind::kReduce:
        if (operation_.peer == communicator_.rank) reduce(input_.data());
        return;
      case Kind::kReduceScatter:
        return reduce(input_.data() + self * bytes_);
      case Kind::kBroadcast:
        if (operation_.peer == communicator_.rank) std::memmove(to, input_.data(), bytes_);
        return;
      case Kind::kAllGather:
        std::memmove(to + self * bytes_, input_.data(), bytes_);
        return;
      default:
        return;
    }
  }

 private:
  template <class Body>
  void for_peers(const Body& body) const {
    for (int peer = 0; peer < communicator_.size; ++peer) {
      if (peer != communicator_.rank) body(peer);
    }
  }
  /// A copy, because the output may overlap it.
  void keep_input(const uint8_t* from, size_t bytes) {
    input_.resize(bytes);
    if (from != nullptr && bytes > 0) std::memcpy(input_.data(), from, bytes);
    if (operation_.factor != 1) {
      scale(input_.data(), input_.data(), bytes / size_of(operation_.dtype), operation_.dtype, operation_.factor);
    }
    blocks_.resize(static_cast<size_t>(communicator_.size));
  }
  uint8_t* block(int peer) {
    Bytes& made = blocks_[static_cast<size_t>(peer)];
    made.resize(bytes_);
    return made.data();
  }
  void exchange(std::vector<Transfer>& transfers, int peer, uint8_t* out, uint8_t* in) const {
    transfers.push_back({true, peer, out, bytes_});
    transfers.push_back({false, peer, in, bytes_});
  }
  /// In the order of ranks, so that all ranks get the same bits.
  void reduce(const uint8_t* own) {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < communicator_.size; ++rank) {
      inputs.push_back(rank == communicator_.rank ? own : blocks_[static_cast<size_t>(rank)].data());
    }
    if (operation_.op == ReduceOp::kAverage) {
      average_many(operation_.to, inputs.data(), communicator_.size, operation_.count, operation_.dtype);
    } else {
      reduce_many(operation_.to, inputs.data(), communicator_.size, operation_.count, operation_.dtype, operation_.op);
    }
  }

  const Communicator& communicator_;
  const Operation& operation_;
  const size_t bytes_;
  Bytes input_;
  std::vector<Bytes> blocks_;  ///< of the other ranks
};

}  // namespace

bool run(Communicator& communicator, const std::vector<Operation>& operations) {
  std::vector<Running> running;
  running.reserve(operations.size());  // transfers point into them
  std::vector<Transfer> transfers;
  for (const Operation& each : operations) running.emplace_back(communicator, each, transfers);
  if (!communicator.run(transfers)) return false;
  for (Running& each : running) each.finish();
  return true;
}

}  // namespace muster::fake_nccl
