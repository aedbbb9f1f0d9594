#include "muster/io/connect/negotiation.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>

namespace muster {

Result<Negotiation> Negotiation::begin(Fd socket, Handshake::Side side, const Credentials& credentials,
                                       ByteView hello) {
  Handshake handshake(side, credentials.secret, hello);
  if (!credentials.tls) return Negotiation(plain_stream(std::move(socket)), std::move(handshake));
  MUSTER_ASSIGN(auto stream, credentials.tls->wrap(std::move(socket), side));
  Negotiation negotiation(std::move(stream), std::move(handshake));
  negotiation.may_be_plain_ = side == Handshake::Side::kServer;
  return negotiation;
}

Result<bool> Negotiation::flush() {
  const Bytes more = handshake_.take_output();
  output_.insert(output_.end(), more.begin(), more.end());
  while (!output_.empty()) {
    MUSTER_ASSIGN(const size_t written, stream_->write(output_));
    if (written == 0) return false;
    output_.erase(output_.begin(), output_.begin() + static_cast<ptrdiff_t>(written));
  }
  return true;
}

Result<bool> Negotiation::read_some() {
  std::array<uint8_t, 4096> buffer;
  MUSTER_ASSIGN(const size_t count, stream_->read(buffer));
  const ByteView bytes = ByteView(buffer).first(count);
  may_be_plain_ = may_be_plain_ && count == 0;
  MUSTER_ASSIGN(const size_t used, handshake_.feed(bytes));
  leftover_.insert(leftover_.end(), bytes.begin() + static_cast<ptrdiff_t>(used), bytes.end());
  return count > 0;
}

Result<bool> Negotiation::step() {
  while (true) {
    MUSTER_ASSIGN(const bool flushed, flush());
    // Also reads the bytes that TLS has already decrypted, because no event reports them.
    if (handshake_.done() && !stream_->has_buffered()) return flushed;
    MUSTER_ASSIGN(const bool more, read_some());
    if (!more) return false;
  }
}

Result<bool> Negotiation::advance() {
  auto done = step();
  if (done) return done;
  if (done.error().code == ErrorCode::kPeerLost) {
    // A peer that refuses sends a reason and closes. If a write failed first, this reason is still to be read.
    const auto last_words = read_some();
    if (!last_words && last_words.error().code != ErrorCode::kPeerLost) return last_words;
    done.error().message += " during the handshake";
    return done;
  }
  // OpenSSL sends no reason to a client that does not use TLS. This tells a muster client without TLS what is missing.
  if (may_be_plain_ && done.error().code == ErrorCode::kProtocol) send_refusal(fd(), Handshake::Refusal::kTlsRequired);
  (void)flush();  // tells the peer the reason, if the socket takes it
  return done;
}

void Negotiation::send_refusal(int socket, Handshake::Refusal reason) {
  const Bytes bytes = Handshake::refuse(reason);
  (void)send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

void Negotiation::reject(Handshake::Refusal reason) {
  if (!handshake_.done()) handshake_.reject(reason);  // if done, only the server's proof is still to be sent
  (void)flush();
}

uint32_t Negotiation::interest() const { return EPOLLIN | (stream_->wants_write() ? uint32_t{EPOLLOUT} : 0); }

Connection Negotiation::finish(Address peer) && {
  return {std::move(stream_), handshake_.peer_hello(), std::move(peer), std::move(leftover_)};
}

std::string seconds(Duration duration) {
  const double count = std::chrono::duration<double>(duration).count();
  return count < 10 ? fmt::format("{:.2g}", count) : fmt::format("{:.0f}", count);
}

}  // namespace muster
