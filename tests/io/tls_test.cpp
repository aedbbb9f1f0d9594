#include "muster/io/connect/tls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <cstdlib>
#include <fstream>

#include "io/certificates.h"
#include "io/io_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

class Tls : public testing::Test {
 protected:
  std::shared_ptr<TlsContext> context(TestAuthority& authority, const std::string& name, bool expired = false) {
    auto loaded = TlsContext::load(authority.issue(name, expired));
    MUSTER_CHECK(loaded.has_value(), loaded.error().message);
    return *loaded;
  }

  Acceptor::Options accept_with(std::shared_ptr<TlsContext> tls) {
    return {.credentials = {to_bytes("secret"), std::move(tls)}, .hello = to_bytes("server")};
  }
  DialOptions dial_with(std::shared_ptr<TlsContext> tls, bool retry = false) {
    return {.credentials = {to_bytes("secret"), std::move(tls)}, .hello = to_bytes("client"), .retry = retry};
  }

  /// Returns the error of the dial, and checks that the server accepts no connection.
  Error refusal(std::shared_ptr<TlsContext> server_tls, std::shared_ptr<TlsContext> client_tls) {
    Server server(*loop_, loopback(), accept_with(std::move(server_tls)));
    const auto result = dial_now(*loop_, server.address(), dial_with(std::move(client_tls)));
    EXPECT_FALSE(result);
    EXPECT_TRUE(server.accepted.empty());
    return result ? Error{} : result.error();
  }

  std::unique_ptr<Loop> loop_ = make_loop();
  TestAuthority authority_{"the job's authority"}, other_{"another authority"};
};

TEST_F(Tls, CarriesDataBothWays) {
  Server server(*loop_, loopback(), accept_with(context(authority_, "server")));
  auto client = dial_now(*loop_, server.address(), dial_with(context(authority_, "client")));
  ASSERT_TRUE(client) << client.error().message;
  EXPECT_EQ(to_string(client->hello), "server");
  ASSERT_TRUE(drive_until(*loop_, [&] { return !server.accepted.empty(); }));
  std::string text(3 << 20, 0);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  EXPECT_EQ(carry(*client, server.accepted[0], text), text);
  EXPECT_EQ(carry(server.accepted[0], *client, text), text);
  server.accepted.clear();
  char byte;
  const iovec segment{&byte, 1};
  Result<size_t> end = 0;
  ASSERT_TRUE(drive_until(*loop_, [&] { return !(end = client->stream->read({&segment, 1})); }));
  EXPECT_EQ(end.error().code, ErrorCode::kPeerLost);
}

TEST_F(Tls, GathersSmallSegmentsAndScattersThemAgain) {
  Server server(*loop_, loopback(), accept_with(context(authority_, "server")));
  auto client = dial_now(*loop_, server.address(), dial_with(context(authority_, "client")));
  ASSERT_TRUE(client);
  ASSERT_TRUE(drive_until(*loop_, [&] { return !server.accepted.empty(); }));
  char header[] = "header", payload[] = "payload";
  const iovec from[] = {{header, 6}, {nullptr, 0}, {payload, 7}};
  EXPECT_EQ(client->stream->write(from).value(), 13u);
  char small[2], rest[20] = {};
  const iovec into[] = {{small, 2}, {rest, sizeof rest}};
  size_t count = 0;
  ASSERT_TRUE(drive_until(*loop_, [&] { return (count = server.accepted[0].stream->read(into).value()) > 0; }));
  EXPECT_EQ(count, 13u);
  EXPECT_EQ(std::string(small, 2) + rest, "headerpayload");
}

TEST_F(Tls, RefusesAClientOfAnotherAuthorityAtBothEnds) {
  auto files = other_.issue("client");
  files.ca_file = authority_.ca_file();  // the client trusts the server, but the server does not trust the client
  testing::internal::CaptureStderr();
  const Error error = refusal(context(authority_, "server"), *TlsContext::load(files));
  EXPECT_EQ(error.code, ErrorCode::kAuthentication) << error.message;
  EXPECT_THAT(error.message, HasSubstr("unknown ca"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("unable to get local issuer certificate"));
}

TEST_F(Tls, RefusesAServerOfAnotherAuthority) {
  const Error error = refusal(context(other_, "server"), context(authority_, "client"));
  EXPECT_EQ(error.code, ErrorCode::kAuthentication) << error.message;
  EXPECT_THAT(error.message, HasSubstr("the peer's certificate was refused"));
}

TEST_F(Tls, RefusesAnotherAuthorityOfTheSameName) {
  TestAuthority impostor("the job's authority");
  const Error at_client = refusal(context(impostor, "server"), context(authority_, "client"));
  EXPECT_EQ(at_client.code, ErrorCode::kAuthentication) << at_client.message;
  auto files = impostor.issue("client");
  files.ca_file = authority_.ca_file();
  const Error at_server = refusal(context(authority_, "server"), *TlsContext::load(files));
  EXPECT_EQ(at_server.code, ErrorCode::kAuthentication) << at_server.message;
}

TEST_F(Tls, RefusesACertificateThatHasExpired) {
  const Error error = refusal(context(authority_, "server", /*expired=*/true), context(authority_, "client"));
  EXPECT_EQ(error.code, ErrorCode::kAuthentication) << error.message;
  EXPECT_THAT(error.message, HasSubstr("expired"));
}

TEST_F(Tls, RefusesAPlainClientWithAReasonAtBothEnds) {
  testing::internal::CaptureStderr();
  const Error error = refusal(context(authority_, "server"), nullptr);
  EXPECT_EQ(error.code, ErrorCode::kProtocol) << error.message;
  EXPECT_THAT(error.message, HasSubstr("speaks TLS"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("does not speak TLS"));
}

TEST_F(Tls, RefusesAPlainServerWithAReasonAtBothEnds) {
  testing::internal::CaptureStderr();
  const Error error = refusal(nullptr, context(authority_, "client"));
  EXPECT_EQ(error.code, ErrorCode::kProtocol) << error.message;
  EXPECT_THAT(error.message, HasSubstr("does not speak TLS"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("speaks TLS"));
}

TEST_F(Tls, StillDemandsTheSecret) {
  Server server(*loop_, loopback(), accept_with(context(authority_, "server")));
  auto options = dial_with(context(authority_, "client"));
  options.credentials.secret = to_bytes("wrong");
  const auto result = dial_now(*loop_, server.address(), std::move(options));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kAuthentication);
  EXPECT_THAT(result.error().message, HasSubstr("secret"));
}

TEST_F(Tls, RefusesAnythingOlderThanVersion13) {
  Server server(*loop_, loopback(), accept_with(context(authority_, "server")));
  const Fd raw = connect_raw(*loop_, server.address());
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> old_context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  SSL_CTX_set_max_proto_version(old_context.get(), TLS1_2_VERSION);
  const std::unique_ptr<SSL, decltype(&SSL_free)> old(SSL_new(old_context.get()), SSL_free);
  SSL_set_fd(old.get(), raw.get());
  SSL_set_connect_state(old.get());
  int result = 0;
  ASSERT_TRUE(drive_until(*loop_, [&] {
    result = SSL_do_handshake(old.get());
    return SSL_get_error(old.get(), result) != SSL_ERROR_WANT_READ;
  }));
  EXPECT_LE(result, 0);
  EXPECT_TRUE(server.accepted.empty());
}

TEST_F(Tls, DropsAClientThatStopsInTheMiddleOfTheHandshake) {
  auto options = accept_with(context(authority_, "server"));
  options.handshake_timeout = 50ms;
  Server server(*loop_, loopback(), std::move(options));
  const Fd raw = connect_raw(*loop_, server.address());
  ASSERT_EQ(send(raw.get(), "\x16\x03\x01", 3, MSG_NOSIGNAL), 3);
  read_until_closed(*loop_, raw.get());
  EXPECT_TRUE(server.accepted.empty());
}

TEST_F(Tls, NamesAFileThatItCannotUse) {
  const TlsFiles good = authority_.issue("good"), other = authority_.issue("other");
  const std::string junk = authority_.folder() + "/junk.pem";
  std::ofstream(junk) << "this is no PEM";
  for (const std::string& bad : {junk, authority_.folder() + "/missing.pem"}) {
    TlsFiles files[3] = {good, good, good};
    files[0].certificate_file = files[1].key_file = files[2].ca_file = bad;
    for (const auto& each : files) {
      const auto result = TlsContext::load(each);
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
      EXPECT_THAT(result.error().message, HasSubstr(bad));
    }
  }
  const auto mismatch = TlsContext::load({good.certificate_file, other.key_file, good.ca_file});
  ASSERT_FALSE(mismatch);
  EXPECT_THAT(mismatch.error().message, HasSubstr("mismatch"));
}

TEST_F(Tls, ReadsItsFilesFromTheEnvironment) {
  EXPECT_EQ(TlsContext::from_environment().value(), nullptr);
  const TlsFiles files = authority_.issue("env");
  setenv("MUSTER_TLS_CERT", files.certificate_file.c_str(), 1);
  EXPECT_EQ(TlsContext::from_environment().error().code, ErrorCode::kInvalidArgument);
  setenv("MUSTER_TLS_KEY", files.key_file.c_str(), 1);
  setenv("MUSTER_TLS_CA", files.ca_file.c_str(), 1);
  EXPECT_NE(TlsContext::from_environment().value(), nullptr);
  for (const char* name : {"MUSTER_TLS_CERT", "MUSTER_TLS_KEY", "MUSTER_TLS_CA"}) unsetenv(name);
}

}  // namespace
}  // namespace muster
