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

constexpr Duration kSendTime = 3s;

Bytes pack(const DeathNotice::Message& message) {
  Writer out;
  out.put_string(message.upstream).put_raw(message.session).put_string(message.root_url).put_string(message.inbox);
  return out.put_bytes(message.event).take();
}

Result<DeathNotice::Message> unpack(ByteView bytes) {
  Reader in(bytes);
  DeathNotice::Message message;
  MUSTER_ASSIGN(message.upstream, in.get_string());
  MUSTER_ASSIGN(const ByteView session, in.get_raw(message.session.size()));
  std::ranges::copy(session, message.session.begin());
  MUSTER_ASSIGN(message.root_url, in.get_string());
  MUSTER_ASSIGN(message.inbox, in.get_string());
  MUSTER_ASSIGN(const ByteView event, in.get_bytes());
  message.event.assign(event.begin(), event.end());
  return message;
}

Result<> send_packed(ByteView packed, const Bytes& secret) {
  const Deadline deadline = Deadline::after(kSendTime);
  MUSTER_ASSIGN(const DeathNotice::Message message, unpack(packed));
  if (message.upstream.empty()) return {};
  MUSTER_ASSIGN(const auto tls, TlsContext::from_environment());
  MUSTER_TRY(close_session(message.upstream, {secret, tls}, message.session, deadline));
  MUSTER_ASSIGN(const auto root, open_store(message.root_url, secret, deadline));
  return root->queue_push(message.inbox, message.event, deadline);
}

}  // namespace

// The agent writes this page, and the monitor reads it after the agent is reaped. So no read is concurrent with a
// write. The agent may be killed at any instruction: `length` is not 0 only while `bytes` holds a complete message.
struct DeathNotice::Page {
  std::atomic<uint32_t> length;  // 0: no message, or one that is not complete
  uint8_t bytes[4092];
};

DeathNotice::DeathNotice() {
  void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  page_ = memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);  // zeroed
}

DeathNotice::~DeathNotice() {
  if (page_ != nullptr) ::munmap(page_, sizeof(Page));
}

void DeathNotice::prepare(const Message& message) {
  const Bytes packed = pack(message);
  if (page_ == nullptr) return;
  page_->length = 0;  // an older message is no longer true, even if the new one is too long
  if (packed.size() > sizeof page_->bytes) return;
  std::ranges::copy(packed, page_->bytes);
  page_->length = static_cast<uint32_t>(packed.size());
}

void DeathNotice::send(const Bytes& secret) const {
  const uint32_t length = page_ == nullptr ? 0 : page_->length.load();
  if (length == 0) return;
  if (const auto sent = send_packed(ByteView(page_->bytes).first(length), secret); !sent)
    log(LogLevel::kInfo, "muster run: cannot tell the root that the agent was killed: " + sent.error().message);
}

}  // namespace muster
