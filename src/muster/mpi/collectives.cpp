#include "muster/mpi/collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/mpi/datatypes.h"

namespace muster::mpi {
namespace {

/// A view in one piece. Views in several pieces are copied.
class Contiguous {
 public:
  explicit Contiguous(const BufferView& view, bool reads) : view_(view) {
    if (view.contiguous()) return;
    copy_.resize(view.bytes());
    if (reads) view.read(0, copy_.data(), copy_.size());
  }
  uint8_t* data() { return view_.contiguous() ? view_.data() : copy_.data(); }
  void write_back() {
    if (!view_.contiguous()) view_.write(0, copy_.data(), copy_.size());
  }

 private:
  const BufferView& view_;
  Bytes copy_;
};

/// Lengths and offsets of blocks, as MPI takes them.
struct Blocks {
  explicit Blocks(const std::vector<size_t>& counts) {
    int offset = 0;
    for (const size_t count : counts) {
      lengths.push_back(static_cast<int>(count));
      offsets.push_back(offset);
      offset += static_cast<int>(count);
    }
  }
  std::vector<int> lengths, offsets;
};

bool lies_in(const uint8_t* part, const uint8_t* whole, size_t bytes) { return part >= whole && part < whole + bytes; }

class CollectiveCall {
 public:
  CollectiveCall(const Library& mpi, Handle comm, Rank self, const Operation& operation)
      : mpi_(mpi), comm_(comm), root_(operation.call.root == self), operation_(operation) {}

  Result<> run() {
    MUSTER_ASSIGN(type_, type_of(mpi_, call().dtype));
    if (reduces(call().collective)) {
      MUSTER_ASSIGN(op_, op_of(mpi_, call().dtype, call().op));
    }
    switch (call().collective) {
      case Collective::kBarrier:
        return mpi_.check(mpi_.Barrier(comm_), "MPI_Barrier");
      case Collective::kAllReduce:
        return all_reduce();
      case Collective::kReduce:
        return reduce();
      case Collective::kBroadcast:
        return broadcast();
      case Collective::kAllGather:
        return all_gather();
      case Collective::kGather:
        return gather();
      case Collective::kScatter:
        return scatter();
      case Collective::kReduceScatter:
        return reduce_scatter();
      case Collective::kAllToAll:
        return all_to_all();
    }
    return fail(ErrorCode::kInternal, "unknown collective");
  }

 private:
  const Call& call() const { return operation_.call; }
  const BufferView& input() const { return operation_.input; }
  const BufferView& output() const { return operation_.output; }
  // Elements that this rank gives and gets. In collectives with even blocks, only the length of one is used.
  int sent() const { return static_cast<int>(input().count()); }
  int received() const { return static_cast<int>(output().count()); }
  bool even() const { return operation_.counts.empty(); }

  Result<> all_reduce() {
    Contiguous data(output(), true);
    MUSTER_TRY(mpi_.check(mpi_.Allreduce(mpi_.in_place, data.data(), received(), type_, op_, comm_), "MPI_Allreduce"));
    data.write_back();
    return {};
  }

  Result<> reduce() {
    Contiguous data(input(), true);
    Bytes copy;
    const void* from = data.data();
    if (root_ && call().root == 0) {
      from = mpi_.in_place;
    } else if (root_) {  // MPICH 4.0 crashes with MPI_IN_PLACE at other roots than rank 0
      copy.assign(data.data(), data.data() + input().bytes());
      from = copy.data();
    }
    MUSTER_TRY(mpi_.check(mpi_.Reduce(from, root_ ? data.data() : nullptr, sent(), type_, op_, call().root, comm_),
                          "MPI_Reduce"));
    if (root_) data.write_back();
    return {};
  }

  Result<> broadcast() {
    Contiguous data(output(), root_);
    MUSTER_TRY(mpi_.check(mpi_.Bcast(data.data(), received(), type_, call().root, comm_), "MPI_Bcast"));
    if (!root_) data.write_back();
    return {};
  }

  Result<> all_gather() {
    Contiguous from(input(), true), to(output(), true);
    const bool in_place = lies_in(from.data(), to.data(), output().bytes());
    const void* const block = in_place ? mpi_.in_place : from.data();
    if (even()) {
      MUSTER_TRY(mpi_.check(mpi_.Allgather(block, sent(), type_, to.data(), sent(), type_, comm_), "MPI_Allgather"));
    } else {
      const Blocks blocks(operation_.counts);
      MUSTER_TRY(mpi_.check(
          mpi_.Allgatherv(block, sent(), type_, to.data(), blocks.lengths.data(), blocks.offsets.data(), type_, comm_),
          "MPI_Allgatherv"));
    }
    to.write_back();
    return {};
  }

  Result<> gather() {
    Contiguous from(input(), true), to(output(), true);
    const bool in_place = root_ && lies_in(from.data(), to.data(), output().bytes());
    MUSTER_TRY(mpi_.check(mpi_.Gather(in_place ? mpi_.in_place : from.data(), sent(), type_,
                                      root_ ? to.data() : nullptr, sent(), type_, call().root, comm_),
                          "MPI_Gather"));
    if (root_) to.write_back();
    return {};
  }

  Result<> scatter() {
    Contiguous from(input(), true), to(output(), true);
    const bool in_place = root_ && lies_in(to.data(), from.data(), input().bytes());
    MUSTER_TRY(mpi_.check(mpi_.Scatter(root_ ? from.data() : nullptr, received(), type_,
                                       in_place ? mpi_.in_place : to.data(), received(), type_, call().root, comm_),
                          "MPI_Scatter"));
    if (!in_place) to.write_back();
    return {};
  }

  Result<> reduce_scatter() {
    Contiguous from(input(), true), to(output(), true);
    Bytes block;  // MPI does not allow the output inside the input
    const bool inside = lies_in(to.data(), from.data(), input().bytes());
    if (inside) block.resize(output().bytes());
    uint8_t* const result = inside ? block.data() : to.data();
    if (even()) {
      MUSTER_TRY(mpi_.check(mpi_.Reduce_scatter_block(from.data(), result, received(), type_, op_, comm_),
                            "MPI_Reduce_scatter_block"));
    } else {
      const Blocks blocks(operation_.counts);
      MUSTER_TRY(mpi_.check(mpi_.Reduce_scatter(from.data(), result, blocks.lengths.data(), type_, op_, comm_),
                            "MPI_Reduce_scatter"));
    }
    if (inside) {
      output().write(0, result, block.size());
    } else {
      to.write_back();
    }
    return {};
  }

  Result<> all_to_all() {
    Contiguous from(input(), true), to(output(), false);
    if (even()) {
      const int block = static_cast<int>(call().count);
      MUSTER_TRY(mpi_.check(mpi_.Alltoall(from.data(), block, type_, to.data(), block, type_, comm_), "MPI_Alltoall"));
    } else {
      const Blocks out(operation_.counts), in(operation_.receive_counts);
      MUSTER_TRY(mpi_.check(mpi_.Alltoallv(from.data(), out.lengths.data(), out.offsets.data(), type_, to.data(),
                                           in.lengths.data(), in.offsets.data(), type_, comm_),
                            "MPI_Alltoallv"));
    }
    to.write_back();
    return {};
  }

  const Library& mpi_;
  const Handle comm_;
  const bool root_;
  const Operation& operation_;
  Handle type_ = nullptr, op_ = nullptr;
};

}  // namespace

Result<> check_size(const Operation& operation) {
  // Of even blocks, MPI is told the length of one.
  const Collective kind = operation.call.collective;
  const bool even_blocks = operation.counts.empty() && (has_input_blocks(kind) || has_output_blocks(kind));
  const size_t count = even_blocks ? operation.call.count : std::max(operation.input.count(), operation.output.count());
  if (count <= INT_MAX) return {};
  return fail(ErrorCode::kUnsupported, fmt::format("{} elements: MPI takes {} at most", count, INT_MAX));
}

Result<> run_collective(const Library& mpi, Handle comm, Rank self, const Operation& operation) {
  return CollectiveCall(mpi, comm, self, operation).run();
}

}  // namespace muster::mpi
