#include "muster/nccl/collectives.h"

#include <fmt/format.h>

#include <functional>
#include <optional>
#include <vector>

#include "muster/kernels/reduce.h"

namespace muster::nccl {
namespace {

/// What NCCL reduces for a dtype. Complex numbers are pairs for it.
struct Element {
  Type type;
  int values = 1;
};

std::optional<Element> reduced_as(Dtype dtype, ReduceOp op) {
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  switch (dtype) {
    case Dtype::kUint8:
    case Dtype::kBool:
      return Element{Type::kUint8};
    case Dtype::kInt8:
      return Element{Type::kInt8};
    case Dtype::kInt32:
      return Element{Type::kInt32};
    case Dtype::kUint32:
      return Element{Type::kUint32};
    case Dtype::kInt64:
      return Element{Type::kInt64};
    case Dtype::kUint64:
      return Element{Type::kUint64};
    case Dtype::kFloat16:
      return Element{Type::kFloat16};
    case Dtype::kBfloat16:
      return Element{Type::kBfloat16};
    case Dtype::kFloat32:
      return Element{Type::kFloat32};
    case Dtype::kFloat64:
      return Element{Type::kFloat64};
    case Dtype::kComplex32:
      return adds ? std::optional(Element{Type::kFloat16, 2}) : std::nullopt;
    case Dtype::kComplex64:
      return adds ? std::optional(Element{Type::kFloat32, 2}) : std::nullopt;
    case Dtype::kComplex128:
      return adds ? std::optional(Element{Type::kFloat64, 2}) : std::nullopt;
    default:
      return std::nullopt;
  }
}

std::optional<RedOp> red_op(Dtype dtype, ReduceOp op) {
  if (dtype == Dtype::kBool) {  // 0 and 1
    const bool all = op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kBitAnd;
    return op == ReduceOp::kBitXor ? std::nullopt : std::optional(all ? RedOp::kMin : RedOp::kMax);
  }
  switch (op) {
    case ReduceOp::kSum:
      return RedOp::kSum;
    case ReduceOp::kAverage:
      return RedOp::kAverage;
    case ReduceOp::kProduct:
      return RedOp::kProduct;
    case ReduceOp::kMin:
      return RedOp::kMin;
    case ReduceOp::kMax:
      return RedOp::kMax;
    default:
      return std::nullopt;
  }
}

/// A view in one piece of the device's memory. Views in several pieces are copied, on the stream.
class Contiguous {
 public:
  Contiguous(Device& device, const BufferView& view, bool reads) : device_(device), view_(view) {
    if (view.contiguous()) return;
    copy_ = device.allocate(view.bytes());
    if (reads) each_piece([&](uint8_t* piece, uint8_t* copy, size_t bytes) { device_.copy(copy, piece, bytes); });
  }
  uint8_t* data() const { return copy_ ? static_cast<uint8_t*>(copy_.get()) : view_.data(); }
  void write_back() {
    if (copy_) each_piece([&](uint8_t* piece, uint8_t* copy, size_t bytes) { device_.copy(piece, copy, bytes); });
  }

 private:
  void each_piece(const std::function<void(uint8_t*, uint8_t*, size_t)>& body) const {
    size_t offset = 0;
    view_.visit(0, view_.bytes(), [&](uint8_t* piece, size_t bytes) {
      body(piece, data() + offset, bytes);
      offset += bytes;
    });
  }

  Device& device_;
  const BufferView& view_;
  std::shared_ptr<void> copy_;
};

/// Calls of NCCL on the current stream, with the lock of the communicator.
class StreamCalls {
 public:
  StreamCalls(const Communicator& communicator, Communicator::Lock& lock, Device& device, const Deadline& deadline)
      : nccl_(communicator.library),
        comm_(communicator.handle()),
        device_(device),
        stream_(device.stream()),
        communicator_(communicator),
        lock_(lock),
        deadline_(deadline) {}

  /// Runs several calls of NCCL as one. May be nested.
  Result<> group_call(const std::function<Result<>()>& calls) const {
    MUSTER_TRY(check(nccl_.GroupStart(), "ncclGroupStart"));
    Result<> made = calls();
    const int code = nccl_.GroupEnd();  // also after an error: the group is open
    MUSTER_TRY(made);
    return check(code, "ncclGroupEnd");
  }

 protected:
  /// Waits until NCCL has taken the call.
  Result<> check(int code, const char* what) const {
    MUSTER_TRY(nccl_.check(code, what, comm_));
    return code == kInProgress ? communicator_.wait_until_ready(lock_, what, deadline_) : Result<>{};
  }

  // Both take no bytes, too: then the other rank makes no call either.
  Result<> send(const uint8_t* data, size_t bytes, Rank to) const {
    if (bytes == 0) return {};
    return check(nccl_.Send(data, bytes, Type::kUint8, to, comm_, stream_), "ncclSend");
  }
  Result<> receive(uint8_t* data, size_t bytes, Rank from) const {
    if (bytes == 0) return {};
    return check(nccl_.Recv(data, bytes, Type::kUint8, from, comm_, stream_), "ncclRecv");
  }

  const Library& nccl_;
  const Comm comm_;
  Device& device_;
  const Stream stream_;

 private:
  const Communicator& communicator_;
  Communicator::Lock& lock_;
  const Deadline& deadline_;
};

/// One collective: prepare(), lock, begin(), run(), finish(). Between run() and finish(), NCCL must have taken the
/// call.
class CollectiveCall : private StreamCalls {
 public:
  CollectiveCall(const StreamCalls& calls, const GroupSpec& self, const Operation& operation)
      : StreamCalls(calls), self_(self), operation_(operation) {}

  /// Checks the call, and copies views in several pieces. kUnsupported: NCCL has no such reduction. Before the lock,
  /// because the device may wait for kernels before it gives memory, and abort() needs the lock to end them.
  Result<> prepare() {
    if (call().collective == Collective::kBarrier) {
      word_ = device_.allocate(sizeof(int32_t));
      return {};
    }
    if (reduces(call().collective)) MUSTER_TRY(check_reduction());
    const bool overwrites =
        call().collective == Collective::kReduceScatter || (call().collective == Collective::kBroadcast && !is_root());
    if (!in_place()) from_.emplace(device_, operation_.input, true);
    const bool reduces_to_root = call().collective == Collective::kReduce;  // elsewhere there is no output
    to_.emplace(device_, reduces_to_root ? operation_.input : operation_.output, !overwrites);
    return {};
  }

  Result<> begin() {
    if (premultiplies()) {
      MUSTER_ASSIGN(op_, premultiplied(element_));
    }
    return {};
  }

  Result<> run() {
    switch (call().collective) {
      case Collective::kBarrier:
        return all_reduce(word_.get(), 1, Type::kInt32, static_cast<int>(RedOp::kMax));
      case Collective::kAllReduce:
        return all_reduce(to_->data(), values(operation_.output.count()), element_.type, op_);
      case Collective::kReduce:
        return reduce(to_->data(), to_->data(), operation_.input.count(), call().root);
      case Collective::kReduceScatter:
        return reduce_scatter();
      case Collective::kBroadcast:
        return broadcast(to_->data(), to_->data(), operation_.output.bytes(), call().root);
      case Collective::kAllGather:
        return all_gather();
      default:
        return exchange();
    }
  }

  Result<> finish() {
    const bool unchanged = (call().collective == Collective::kReduce && !is_root()) ||
                           (call().collective == Collective::kBroadcast && is_root());
    if (to_ && !unchanged) to_->write_back();
    return release();
  }
  /// Instead of run() and finish(), after begin().
  Result<> release() {
    return premultiplies() ? check(nccl_.RedOpDestroy(op_, comm_), "ncclRedOpDestroy") : Result<>{};
  }

 private:
  const Call& call() const { return operation_.call; }
  bool is_root() const { return call().root == self_.rank; }
  bool even() const { return operation_.counts.empty(); }
  bool premultiplies() const { return reduces(call().collective) && call().op == ReduceOp::kPremulSum; }
  bool in_place() const {
    return call().collective == Collective::kAllReduce || call().collective == Collective::kReduce ||
           call().collective == Collective::kBroadcast;
  }

  // ---- reductions

  Result<> check_reduction() {
    const auto element = reduced_as(call().dtype, call().op);
    const auto plain = red_op(call().dtype, call().op);
    if (!element || !(plain || (premultiplies() && has_factor(element->type)))) {
      return fail(ErrorCode::kUnsupported,
                  fmt::format("NCCL cannot reduce {} by {}", name(call().dtype), name(call().op)));
    }
    element_ = *element;
    if (plain) op_ = static_cast<int>(*plain);
    return {};
  }
  static bool has_factor(Type type) {
    return type == Type::kFloat16 || type == Type::kBfloat16 || type == Type::kFloat32 || type == Type::kFloat64;
  }

  Result<int> premultiplied(const Element& element) const {
    // NCCL reads the factor in the element's type: as many bytes of a one, times the factor.
    union {
      uint16_t half;
      float single;
      double wide;
    } factor;
    switch (element.type) {
      case Type::kFloat16:
        factor.half = 0x3C00;
        break;
      case Type::kBfloat16:
        factor.half = 0x3F80;
        break;
      case Type::kFloat32:
        factor.single = 1;
        break;
      case Type::kFloat64:
        factor.wide = 1;
        break;
      default:
        return fail(ErrorCode::kInternal, "a factor for a type that has none");
    }
    scale(&factor, &factor, 1, call().dtype, operation_.factor);
    int op = 0;
    constexpr int kOnHost = 1;  // ncclScalarHostImmediate
    MUSTER_TRY(
        check(nccl_.RedOpCreatePreMulSum(&op, &factor, element.type, kOnHost, comm_), "ncclRedOpCreatePreMulSum"));
    return op;
  }

  size_t values(size_t elements) const { return elements * element_.values; }

  Result<> all_reduce(void* data, size_t count, Type type, int op) const {
    return check(nccl_.AllReduce(data, data, count, type, op, comm_, stream_), "ncclAllReduce");
  }
  Result<> reduce(const uint8_t* from, uint8_t* to, size_t elements, Rank root) const {
    return check(nccl_.Reduce(from, to, values(elements), element_.type, op_, root, comm_, stream_), "ncclReduce");
  }
  Result<> reduce_scatter() const {
    if (even()) {
      return check(nccl_.ReduceScatter(from_->data(), to_->data(), values(operation_.output.count()), element_.type,
                                       op_, comm_, stream_),
                   "ncclReduceScatter");
    }
    return group_call([&]() -> Result<> {
      size_t offset = 0;
      for (Rank rank = 0; rank < self_.size; ++rank) {
        const size_t count = operation_.counts[static_cast<size_t>(rank)];
        MUSTER_TRY(reduce(from_->data() + offset, to_->data(), count, rank));
        offset += count * size_of(call().dtype);
      }
      return {};
    });
  }

  // ---- moves, in bytes

  Result<> broadcast(const uint8_t* from, uint8_t* to, size_t bytes, Rank root) const {
    return check(nccl_.Broadcast(from, to, bytes, Type::kUint8, root, comm_, stream_), "ncclBroadcast");
  }
  Result<> all_gather() const {
    if (even()) {
      return check(nccl_.AllGather(from_->data(), to_->data(), operation_.input.bytes(), Type::kUint8, comm_, stream_),
                   "ncclAllGather");
    }
    return group_call([&]() -> Result<> {
      size_t offset = 0;
      for (Rank rank = 0; rank < self_.size; ++rank) {
        const size_t bytes = operation_.counts[static_cast<size_t>(rank)] * size_of(call().dtype);
        uint8_t* const block = to_->data() + offset;
        MUSTER_TRY(broadcast(rank == self_.rank ? from_->data() : block, block, bytes, rank));
        offset += bytes;
      }
      return {};
    });
  }

  /// gather, scatter and all_to_all, for which NCCL has messages.
  Result<> exchange() const {
    return group_call([&]() -> Result<> {
      size_t sent = 0, received = 0;
      for (Rank peer = 0; peer < self_.size; ++peer) {
        const size_t out = sends_to(peer) ? bytes_for(peer, operation_.counts) : 0;
        const size_t in = receives_from(peer) ? bytes_for(peer, operation_.receive_counts) : 0;
        MUSTER_TRY(send(from_->data() + sent, out, peer));
        MUSTER_TRY(receive(to_->data() + received, in, peer));
        sent += out;
        received += in;
      }
      return {};
    });
  }
  bool sends_to(Rank peer) const {
    if (call().collective == Collective::kGather) return peer == call().root;
    return call().collective == Collective::kAllToAll || is_root();
  }
  bool receives_from(Rank peer) const {
    if (call().collective == Collective::kScatter) return peer == call().root;
    return call().collective == Collective::kAllToAll || is_root();
  }
  size_t bytes_for(Rank peer, const std::vector<size_t>& counts) const {
    const size_t count = counts.empty() ? call().count : counts[static_cast<size_t>(peer)];
    return count * size_of(call().dtype);
  }

  const GroupSpec& self_;
  const Operation& operation_;
  std::optional<Contiguous> from_, to_;  ///< from_: not of calls in place
  std::shared_ptr<void> word_;           ///< of a barrier
  Element element_{Type::kUint8};
  int op_ = 0;
};

/// Messages: prepare(), lock, run().
class MessageCall : private StreamCalls {
 public:
  MessageCall(const StreamCalls& calls, const std::vector<Message>& messages)
      : StreamCalls(calls), messages_(messages) {}

  void prepare() {
    buffers_.reserve(messages_.size());
    for (const Message& each : messages_) buffers_.emplace_back(device_, each.data, each.send);
  }
  Result<> run() {
    MUSTER_TRY(group_call([&]() -> Result<> {
      for (size_t i = 0; i < messages_.size(); ++i) {
        const Message& each = messages_[i];
        const size_t bytes = each.data.bytes();
        MUSTER_TRY(each.send ? send(buffers_[i].data(), bytes, each.peer)
                             : receive(buffers_[i].data(), bytes, each.peer));
      }
      return {};
    }));
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (!messages_[i].send) buffers_[i].write_back();
    }
    return {};
  }

 private:
  const std::vector<Message>& messages_;
  std::vector<Contiguous> buffers_;
};

}  // namespace

Result<> enqueue(Communicator& communicator, const GroupSpec& self, const std::vector<Operation>& operations,
                 Device& device, const Deadline& deadline) {
  Communicator::Lock lock;
  const StreamCalls on_stream(communicator, lock, device, deadline);
  std::vector<CollectiveCall> calls;
  calls.reserve(operations.size());
  for (const Operation& each : operations) MUSTER_TRY(calls.emplace_back(on_stream, self, each).prepare());
  MUSTER_ASSIGN(lock, communicator.lock());
  for (size_t begun = 0; begun < calls.size(); ++begun) {
    if (Result<> ready = calls[begun].begin(); !ready) {
      for (size_t i = 0; i < begun; ++i) MUSTER_TRY(calls[i].release());
      return ready;
    }
  }
  if (calls.size() == 1) {
    MUSTER_TRY(calls.front().run());
  } else {
    MUSTER_TRY(on_stream.group_call([&]() -> Result<> {
      for (CollectiveCall& each : calls) MUSTER_TRY(each.run());
      return {};
    }));
  }
  for (CollectiveCall& each : calls) MUSTER_TRY(each.finish());
  return {};
}

Result<> enqueue(Communicator& communicator, const std::vector<Message>& messages, Device& device,
                 const Deadline& deadline) {
  Communicator::Lock lock;
  MessageCall call(StreamCalls(communicator, lock, device, deadline), messages);
  call.prepare();
  MUSTER_ASSIGN(lock, communicator.lock());
  return call.run();
}

}  // namespace muster::nccl
