#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/rpc/message.h"
#include "muster/rpc/ref_service.h"

namespace muster::rpc {

/// What a value is. Part of the wire format: append only. The grammar is at the head of value.cpp.
enum class Tag : uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,
  kFloat = 4,
  kString = 5,
  kBytes = 6,
  kList = 7,
  kTuple = 8,
  kDict = 9,
  kTensor = 10,
  kObject = 11,  ///< a Python object that only Python can read
  kRef = 12,     ///< a remote reference
  kAlias = 13,   ///< a tensor in shared memory, by reference
};

/// "a list", for messages.
const char* name(Tag tag);

class Alias;
class AutogradContext;
struct ContextRecord;
/// The record at the head of a message that was sent in a context of distributed autograd (autograd.h).
std::optional<ContextRecord> context_record(const Message& message);

/// Lists, tuples and dicts in each other, at most. It bounds the recursion of readers.
inline constexpr int kMaxDepth = 64;

/// Writes the values of one message. Tensors are not copied if they are dense, contiguous and on the CPU: the message
/// then refers to their memory.
class ValueWriter {
 public:
  ValueWriter() = default;
  /// A message of a context, if there is one: it begins with a record, and gradients will flow back to its tensors.
  explicit ValueWriter(std::shared_ptr<AutogradContext> context);
  const std::shared_ptr<AutogradContext>& context() const { return context_; }

  void put_none() { put(Tag::kNone); }
  void put_bool(bool value) { put(value ? Tag::kTrue : Tag::kFalse); }
  void put_int(int64_t value);
  void put_float(double value);
  void put_string(std::string_view value) { put_bytes(Tag::kString, value); }
  void put_bytes(std::string_view value) { put_bytes(Tag::kBytes, value); }
  void put_object(std::string_view pickled) { put_bytes(Tag::kObject, pickled); }
  /// `count` values must follow.
  void begin_list(size_t count) { begin(Tag::kList, count); }
  void begin_tuple(size_t count) { begin(Tag::kTuple, count); }
  /// `count` pairs of a key and a value must follow.
  void begin_dict(size_t count) { begin(Tag::kDict, count); }
  /// Throws c10::NotImplementedError for tensors that are not dense or not on the CPU.
  void put_tensor(const at::Tensor& tensor);
  void put_ref(const RefPtr& ref);
  void put_alias(const Alias& alias);

  /// The references in the message. They must be granted before it is sent (ref_service.h), and kept until it was
  /// handled.
  std::vector<RefPtr> take_refs() { return std::move(refs_); }
  Message take();
  /// The same for a message of a context, which goes to the worker `to`.
  Message take_for(const std::string& to);

 private:
  void put(Tag tag) { head_.push_back(static_cast<uint8_t>(tag)); }
  void put_raw(const void* data, size_t bytes);
  void put_bytes(Tag tag, std::string_view bytes);
  void put_sized(std::string_view bytes);
  void put_ref_body(const RefPtr& ref);
  void begin(Tag tag, size_t count);

  Bytes head_;
  std::vector<Buffer> segments_;
  std::vector<RefPtr> refs_;
  std::shared_ptr<AutogradContext> context_;
  std::vector<at::Tensor> in_graph_;  ///< the tensors of a context that require gradients
};

/// Reads the values of one message, which nobody has checked. All functions throw ErrorException with kProtocol for
/// bytes that ValueWriter does not write, and ArgumentException for a value of another kind than the one that is read.
class ValueReader {
 public:
  /// The message must outlive the reader. `refs` and `sender` are needed for references (RefService::receive()).
  /// `context`: the one that the message belongs to. Without it, its tensors have no history.
  explicit ValueReader(const Message& message, RefService* refs = nullptr, int sender = RefService::kReplied,
                       const std::shared_ptr<AutogradContext>& context = nullptr);
  ~ValueReader();
  ValueReader(const ValueReader&) = delete;

  Tag peek() const;
  Tag next();
  /// Throws unless the next value is a `tag`.
  void expect(Tag tag);

  // After next(): the rest of a value of this kind.
  int64_t int_value();
  double float_value();
  /// Of a string, bytes or an object. The view points into the message.
  std::string_view bytes_value();
  /// The number of values in a list or tuple, or of pairs in a dict.
  size_t count();
  /// Uses the message's memory, and keeps it alive.
  at::Tensor tensor_value();
  RefPtr ref_value();
  /// A tensor in the memory of the worker that sent it. Throws ErrorException with kUnavailable if that is not on this
  /// host.
  at::Tensor alias_value();

  /// Throws unless everything was read.
  void finish() const;

 private:
  struct Shape;
  template <class T>
  T take();
  std::string_view take_bytes(size_t count);
  Shape take_shape();

  ByteView rest_;
  const std::vector<Buffer>& segments_;
  RefService* const refs_;
  const int sender_;
  struct History;
  std::unique_ptr<History> history_;  ///< if the message belongs to a context
};

}  // namespace muster::rpc
