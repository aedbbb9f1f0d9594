#include "muster/launch/agent/death_notice.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "muster/base/log.h"
#include "muster/io/connect/tls.h"
#include "muster/store/connect.h"
#include "muster/store/store.h"

namespace muster {
namespace {

constexpr Duration kSayTime = 3s;

Bytes pack(const DeathNotice::Text& text) {
  Writer out;
  out.put_string(text.upstream).put_raw(text.session).put_string(text.root_url).put_string(text.inbox);
  return out.put_bytes(text.call).take();
}

Result<DeathNotice::Text> unpack(ByteView bytes) {
  Reader in(bytes);
  DeathNotice::Text text;
  MUSTER_ASSIGN(text.upstream, in.get_string());
  MUSTER_ASSIGN(const ByteView session, in.get_raw(text.session.size()));
  std::ranges::copy(session, text.session.begin());
  MUSTER_ASSIGN(text.root_url, in.get_string());
  MUSTER_ASSIGN(text.inbox, in.get_string());
  MUSTER_ASSIGN(const ByteView call, in.get_bytes());
  text.call.assign(call.begin(), call.end());
  return text;
}

Result<> tell(ByteView packed, const Bytes& secret) {
  const Deadline deadline = Deadline::after(kSayTime);
  MUSTER_ASSIGN(const DeathNotice::Text text, unpack(packed));
  if (text.upstream.empty()) return {};
  MUSTER_ASSIGN(const auto tls, TlsContext::from_environment());
  MUSTER_TRY(close_session(text.upstream, {secret, tls}, text.session, deadline));
  MUSTER_ASSIGN(const auto root, open_store(text.root_url, secret, deadline));
  return root->queue_push(text.inbox, text.call, deadline);
}

}  // namespace

struct DeathNotice::Page {
  std::atomic<uint32_t> length;  // 0: nothing, or it is being written
  uint8_t bytes[4092];
};

DeathNotice::DeathNotice() {
  void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  page_ = memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);  // zeroed
}

DeathNotice::~DeathNotice() {
  if (page_ != nullptr) ::munmap(page_, sizeof(Page));
}

void DeathNotice::prepare(const Text& text) {
  const Bytes packed = pack(text);
  if (page_ == nullptr) return;
  page_->length = 0;  // also of one that is too long: what was true before is not
  if (packed.size() > sizeof page_->bytes) return;
  std::ranges::copy(packed, page_->bytes);
  page_->length = static_cast<uint32_t>(packed.size());
}

void DeathNotice::say(const Bytes& secret) const {
  const uint32_t length = page_ == nullptr ? 0 : page_->length.load();
  if (length == 0) return;
  if (const auto told = tell(ByteView(page_->bytes).first(length), secret); !told)
    log(LogLevel::kInfo, "muster run: nobody could be told that the agent was killed: " + told.error().message);
}

}  // namespace muster
