#pragma once

// The part of Python's pickle format that PyTorch's distributed checkpoints use (protocols 2 to 5). The reader does not
// trust its input: it imports and calls nothing, accepts only the classes that it is given, and needs time and memory
// in proportion to the input.

#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"

namespace muster::dcp {

/// The names of Python's pickletools. No other opcode is accepted.
enum class Opcode : uint8_t {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95
};

/// A value of a pickle. Values may be shared, and may contain themselves: do not walk through all of them.
struct PickleValue {
  enum class Kind : uint8_t { kNone, kBool, kInteger, kText, kTuple, kList, kDict, kGlobal, kObject, kPersistent };

  Kind kind = Kind::kNone;
  int64_t number = 0;     ///< kBool, kInteger
  std::string_view text;  ///< kText; kGlobal: "torch.Size"; kObject: the class or function that makes it
  /// kTuple, kList: the items. kDict: keys and values in turn. kObject: the tuple of its arguments, then its state if
  /// it has one. kPersistent: the persistent id.
  std::vector<const PickleValue*> items;
};

/// The values of one pickle.
class Pickle {
 public:
  /// Accepts only globals in `classes`, which must outlive the result, as `bytes` must. kUnsupported for other globals
  /// and opcodes, kProtocol for bytes that are no pickle.
  static Result<Pickle> parse(ByteView bytes, std::span<const std::string_view> classes);
  Pickle(Pickle&&) = default;  // the values stay where they are
  const PickleValue& root() const { return *root_; }

 private:
  Pickle() = default;

  std::deque<PickleValue> values_;  // a deque, because values point to each other
  const PickleValue* root_ = nullptr;
};

class PickleWriter {
 public:
  PickleWriter();
  PickleWriter& put(Opcode code);
  PickleWriter& put_text(std::string_view text);
  PickleWriter& put_integer(int64_t number);
  /// `name` is "module.name".
  PickleWriter& put_global(std::string_view name);
  /// Between the two calls: names and values of the attributes.
  PickleWriter& begin_object(std::string_view type);
  PickleWriter& end_object();
  Bytes finish();

 private:
  Writer out_;
};

}  // namespace muster::dcp
