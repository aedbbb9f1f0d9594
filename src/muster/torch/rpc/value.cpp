// The format of arguments and results, in the head and the segments of a message:
//
//   value  := tag:u8 body
//   body   := (none, false, true) nothing | (int) i64 | (float) f64 | (string, bytes) length:u32 byte[length]
//           | (list, tuple) count:u32 value[count] | (dict) count:u32 { key:value value }[count]
//           | (tensor) dtype:u8 dims:u8 requires_grad:u8 zero:u8 segment:u32 size:i64[dims]
//           | (object) length:u32 byte[length] parts:value
//           | (ref) creator:i32 number:u64 owner_length:u32 owner:byte[owner_length]
//           | (alias) dtype:u8 dims:u8 zero:u8 zero:u8 zero:u32 size:i64[dims]
//                     pid:i32 fd:i32 memory:u64 memory_bytes:u64 offset:u64 domain_length:u32
//                     domain:byte[domain_length] and the body of a ref
//
// In a context of distributed autograd, the head begins with a record: mark:u8 context:i64 sender:i32 number:u64
// tensors:u32 name_length:u32 name:byte[name_length]. Sender, number and name are those of the worker that sends it.
//
// Strings are UTF-8. An object is a pickle, and the list of the tensors and references that it refers to. A tensor's
// elements are one segment, in C order. Its dtype is a c10::ScalarType. An alias is a tensor in shared memory: a place
// in a file of the process `pid` in the PID namespace `domain`, and a reference that keeps it. Little-endian. The
// arguments of a call are a list of two values: a tuple of those by position, and a dict of those by name.
#include "muster/torch/rpc/value.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>

#include "muster/io/host_identity.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/alias.h"
#include "muster/torch/rpc/autograd/context.h"
#include "muster/torch/tensor.h"

namespace muster::rpc {
namespace {

struct TensorHeader {
  uint8_t scalar_type;
  uint8_t dims;
  uint8_t requires_grad;
  uint8_t zero;
  uint32_t segment;
};
constexpr size_t kMaxDims = 64;

/// Begins the record of a context. No tag has this value.
constexpr uint8_t kContextMark = 0xAC;
constexpr size_t kTensorCountAt = sizeof kContextMark + sizeof(int64_t) + sizeof(int32_t) + sizeof(uint64_t);

/// The PID namespace of this process.
const std::string& own_domain() {
  static const std::string kDomain = process_domain();
  return kDomain;
}

[[noreturn]] void reject(const std::string& what) {
  throw_error(Error{ErrorCode::kProtocol, "a value of an RPC message is invalid: " + what});
}

/// The record of a context, and what follows it.
std::pair<ContextRecord, ByteView> take_record(ByteView head) {
  const auto record = [&](Reader& in) -> Result<ContextRecord> {
    ContextRecord found;
    MUSTER_TRY(in.get<uint8_t>());
    MUSTER_ASSIGN(found.context, in.get<int64_t>());
    MUSTER_ASSIGN(found.message.sender, in.get<int32_t>());
    MUSTER_ASSIGN(found.message.number, in.get<uint64_t>());
    MUSTER_ASSIGN(found.tensors, in.get<uint32_t>());
    MUSTER_ASSIGN(found.sender, in.get_string());
    return found;
  };
  Reader in(head);
  auto found = record(in);
  if (!found) reject("the record of its context is cut off");
  return {std::move(*found), head.last(in.remaining())};
}

/// The elements of the tensor in a row, and the memory that they lie in.
Buffer elements_of(const at::Tensor& tensor) {
  // The storage and not the tensor, because a tensor may belong to a Python object: dropping it would take the GIL.
  auto owner = std::make_shared<c10::Storage>(tensor.storage());
  return {std::move(owner), tensor.data_ptr(), tensor.nbytes()};
}

}  // namespace

const char* name(Tag tag) {
  static constexpr const char* kNames[] = {
      "None",   "a bool",  "a bool", "an int",   "a float",         "a string",    "bytes",
      "a list", "a tuple", "a dict", "a tensor", "a Python object", "a reference", "a tensor in shared memory"};
  static_assert(std::size(kNames) == static_cast<size_t>(Tag::kAlias) + 1);
  return kNames[static_cast<size_t>(tag)];
}

// ---- contexts

std::optional<ContextRecord> context_record(const Message& message) {
  if (message.head.empty() || message.head.front() != kContextMark) return std::nullopt;
  return take_record(ByteView(message.head)).first;
}

struct ValueReader::History {
  std::shared_ptr<AutogradContext> context;
  ContextRecord record;
  size_t tensors = 0;  ///< that were read
};

// ---- writing

ValueWriter::ValueWriter(std::shared_ptr<AutogradContext> context) : context_(std::move(context)) {
  if (!context_) return;
  const ContextRecord record = context_->new_message();
  Writer out;
  out.put(kContextMark).put(record.context).put<int32_t>(record.message.sender).put(record.message.number);
  out.put(record.tensors).put_string(record.sender);
  head_ = out.take();
}

Message ValueWriter::take_for(const std::string& to) {
  if (!context_) return take();
  const auto count = static_cast<uint32_t>(in_graph_.size());
  std::memcpy(head_.data() + kTensorCountAt, &count, sizeof count);
  edge_list edges;
  for (const at::Tensor& tensor : in_graph_) edges.push_back(::torch::autograd::impl::gradient_edge(tensor));
  Message message = take();
  context_->add_sent(context_record(message)->message, to, std::move(edges));
  return message;
}

void ValueWriter::put_raw(const void* data, size_t bytes) {
  const auto* const from = static_cast<const uint8_t*>(data);
  head_.insert(head_.end(), from, from + bytes);
}

void ValueWriter::put_int(int64_t value) {
  put(Tag::kInt);
  put_raw(&value, sizeof value);
}

void ValueWriter::put_float(double value) {
  put(Tag::kFloat);
  put_raw(&value, sizeof value);
}

void ValueWriter::put_bytes(Tag tag, std::string_view bytes) {
  begin(tag, bytes.size());
  put_raw(bytes.data(), bytes.size());
}

void ValueWriter::put_sized(std::string_view bytes) {
  const auto length = static_cast<uint32_t>(bytes.size());
  put_raw(&length, sizeof length);
  put_raw(bytes.data(), bytes.size());
}

void ValueWriter::begin(Tag tag, size_t count) {
  if (count > std::numeric_limits<uint32_t>::max()) {
    throw_error(Error{ErrorCode::kInvalidArgument, c10::str(name(tag), " of ", count, " parts is too long to send")});
  }
  put(tag);
  const auto number = static_cast<uint32_t>(count);
  put_raw(&number, sizeof number);
}

void ValueWriter::put_tensor(const at::Tensor& tensor) {
  value_or_throw(check_sendable(tensor));
  const at::Tensor plain = is_plain(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous();
  if (tensor.dim() > static_cast<int64_t>(kMaxDims)) {
    throw_error(Error{ErrorCode::kInvalidArgument, c10::str("a tensor of ", tensor.dim(), " dimensions is too deep")});
  }
  put(Tag::kTensor);
  const TensorHeader header{static_cast<uint8_t>(tensor.scalar_type()), static_cast<uint8_t>(tensor.dim()),
                            static_cast<uint8_t>(tensor.requires_grad()), 0, static_cast<uint32_t>(segments_.size())};
  put_raw(&header, sizeof header);
  put_raw(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t));
  segments_.push_back(elements_of(plain));
  if (context_ && tensor.requires_grad()) in_graph_.push_back(tensor);
}

void ValueWriter::put_ref_body(const RefPtr& ref) {
  const int32_t creator = ref->id().creator;
  const uint64_t number = ref->id().number;
  put_raw(&creator, sizeof creator);
  put_raw(&number, sizeof number);
  put_sized(ref->owner());
  refs_.push_back(ref);
}

void ValueWriter::put_ref(const RefPtr& ref) {
  put(Tag::kRef);
  put_ref_body(ref);
}

void ValueWriter::put_alias(const Alias& alias) {
  put(Tag::kAlias);
  const at::Tensor& tensor = alias.tensor();
  const TensorHeader header{static_cast<uint8_t>(tensor.scalar_type()), static_cast<uint8_t>(tensor.dim()), 0, 0, 0};
  put_raw(&header, sizeof header);
  put_raw(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t));
  const AliasPlace place = alias.place();
  put_raw(&place, sizeof place);
  put_sized(own_domain());
  put_ref_body(alias.ref());
}

Message ValueWriter::take() {
  Message message{std::move(head_), std::move(segments_)};
  head_.clear();
  segments_.clear();
  return message;
}

// ---- reading

ValueReader::ValueReader(const Message& message, RefService* refs, int sender,
                         const std::shared_ptr<AutogradContext>& context)
    : rest_(message.head), segments_(message.segments), refs_(refs), sender_(sender) {
  if (rest_.empty() || rest_.front() != kContextMark) return;
  auto [record, rest] = take_record(rest_);
  rest_ = rest;
  if (!context || context->id() != record.context) return;
  context->add_received(record);
  history_ = std::make_unique<History>(History{context, std::move(record), 0});
}

ValueReader::~ValueReader() = default;

template <class T>
T ValueReader::take() {
  T value;
  const std::string_view bytes = take_bytes(sizeof value);
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::string_view ValueReader::take_bytes(size_t count) {
  if (rest_.size() < count) reject("it is cut off");
  const std::string_view bytes{reinterpret_cast<const char*>(rest_.data()), count};
  rest_ = rest_.subspan(count);
  return bytes;
}

Tag ValueReader::peek() const {
  if (rest_.empty()) reject("it is cut off");
  if (rest_.front() > static_cast<uint8_t>(Tag::kAlias)) reject(c10::str("tag ", static_cast<int>(rest_.front())));
  return static_cast<Tag>(rest_.front());
}

Tag ValueReader::next() {
  const Tag tag = peek();
  rest_ = rest_.subspan(1);
  return tag;
}

void ValueReader::expect(Tag tag) {
  const Tag found = next();
  if (found == tag) return;
  throw_error(Error{ErrorCode::kInvalidArgument, c10::str("expected ", name(tag), ", got ", name(found))});
}

int64_t ValueReader::int_value() { return take<int64_t>(); }
double ValueReader::float_value() { return take<double>(); }
std::string_view ValueReader::bytes_value() { return take_bytes(take<uint32_t>()); }

/// Every value has at least one byte, so a count cannot make a reader reserve more memory than the message has.
size_t ValueReader::count() {
  const auto count = take<uint32_t>();
  if (count > rest_.size()) reject(c10::str(count, " values in ", rest_.size(), " bytes"));
  return count;
}

struct ValueReader::Shape {
  c10::ScalarType type;
  bool requires_grad;
  uint32_t segment;
  c10::SmallVector<int64_t, 8> sizes;
  uint64_t bytes = 0;
};

ValueReader::Shape ValueReader::take_shape() {
  const auto header = take<TensorHeader>();
  if (header.dims > kMaxDims || header.zero != 0) reject("a tensor's header");
  Shape shape{static_cast<c10::ScalarType>(header.scalar_type), header.requires_grad != 0, header.segment, {}};
  if (!dtype_of(shape.type)) reject(c10::str("a tensor of type ", static_cast<int>(header.scalar_type)));
  uint64_t count = 1;
  bool empty = false;
  for (int dim = 0; dim < header.dims; ++dim) {
    const auto size = take<int64_t>();
    if (size < 0 || __builtin_mul_overflow(count, std::max<uint64_t>(size, 1), &count)) reject("a tensor's sizes");
    empty = empty || size == 0;
    shape.sizes.push_back(size);
  }
  if (__builtin_mul_overflow(empty ? 0 : count, c10::elementSize(shape.type), &shape.bytes) ||
      count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    reject("a tensor's size");
  }
  return shape;
}

at::Tensor ValueReader::tensor_value() {
  const Shape shape = take_shape();
  if (shape.segment >= segments_.size()) reject("a tensor's header");
  const Buffer& elements = segments_[shape.segment];
  if (shape.bytes != elements.size()) {
    reject(c10::str("a tensor of ", shape.bytes, " bytes in a segment of ", elements.size()));
  }
  at::Tensor tensor = at::from_blob(
      elements.data(), shape.sizes, [elements](void*) {}, at::TensorOptions(shape.type));
  const bool differentiable = at::isFloatingType(shape.type) || at::isComplexType(shape.type);
  if (!shape.requires_grad || !differentiable) return tensor;
  if (!history_) return tensor.requires_grad_();
  if (history_->tensors == history_->record.tensors) reject("more tensors than the record of its context has");
  history_->context->set_history(history_->record, history_->tensors++, tensor);
  return tensor;
}

at::Tensor ValueReader::alias_value() {
  const Shape shape = take_shape();
  const auto place = take<AliasPlace>();
  const std::string domain(bytes_value());
  const RefPtr ref = ref_value();
  if (domain != own_domain()) {
    throw_error(Error{ErrorCode::kUnavailable,
                      c10::str("a tensor in the memory of worker \"", ref->owner(),
                               "\" was passed by reference, but that is on another host: pass it without alias()")});
  }
  return open_alias(ref, place, shape.sizes, shape.type, shape.bytes);
}

RefPtr ValueReader::ref_value() {
  RefId id;
  id.creator = take<int32_t>();
  id.number = take<uint64_t>();
  const std::string owner(bytes_value());
  if (owner.empty()) reject("a reference without an owner");
  if (refs_ == nullptr) throw_error(Error{ErrorCode::kInvalidArgument, "a reference cannot be passed here"});
  return value_or_throw(refs_->receive(owner, id, sender_));
}

void ValueReader::finish() const {
  if (!rest_.empty()) reject(c10::str(rest_.size(), " bytes after its end"));
}

}  // namespace muster::rpc
