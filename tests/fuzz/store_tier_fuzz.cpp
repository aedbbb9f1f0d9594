// What comes over a link between tiers, read by either end: the first byte says how the rest is cut into reads. However
// it is cut, the server hears the same requests and the same end, and the proxy lives.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/proxy/proxy_link.h"
#include "muster/store/server/server_session.h"

namespace muster {
namespace {

constexpr TimePoint kNow{1'000'000'000};

struct Heard {
  Bytes requests;  // encoded again
  bool ended = false;
  friend bool operator==(const Heard&, const Heard&) = default;
};

template <class Each>
void in_pieces(ByteView stream, size_t piece, Each each) {
  for (bool on = true; on && !stream.empty(); stream = stream.subspan(std::min(piece, stream.size()))) {
    on = each(stream.first(std::min(piece, stream.size())));
  }
}

Heard serve(ByteView stream, size_t piece) {
  ServerSession host;
  host.link_up(kNow);
  Heard heard;
  in_pieces(stream, piece, [&](ByteView bytes) {
    const auto input = host.receive(bytes, kNow);
    heard.ended = !input || input->closed;
    if (!input) return false;
    for (const Request& request : input->requests) {
      const Bytes again = *encode_request(request);
      heard.requests.insert(heard.requests.end(), again.begin(), again.end());
    }
    Bytes out;
    host.write(out, 1s);
    return !heard.ended;
  });
  return heard;
}

void be_answered(ByteView stream, size_t piece) {
  ProxyLink link({{true}, "fuzz"}, SessionId{});
  link.begin(kNow);
  for (const StoreOperation operation :
       {StoreOperation::kGet, StoreOperation::kAdd, StoreOperation::kBarrier, StoreOperation::kSet}) {
    Request request{operation, 1 + static_cast<RequestId>(operation), {"k"}};
    if (operation == StoreOperation::kSet) request.values.emplace_back();
    request.number = 1;
    link.submit(std::move(request), 1, kNow);
  }
  in_pieces(stream, piece, [&](ByteView bytes) {
    const auto taken = link.receive(bytes, kNow);
    Bytes out;
    link.write(out, kNow + 1s);
    link.take_replies();
    MUSTER_CHECK(taken || link.lost(), "a proxy that understands nothing goes on");
    return taken.has_value();
  });
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const muster::ByteView stream(data + 1, size - 1);
  const muster::Heard whole = muster::serve(stream, stream.size());
  const muster::Heard cut = muster::serve(stream, size_t{1} + data[0]);
  MUSTER_CHECK(whole.ended == cut.ended, "the end depends on how the bytes were cut");
  MUSTER_CHECK(whole.ended || whole.requests == cut.requests, "requests depend on how they were cut");
  muster::be_answered(stream, size_t{1} + data[0]);
  return 0;
}
