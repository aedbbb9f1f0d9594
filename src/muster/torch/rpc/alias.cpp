#include "muster/torch/rpc/alias.h"

#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <mutex>

#include "muster/shm/peer_memory.h"
#include "muster/torch/c10d/allocator.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/references.h"

namespace muster::rpc {
namespace {

/// Never destroyed: tensors may outlive all static objects.
const std::shared_ptr<Arena>& arena() {
  static const auto* const kArena = new std::shared_ptr<Arena>(Arena::create());
  return *kArena;
}

/// What the reference of an alias refers to. A worker that asks for its value gets a copy.
class AliasValue final : public WritableValue {
 public:
  explicit AliasValue(const at::Tensor& tensor) : tensor(tensor.detach()) {}
  void write(ValueWriter& out) const override { out.put_tensor(tensor); }
  const at::Tensor tensor;  ///< has no Python object, so the last owner needs no GIL
};

/// Keeps the memory of a tensor here, and the reference at its owner.
class Mapped {
 public:
  Mapped(RefPtr ref, std::shared_ptr<uint8_t> memory) : ref_(std::move(ref)), memory_(std::move(memory)) {}
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  /// The agent itself may be the last to hold a tensor that was sent on, with its lock.
  ~Mapped() {
    memory_.reset();
    RefService::drop_later(std::move(ref_));
  }
  uint8_t* data() const { return memory_.get(); }

 private:
  RefPtr ref_;
  std::shared_ptr<uint8_t> memory_;
};

Result<std::shared_ptr<uint8_t>> map(const AliasPlace& place, size_t bytes) {
  static std::mutex mutex;
  static auto& peers = *new PeerMemory();
  const std::lock_guard lock(mutex);
  return peers.share(place.pid, {place.memory, place.memory_bytes, place.offset, place.fd}, bytes);
}

}  // namespace

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::TensorOptions typed = options.has_dtype() ? options : options.dtype(at::get_default_dtype());
  return empty_in(arena(), c10::multiply_integers(sizes), typed).view(sizes);
}

Alias::Alias(RefService& refs, at::Tensor tensor) : tensor_(std::move(tensor)) {
  const auto invalid = [](const char* what) { throw_error(Error{ErrorCode::kInvalidArgument, what}); };
  if (!tensor_.defined() || !tensor_.device().is_cpu() || tensor_.layout() != c10::kStrided) {
    invalid("only a dense CPU tensor can be passed by reference");
  }
  if (tensor_.is_conj() || tensor_.is_neg()) invalid("a conjugated or negated view cannot be passed by reference");
  if (!tensor_.is_contiguous()) invalid("a tensor that is passed by reference must be contiguous");
  const auto place = arena()->find(tensor_.data_ptr(), tensor_.nbytes());
  if (!place) invalid("a tensor that is passed by reference must lie in shared memory: make it with empty_shared()");
  place_ = {getpid(), place->fd, place->segment, place->segment_bytes, place->offset};
  ref_ = refs.create(refs.self().name);
  refs.set_value(ref_->id(), std::make_shared<AliasValue>(tensor_));
}

at::Tensor open_alias(const RefPtr& ref, const AliasPlace& place, at::IntArrayRef sizes, c10::ScalarType type,
                      size_t bytes) {
  if (ref->is_owner()) {
    const auto value = value_or_throw(ref->service()->value(ref->id()));
    const auto* const own = dynamic_cast<const AliasValue*>(value.get());
    if (own == nullptr) throw_error(Error{ErrorCode::kProtocol, ref->to_string() + " is no tensor in shared memory"});
    return own->tensor.detach();
  }
  const auto mapped = std::make_shared<Mapped>(ref, value_or_throw(map(place, bytes)));
  return at::from_blob(
      mapped->data(), sizes, [mapped](void*) {}, at::TensorOptions(type));
}

}  // namespace muster::rpc
