#include "muster/torch/dcp/pickle.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

namespace muster::dcp {
namespace {

using Kind = PickleValue::Kind;
using Values = std::vector<PickleValue*>;

tl::unexpected<Error> no_pickle(const std::string& why) {
  return fail(ErrorCode::kProtocol, "the pickle is malformed: " + why);
}

/// Python's pickle machine, without its effects.
class PickleMachine {
 public:
  PickleMachine(ByteView bytes, std::span<const std::string_view> classes, std::deque<PickleValue>& values)
      : rest_(bytes), classes_(classes), values_(values) {}

  Result<const PickleValue*> run() {
    while (true) {
      MUSTER_ASSIGN(const auto code, read<Opcode>());
      if (code == Opcode::kStop) break;
      MUSTER_TRY(step(code));
    }
    MUSTER_ASSIGN(const Values last, take(1));
    return last.front();
  }

 private:
  Result<> step(Opcode code) {
    using enum Opcode;
    switch (code) {
      case kProto:
        return discard(read<uint8_t>());
      case kFrame:
        return discard(read<uint64_t>());
      case kMark:
        marks_.push_back(stack_.size());
        return {};
      case kNone:
        return push({.kind = Kind::kNone});
      case kNewTrue:
      case kNewFalse:
        return push({.kind = Kind::kBool, .number = code == kNewTrue});
      case kBinInt1:
        return push_number(read<uint8_t>());
      case kBinInt2:
        return push_number(read<uint16_t>());
      case kBinInt:
        return push_number(read<int32_t>());
      case kLong1:
        return push_number(read_long());
      case kShortBinUnicode:
        return push_text(read<uint8_t>());
      case kBinUnicode:
        return push_text(read<uint32_t>());
      case kEmptyTuple:
        return push({.kind = Kind::kTuple});
      case kEmptyList:
        return push({.kind = Kind::kList});
      case kEmptyDict:
        return push({.kind = Kind::kDict});
      default:
        return combine(code);
    }
  }

  /// The opcodes that use values of the stack or the memo.
  Result<> combine(Opcode code) {
    using enum Opcode;
    switch (code) {
      case kTuple:
        return push_tuple(take_since_mark());
      case kTuple1:
        return push_tuple(take(1));
      case kTuple2:
        return push_tuple(take(2));
      case kTuple3:
        return push_tuple(take(3));
      case kAppend:
        return extend(Kind::kList, take(1));
      case kAppends:
        return extend(Kind::kList, take_since_mark());
      case kSetItem:
        return extend(Kind::kDict, take(2));
      case kSetItems:
        return extend(Kind::kDict, take_since_mark());
      case kGlobal:
        return push_global_of_lines();
      case kStackGlobal:
        return push_global_of_stack();
      case kNewObj:
      case kReduce:
        return push_object();
      case kBuild:
        return build();
      case kBinPersId:
        return push_persistent();
      case kMemoize:
        return memoize(Result<size_t>(memo_.size()));
      case kBinPut:
        return memoize(read<uint8_t>());
      case kLongBinPut:
        return memoize(read<uint32_t>());
      case kBinGet:
        return recall(read<uint8_t>());
      case kLongBinGet:
        return recall(read<uint32_t>());
      default:
        return fail(ErrorCode::kUnsupported,
                    "the pickle uses opcode " + std::to_string(static_cast<int>(code)) + ", which is not accepted");
    }
  }

  template <class T>
  Result<T> read() {
    if (rest_.size() < sizeof(T)) return no_pickle("it is truncated");
    T value;
    std::memcpy(&value, rest_.data(), sizeof(T));  // every supported machine is little-endian
    rest_ = rest_.subspan(sizeof(T));
    return value;
  }
  Result<std::string_view> read_text(size_t length) {
    if (rest_.size() < length) return no_pickle("it is truncated");
    const std::string_view text(reinterpret_cast<const char*>(rest_.data()), length);
    rest_ = rest_.subspan(length);
    return text;
  }
  Result<std::string_view> read_line() {
    const auto end = std::find(rest_.begin(), rest_.end(), uint8_t('\n'));
    MUSTER_ASSIGN(const std::string_view line, read_text(static_cast<size_t>(end - rest_.begin())));
    MUSTER_TRY(discard(read<uint8_t>()));
    return line;
  }
  Result<int64_t> read_long() {
    MUSTER_ASSIGN(const auto length, read<uint8_t>());
    MUSTER_ASSIGN(const std::string_view bytes, read_text(length));
    if (bytes.size() > sizeof(int64_t)) return no_pickle("a number has more than 64 bits");
    const bool negative = !bytes.empty() && static_cast<int8_t>(bytes.back()) < 0;
    int64_t value = negative ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  template <class T>
  static Result<> discard(const Result<T>& value) {
    if (!value) return tl::unexpected(value.error());
    return {};
  }

  Result<> push(PickleValue value) {
    stack_.push_back(&values_.emplace_back(std::move(value)));
    return {};
  }
  template <class T>
  Result<> push_number(const Result<T>& number) {
    if (!number) return tl::unexpected(number.error());
    return push({.kind = Kind::kInteger, .number = static_cast<int64_t>(*number)});
  }
  template <class T>
  Result<> push_text(const Result<T>& length) {
    if (!length) return tl::unexpected(length.error());
    MUSTER_ASSIGN(const std::string_view text, read_text(*length));
    return push({.kind = Kind::kText, .text = text});
  }
  Result<> push_tuple(Result<Values> items) {
    MUSTER_ASSIGN(const Values taken, std::move(items));
    return push({.kind = Kind::kTuple, .items = {taken.begin(), taken.end()}});
  }
  Result<> push_global(std::string_view module, std::string_view name) {
    const auto found = std::find_if(classes_.begin(), classes_.end(), [&](std::string_view known) {
      return known.size() == module.size() + 1 + name.size() && known.starts_with(module) && known.ends_with(name) &&
             known[module.size()] == '.';
    });
    if (found == classes_.end()) {
      return fail(ErrorCode::kUnsupported, "the pickle uses " + std::string(module.substr(0, 100)) + "." +
                                               std::string(name.substr(0, 100)) + ", which is not accepted");
    }
    return push({.kind = Kind::kGlobal, .text = *found});
  }
  Result<> push_global_of_lines() {
    MUSTER_ASSIGN(const std::string_view module, read_line());
    MUSTER_ASSIGN(const std::string_view name, read_line());
    return push_global(module, name);
  }
  Result<> push_global_of_stack() {
    MUSTER_ASSIGN(const Values names, take(2));
    if (names[0]->kind != Kind::kText || names[1]->kind != Kind::kText) return no_pickle("a global has no name");
    return push_global(names[0]->text, names[1]->text);
  }
  Result<> push_object() {
    MUSTER_ASSIGN(const Values parts, take(2));
    if (parts[0]->kind != Kind::kGlobal || parts[1]->kind != Kind::kTuple) return no_pickle("an object has no class");
    return push({.kind = Kind::kObject, .text = parts[0]->text, .items = {parts[1]}});
  }
  Result<> push_persistent() {
    MUSTER_ASSIGN(const Values id, take(1));
    return push({.kind = Kind::kPersistent, .items = {id.front()}});
  }

  Result<> extend(Kind kind, Result<Values> items) {
    MUSTER_ASSIGN(const Values taken, std::move(items));
    MUSTER_ASSIGN(auto* const target, top());
    if (target->kind != kind || (kind == Kind::kDict && taken.size() % 2 != 0))
      return no_pickle("items lack a container");
    target->items.insert(target->items.end(), taken.begin(), taken.end());
    return {};
  }
  Result<> build() {
    MUSTER_ASSIGN(const Values state, take(1));
    MUSTER_ASSIGN(auto* const target, top());
    if (target->kind != Kind::kObject) return no_pickle("a state lacks an object");
    target->items.resize(1);
    target->items.push_back(state.front());
    return {};
  }
  template <class T>
  Result<> memoize(const Result<T>& index) {
    if (!index) return tl::unexpected(index.error());
    MUSTER_ASSIGN(memo_[static_cast<uint32_t>(*index)], top());
    return {};
  }
  template <class T>
  Result<> recall(const Result<T>& index) {
    if (!index) return tl::unexpected(index.error());
    const auto found = memo_.find(static_cast<uint32_t>(*index));
    if (found == memo_.end()) return no_pickle("a value is used before it is stored");
    stack_.push_back(found->second);
    return {};
  }

  /// The first value above the last mark.
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Result<PickleValue*> top() const {
    if (stack_.size() <= floor()) return no_pickle("a value is missing");
    return stack_.back();
  }
  Result<Values> take(size_t count) {
    if (stack_.size() - floor() < count) return no_pickle("a value is missing");
    const Values taken(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return taken;
  }
  Result<Values> take_since_mark() {
    if (marks_.empty()) return no_pickle("a mark is missing");
    auto taken = take(stack_.size() - floor());
    marks_.pop_back();
    return taken;
  }

  ByteView rest_;
  const std::span<const std::string_view> classes_;
  std::deque<PickleValue>& values_;
  Values stack_;
  std::vector<size_t> marks_;  ///< sizes of the stack, never above its present size
  std::unordered_map<uint32_t, PickleValue*> memo_;
};

}  // namespace

Result<Pickle> Pickle::parse(ByteView bytes, std::span<const std::string_view> classes) {
  Pickle pickle;
  MUSTER_ASSIGN(pickle.root_, PickleMachine(bytes, classes, pickle.values_).run());
  return pickle;
}

PickleWriter::PickleWriter() {
  put(Opcode::kProto);
  out_.put(uint8_t{2});
}

PickleWriter& PickleWriter::put(Opcode code) {
  out_.put(code);
  return *this;
}

PickleWriter& PickleWriter::put_text(std::string_view text) {
  put(Opcode::kBinUnicode);
  out_.put_string(text);
  return *this;
}

PickleWriter& PickleWriter::put_integer(int64_t number) {
  if (number >= std::numeric_limits<int32_t>::min() && number <= std::numeric_limits<int32_t>::max()) {
    put(Opcode::kBinInt);
    out_.put(static_cast<int32_t>(number));
  } else {
    put(Opcode::kLong1);
    out_.put(uint8_t{sizeof number}).put(number);
  }
  return *this;
}

PickleWriter& PickleWriter::put_global(std::string_view name) {
  put(Opcode::kGlobal);
  std::string lines = std::string(name) + "\n";
  lines[name.rfind('.')] = '\n';
  out_.put_raw(as_bytes(lines));
  return *this;
}

PickleWriter& PickleWriter::begin_object(std::string_view type) {
  return put_global(type).put(Opcode::kEmptyTuple).put(Opcode::kNewObj).put(Opcode::kEmptyDict).put(Opcode::kMark);
}

PickleWriter& PickleWriter::end_object() { return put(Opcode::kSetItems).put(Opcode::kBuild); }

Bytes PickleWriter::finish() {
  put(Opcode::kStop);
  return out_.take();
}

}  // namespace muster::dcp
