#include "muster/store/protocol/torch_request.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "muster/store/protocol/messages.h"
#include "muster/store/protocol/outbox.h"

namespace muster {
namespace {

// The operation of a query byte, and the fields that follow the query byte in a request.
struct Shape {
  StoreOperation operation{};
  bool short_number = false, key = false;
  int values = 0;
  bool number = false;
  bool list = false;  // of items; each has a key, and a value if `values` is 1
};

using Op = StoreOperation;
constexpr Shape kShapes[] = {
    /* validate */ {.short_number = true},
    /* set */ {.operation = Op::kSet, .key = true, .values = 1},
    /* compare_set */ {.operation = Op::kCompareSet, .key = true, .values = 2},
    /* get */ {.operation = Op::kGet, .key = true},
    /* add */ {.operation = Op::kAdd, .key = true, .number = true},
    /* check */ {.operation = Op::kCheck, .list = true},
    /* wait */ {.operation = Op::kWait, .list = true},
    /* getnumkeys */ {.operation = Op::kNumKeys},
    /* delete_key */ {.operation = Op::kDelete, .key = true},
    /* append */ {.operation = Op::kAppend, .key = true, .values = 1},
    /* multi_get */ {.operation = Op::kMultiGet, .list = true},
    /* multi_set */ {.operation = Op::kMultiSet, .values = 1, .list = true},
    /* cancel_wait */ {.operation = Op::kCancel},
    /* ping */ {.short_number = true},
    /* queue_push */ {.operation = Op::kQueuePush, .key = true, .values = 1},
    /* queue_pop */ {.operation = Op::kQueuePop, .key = true},
    /* queue_len */ {.operation = Op::kQueueLength, .key = true},
    /* list_keys */ {.operation = Op::kListKeys},
    /* barrier */ {.operation = Op::kBarrier, .key = true, .number = true},
};

}  // namespace

// Reads fields from the bytes that have arrived. A function returns false in two cases. If there are too few bytes,
// wanted() is the number of bytes needed. If the grammar does not allow the bytes, error() says why.
class TorchRequestReader::Cursor {
 public:
  Cursor(ByteView bytes, size_t before, const Key& prefix) : bytes_(bytes), before_(before), prefix_(prefix) {}

  template <class T>
  bool take(T& value) {
    if (!reach(sizeof(T))) return false;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return true;
  }
  bool take_key(Request& request) {
    ByteView view;
    if (!take_counted(view, kMaxKeyBytes, "a key")) return false;
    Key& key = request.keys.emplace_back();
    key.reserve(prefix_.size() + view.size());
    key.append(prefix_).append(reinterpret_cast<const char*>(view.data()), view.size());
    return true;
  }
  bool take_value(Request& request) {
    ByteView view;
    if (!take_counted(view, kMaxValueBytes, "a value")) return false;
    request.values.emplace_back(view.begin(), view.end());
    return true;
  }
  bool within(uint64_t length, uint64_t cap, const char* what) {
    if (length > cap)
      refuse(fmt::format("a TCPStore client announces {} of length {}, the limit is {}", what, length, cap));
    return error_.empty();
  }
  void refuse(std::string why) { error_ = std::move(why); }

  size_t position() const { return position_; }
  size_t wanted() const { return wanted_; }
  const std::string& error() const { return error_; }

 private:
  bool take_counted(ByteView& view, size_t cap, const char* what) {
    uint64_t length = 0;
    if (!take(length) || !within(length, cap, what) || !reach(length)) return false;
    view = bytes_.subspan(position_, length);
    position_ += length;
    return true;
  }
  bool reach(size_t count) {
    wanted_ = position_ + count;
    return within(before_ + wanted_, kMaxMessageBytes, "a request") && wanted_ <= bytes_.size();
  }

  const ByteView bytes_;
  const size_t before_;  // bytes of the same request that were read earlier
  const Key& prefix_;
  size_t position_ = 0;
  size_t wanted_ = 0;
  std::string error_;
};

// Erases consumed bytes only if all bytes are consumed or the buffer would have to grow, because erasing moves the
// rest.
void TorchRequestReader::feed(ByteView bytes) {
  if (consumed_ > 0 && (consumed_ == buffer_.size() || buffer_.size() + bytes.size() > buffer_.capacity())) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<ptrdiff_t>(consumed_));
    consumed_ = 0;
  }
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

Result<bool> TorchRequestReader::next(TorchRequest& out) {
  while (buffer_.size() - consumed_ >= wanted_) {
    Cursor in(ByteView(buffer_).subspan(consumed_), partial_bytes_, prefix_);
    const bool moved = items_left_ == 0 ? read_head(in) : read_item(in);
    if (!in.error().empty()) return fail(ErrorCode::kProtocol, in.error());
    wanted_ = moved ? 1 : in.wanted();
    if (!moved) continue;
    consumed_ += in.position();
    partial_bytes_ += in.position();
    if (items_left_ > 0) continue;
    partial_bytes_ = 0;
    out = std::exchange(partial_, {});
    return true;
  }
  if (consumed_ == buffer_.size() && buffer_.capacity() > kKeptCapacity) {
    Bytes().swap(buffer_);
    consumed_ = 0;
  }
  return false;
}

// Reads a whole request, or the beginning of a list.
bool TorchRequestReader::read_head(Cursor& in) {
  partial_ = {};
  uint8_t query = 0;
  if (!in.take(query)) return false;
  if (!begun_ && query != TorchRequest::kValidate) {
    in.refuse("the first byte is not that of a TCPStore client of torch 2.0 or newer");
    return false;
  }
  if (query >= std::size(kShapes)) {
    in.refuse(fmt::format("a TCPStore client sent operation {}, which torch 2.13 does not have", query));
    return false;
  }
  partial_.query = query;
  const Shape& shape = kShapes[query];
  partial_.request.operation = shape.operation;
  if (shape.list) return in.take(items_left_) && in.within(items_left_, kMaxKeysPerRequest, "a list of keys");
  if (shape.short_number && !in.take(partial_.number)) return false;
  begun_ = true;
  if (shape.key && !in.take_key(partial_.request)) return false;
  for (int i = 0; i < shape.values; ++i) {
    if (!in.take_value(partial_.request)) return false;
  }
  return !shape.number || in.take(partial_.request.number);
}

bool TorchRequestReader::read_item(Cursor& in) {
  Request& request = partial_.request;
  if (!in.take_key(request)) return false;
  if (kShapes[partial_.query].values > 0 && !in.take_value(request)) {
    request.keys.pop_back();
    return false;
  }
  --items_left_;
  return true;
}

}  // namespace muster
