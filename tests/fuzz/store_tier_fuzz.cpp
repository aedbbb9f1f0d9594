// The bytes on a proxy's connection, read by either end. The first byte says how the rest is cut into reads. For any
// cut, the server must read the same requests and the same end, and the proxy must keep running.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/proxy/proxy_link.h"
#include "muster/store/server/server_session.h"

namespace muster {
namespace {

constexpr TimePoint kNow{1'000'000'000};

struct Outcome {
  Bytes requests;  // the parsed requests, encoded again
  bool ended = false;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <class Each>
void in_pieces(ByteView stream, size_t piece, Each each) {
  for (bool on = true; on && !stream.empty(); stream = stream.subspan(std::min(piece, stream.size()))) {
    on = each(stream.first(std::min(piece, stream.size())));
  }
}

Outcome serve(ByteView stream, size_t piece) {
  ServerSession session(steady_clock());
  session.link_up();
  Outcome outcome;
  in_pieces(stream, piece, [&](ByteView bytes) {
    const auto input = session.receive(bytes);
    outcome.ended = !input || input->closed;
    if (!input) return false;
    for (const Request& request : input->requests) {
      const Bytes again = *encode_request(request);
      outcome.requests.insert(outcome.requests.end(), again.begin(), again.end());
    }
    Bytes out;
    session.write(out);
    return !outcome.ended;
  });
  return outcome;
}

void play_proxy(ByteView stream, size_t piece) {
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
  const muster::Outcome whole = muster::serve(stream, stream.size());
  const muster::Outcome cut = muster::serve(stream, size_t{1} + data[0]);
  MUSTER_CHECK(whole.ended == cut.ended, "the end depends on how the bytes were cut");
  MUSTER_CHECK(whole.ended || whole.requests == cut.requests, "requests depend on how they were cut");
  muster::play_proxy(stream, size_t{1} + data[0]);
  return 0;
}
