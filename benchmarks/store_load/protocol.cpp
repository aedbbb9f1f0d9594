#include "protocol.h"

namespace muster::load {
namespace {

enum Query : uint8_t {
  kValidate = 0,
  kSet = 1,
  kGet = 3,
  kAdd = 4,
  kWait = 6,
  kMultiGet = 10,
  kMultiSet = 11,
  kPing = 13,
  kBarrier = 18
};
constexpr uint32_t kMagic = 0x3C85F7CE;
constexpr uint32_t kNonce = 0x6d757374;
constexpr uint8_t kStopWaiting = 0;

Writer& put_counted(Writer& out, ByteView bytes) { return out.put(uint64_t{bytes.size()}).put_raw(bytes); }

Writer& put_keys(Writer& out, const std::vector<std::string>& keys) {
  out.put(uint64_t{keys.size()});
  for (const std::string& key : keys) put_counted(out, as_bytes(key));
  return out;
}

Step answered(Writer&& request, Writer&& reply) {
  Step step{request.take(), 0, reply.take()};
  step.reply_bytes = step.reply.size();
  return step;
}

Step released(Writer&& request) {
  Writer reply;
  reply.put(kStopWaiting);
  return answered(std::move(request), std::move(reply));
}

}  // namespace

Step ping() {
  Writer request, reply;
  request.put(kPing).put(kNonce);
  reply.put(kNonce);
  return answered(std::move(request), std::move(reply));
}

Bytes silent_set(const std::string& key, ByteView value) {
  Writer request;
  put_counted(put_counted(request.put(kSet), as_bytes(key)), value);
  return request.take();
}

Bytes silent_multi_set(const std::vector<std::string>& keys, ByteView value_of_each) {
  Writer request;
  request.put(kMultiSet).put(uint64_t{keys.size()});
  for (const std::string& key : keys) put_counted(put_counted(request, as_bytes(key)), value_of_each);
  return request.take();
}

Step after(ByteView silent, Step step) {
  Writer both;
  step.request = both.put_raw(silent).put_raw(step.request).take();
  return step;
}

Step greet() {
  Writer request;
  request.put(kValidate).put(kMagic);
  return after(request.take(), ping());
}

Step set(const std::string& key, ByteView value) { return after(silent_set(key, value), ping()); }

Step get(const std::string& key, ByteView value) {
  Writer request, reply;
  put_counted(request.put(kGet), as_bytes(key));
  put_counted(reply, value);
  return answered(std::move(request), std::move(reply));
}

Step add(const std::string& key, int64_t amount) {
  Writer request;
  put_counted(request.put(kAdd), as_bytes(key)).put(amount);
  return {request.take(), sizeof(int64_t), {}};
}

Step wait(const std::vector<std::string>& keys) {
  Writer request;
  put_keys(request.put(kWait), keys);
  return released(std::move(request));
}

Step multi_get(const std::vector<std::string>& keys, ByteView value_of_each) {
  Writer request, reply;
  put_keys(request.put(kMultiGet), keys);
  for (size_t i = 0; i < keys.size(); ++i) put_counted(reply, value_of_each);
  return answered(std::move(request), std::move(reply));
}

Step multi_set(const std::vector<std::string>& keys, ByteView value_of_each) {
  return after(silent_multi_set(keys, value_of_each), ping());
}

Step barrier(const std::string& key, int64_t count) {
  Writer request;
  put_counted(request.put(kBarrier), as_bytes(key)).put(count);
  return released(std::move(request));
}

}  // namespace muster::load
