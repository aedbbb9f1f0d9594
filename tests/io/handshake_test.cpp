#include "muster/io/connect/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "muster/base/random.h"

namespace muster {
namespace {

using testing::HasSubstr;
using Side = Handshake::Side;

constexpr size_t kGreeting = 40;

struct Ends {
  Handshake client;
  Handshake server;
};

Ends make_ends(std::string_view client_secret, std::string_view server_secret) {
  return {Handshake(Side::kClient, as_bytes(client_secret), as_bytes("I am the client")),
          Handshake(Side::kServer, as_bytes(server_secret), as_bytes("I am the server"))};
}

/// Passes all pending output of `from` to `to`.
Result<size_t> deliver(Handshake& from, Handshake& to) { return to.feed(from.take_output()); }

ErrorCode code_of(const Result<size_t>& result) { return result ? ErrorCode::kInternal : result.error().code; }

std::string message_of(const Result<size_t>& result) { return result ? "no error" : result.error().message; }

Result<size_t> server_receives(std::string_view bytes) {
  return Handshake(Side::kServer, as_bytes("secret"), {}).feed(as_bytes(bytes));
}

Result<size_t> client_receives(std::string_view bytes) {
  return Handshake(Side::kClient, as_bytes("secret"), {}).feed(as_bytes(bytes));
}

TEST(Handshake, ExchangesHellosWhenTheSecretsAgree) {
  for (const std::string_view secret : {"", "s", "a secret of thirty-two characters"}) {
    Ends ends = make_ends(secret, secret);
    ASSERT_TRUE(deliver(ends.client, ends.server));
    ASSERT_TRUE(deliver(ends.server, ends.client));
    EXPECT_FALSE(ends.server.done());
    EXPECT_FALSE(ends.client.done());
    ASSERT_TRUE(deliver(ends.client, ends.server));
    ASSERT_TRUE(deliver(ends.server, ends.client));
    ASSERT_TRUE(ends.server.done() && ends.client.done());
    EXPECT_EQ(to_string(ends.server.peer_hello()), "I am the client");
    EXPECT_EQ(to_string(ends.client.peer_hello()), "I am the server");
  }
}

TEST(Handshake, AcceptsBytesInPiecesOfAnySize) {
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    Ends ends = make_ends("secret", "secret");
    Bytes to_server, to_client;
    const auto push_some = [&random](Bytes& queue, Handshake& end) {
      const size_t count = std::min<size_t>(queue.size(), random.below(20));
      const auto used = end.feed(ByteView(queue).first(count));
      ASSERT_TRUE(used) << used.error().message;
      ASSERT_EQ(*used, count);
      queue.erase(queue.begin(), queue.begin() + static_cast<ptrdiff_t>(count));
    };
    for (int turn = 0; turn < 10000 && !(ends.client.done() && ends.server.done()); ++turn) {
      const Bytes from_client = ends.client.take_output(), from_server = ends.server.take_output();
      to_server.insert(to_server.end(), from_client.begin(), from_client.end());
      to_client.insert(to_client.end(), from_server.begin(), from_server.end());
      push_some(to_server, ends.server);
      push_some(to_client, ends.client);
    }
    ASSERT_TRUE(ends.client.done() && ends.server.done());
    EXPECT_EQ(to_string(ends.server.peer_hello()), "I am the client");
  }
}

TEST(Handshake, LeavesTrailingBytesToTheCaller) {
  Ends ends = make_ends("secret", "secret");
  ASSERT_TRUE(deliver(ends.client, ends.server));
  ASSERT_TRUE(deliver(ends.server, ends.client));
  Bytes proof = ends.client.take_output();
  const size_t length = proof.size();
  proof.insert(proof.end(), {1, 2, 3});
  const auto used = ends.server.feed(proof);
  ASSERT_TRUE(used);
  EXPECT_EQ(*used, length);
  ASSERT_TRUE(ends.server.done());
  EXPECT_EQ(ends.server.feed(as_bytes("more")).value(), 0u);
}

TEST(Handshake, CarriesAHelloOfEverySizeUpToTheCap) {
  for (const size_t size : {size_t{0}, size_t{1}, Handshake::kMaxHello}) {
    const Bytes hello(size, 'x');
    Handshake client(Side::kClient, {}, hello), server(Side::kServer, {}, hello);
    ASSERT_TRUE(deliver(client, server) && deliver(server, client) && deliver(client, server) &&
                deliver(server, client));
    EXPECT_EQ(server.peer_hello(), hello);
    EXPECT_EQ(client.peer_hello(), hello);
  }
}

TEST(Handshake, RefusesAWrongSecretAtBothEnds) {
  const std::pair<std::string_view, std::string_view> pairs[] = {{"one", "two"}, {"", "two"}, {"one", ""}};
  for (const auto& [client_secret, server_secret] : pairs) {
    Ends ends = make_ends(client_secret, server_secret);
    ASSERT_TRUE(deliver(ends.client, ends.server) && deliver(ends.server, ends.client));
    EXPECT_EQ(code_of(deliver(ends.client, ends.server)), ErrorCode::kAuthentication);
    EXPECT_FALSE(ends.server.done());
    EXPECT_TRUE(ends.server.peer_hello().empty());
    const auto verdict = deliver(ends.server, ends.client);
    EXPECT_EQ(code_of(verdict), ErrorCode::kAuthentication);
    EXPECT_THAT(message_of(verdict), HasSubstr("refused"));
  }
}

TEST(Handshake, RefusesAServerThatDoesNotKnowTheSecret) {
  Ends ends = make_ends("secret", "secret");
  ASSERT_TRUE(deliver(ends.client, ends.server) && deliver(ends.server, ends.client) &&
              deliver(ends.client, ends.server));
  Bytes proof = ends.server.take_output();
  proof[1] ^= 1;
  EXPECT_EQ(code_of(ends.client.feed(proof)), ErrorCode::kAuthentication);
  EXPECT_FALSE(ends.client.done());
}

TEST(Handshake, RefusesAHelloThatWasChangedOnTheWay) {
  Ends ends = make_ends("secret", "secret");
  ASSERT_TRUE(deliver(ends.client, ends.server) && deliver(ends.server, ends.client));
  Bytes proof = ends.client.take_output();
  proof.back() ^= 1;
  EXPECT_EQ(code_of(ends.server.feed(proof)), ErrorCode::kAuthentication);
  EXPECT_TRUE(ends.server.peer_hello().empty());
}

TEST(Handshake, RefusesAProofRecordedEarlier) {
  Ends first = make_ends("secret", "secret");
  const Bytes greeting = first.client.take_output();
  ASSERT_TRUE(first.server.feed(greeting));
  ASSERT_TRUE(deliver(first.server, first.client));
  const Bytes proof = first.client.take_output();
  ASSERT_TRUE(first.server.feed(proof));

  Handshake again(Side::kServer, as_bytes("secret"), {});
  ASSERT_TRUE(again.feed(greeting));
  EXPECT_EQ(code_of(again.feed(proof)), ErrorCode::kAuthentication);
}

TEST(Handshake, RefusesItsOwnProofReflected) {
  Handshake client(Side::kClient, as_bytes("secret"), as_bytes("hello"));
  Bytes greeting = client.take_output();
  // The error says that the peer is a client, too.
  EXPECT_EQ(code_of(Handshake(client).feed(greeting)), ErrorCode::kProtocol);
  greeting[7] = static_cast<uint8_t>(Side::kServer);
  ASSERT_TRUE(client.feed(greeting));
  EXPECT_EQ(code_of(client.feed(client.take_output())), ErrorCode::kAuthentication);
}

TEST(Handshake, RefusesAnOversizedHelloBeforeItArrives) {
  Handshake server(Side::kServer, {}, {});
  ASSERT_TRUE(server.feed(Handshake(Side::kClient, {}, {}).take_output()));
  server.take_output();
  Bytes header(35);
  header[0] = 1;
  header[33] = 0x01;
  header[34] = 0x10;  // 4097
  const auto result = server.feed(header);
  EXPECT_EQ(code_of(result), ErrorCode::kProtocol);
  EXPECT_THAT(message_of(result), HasSubstr("4097"));
  EXPECT_EQ(server.take_output(), (Bytes{2, static_cast<uint8_t>(Handshake::Refusal::kMalformed)}));
}

TEST(Handshake, NamesTheProtocolOfAnotherPeer) {
  const std::pair<std::string_view, const char*> other_protocols[] = {
      {"GET / HTTP/1.1\r\n", "HTTP"},
      {"POST /", "HTTP"},
      {"HTTP/1.1 400 Bad", "HTTP"},
      {"PRI * HTTP/2.0\r\n\r\n", "HTTP"},
      {"SSH-2.0-OpenSSH_9", "SSH"},
      {std::string_view("\x16\x03\x01\x02\x00", 5), "TLS"},
      {std::string_view("\x15\x03\x03\x00\x02\x02", 6), "TLS"},
      {std::string_view("\x00\xCE\xF7\x85\x3C", 5), "TCPStore"},
      {"hello there", "68656c6c6f207468"}};
  for (const auto& [bytes, name] : other_protocols) {
    for (const auto& result : {server_receives(bytes), client_receives(bytes)}) {
      EXPECT_EQ(code_of(result), ErrorCode::kProtocol);
      EXPECT_THAT(message_of(result), HasSubstr(name));
    }
  }
}

TEST(Handshake, NamesTheProtocolFromSingleBytes) {
  Handshake server(Side::kServer, {}, {});
  Result<size_t> result = 0;
  for (const char c : std::string_view("GET ")) {
    ASSERT_TRUE(result);
    result = server.feed(as_bytes(std::string_view(&c, 1)));
  }
  EXPECT_THAT(message_of(result), HasSubstr("HTTP"));
}

TEST(Handshake, AnswersOtherProtocolsWithItsGreeting) {
  Handshake server(Side::kServer, {}, {});
  ASSERT_FALSE(server.feed(as_bytes("GET / HTTP/1.1\r\n")));
  EXPECT_THAT(to_string(server.take_output()), testing::StartsWith("MUSTER"));
}

TEST(Handshake, NamesBothVersionsAtBothEnds) {
  Ends ends = make_ends("secret", "secret");
  Bytes greeting = ends.client.take_output();
  greeting[6] = 9;
  // The greeting of another version may be shorter.
  const auto at_server = ends.server.feed(ByteView(greeting).first(7));
  EXPECT_EQ(code_of(at_server), ErrorCode::kProtocol);
  EXPECT_THAT(message_of(at_server), HasSubstr("version 9"));
  EXPECT_THAT(message_of(at_server), HasSubstr("1 here"));
  Bytes answer = ends.server.take_output();
  ASSERT_EQ(answer.size(), kGreeting);
  answer[6] = 9;
  EXPECT_THAT(message_of(ends.client.feed(answer)), HasSubstr("version 9"));
}

TEST(Handshake, ReadsARefusal) {
  Handshake client(Side::kClient, {}, {});
  const auto result = client.feed(Handshake::refuse(Handshake::Refusal::kWrongUser));
  EXPECT_EQ(code_of(result), ErrorCode::kAuthentication);
  EXPECT_THAT(message_of(result), HasSubstr("another user"));
}

TEST(Handshake, RefusesAMalformedProof) {
  Ends ends = make_ends("secret", "secret");
  ASSERT_TRUE(deliver(ends.client, ends.server) && deliver(ends.server, ends.client));
  EXPECT_EQ(code_of(ends.server.feed(Bytes{2, 1})), ErrorCode::kProtocol);  // only a server may send a refusal
  EXPECT_EQ(code_of(ends.server.feed(Bytes{1})), ErrorCode::kProtocol);     // the handshake stays failed
  EXPECT_EQ(code_of(ends.client.feed(Bytes{7})), ErrorCode::kProtocol);
}

TEST(Handshake, NeverRepeatsANonce) {
  EXPECT_NE(Handshake(Side::kClient, {}, {}).take_output(), Handshake(Side::kClient, {}, {}).take_output());
  EXPECT_NE(generate_secret(), generate_secret());
  EXPECT_EQ(generate_secret().size(), 32u);
}

}  // namespace
}  // namespace muster
