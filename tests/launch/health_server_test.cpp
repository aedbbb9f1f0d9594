#include "muster/launch/agent/health_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <vector>

#include "muster/io/socket.h"

namespace muster {
namespace {

Deadline health_deadline() { return Deadline::after(std::chrono::seconds(60)); }

class HealthServerTest : public testing::Test {
 protected:
  Fd connected() {
    Result<Fd> socket = start_connect(server_->address());
    EXPECT_TRUE(socket);
    return std::move(*socket);
  }
  // What the server sends until it closes its side.
  std::string answer_to(const std::string& request) {
    const Fd socket = connected();
    std::string answer;
    bool sent = request.empty(), ended = false;
    const auto exchange = [&] {
      if (!sent) sent = ::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) > 0;
      std::array<char, 256> piece;
      const ssize_t n = ::recv(socket.get(), piece.data(), piece.size(), 0);
      if (n > 0) answer.append(piece.data(), static_cast<size_t>(n));
      ended = n == 0;
      return ended;
    };
    while (!exchange() && !health_over_.passed()) loop_->run_once(Deadline::after(std::chrono::milliseconds(1)));
    EXPECT_TRUE(ended) << answer;
    return answer;
  }

  const Deadline health_over_ = health_deadline();
  std::unique_ptr<Loop> loop_ = std::move(*Loop::create());
  std::unique_ptr<HealthServer> server_ =
      std::move(*HealthServer::listen(*loop_, Address::parse("127.0.0.1:0").value()));
};

TEST_F(HealthServerTest, AnswersEveryRequest) {
  for (const char* request : {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET /healthz HTTP/1.0\r\n\r\n", "nonsense"}) {
    EXPECT_THAT(answer_to(request), testing::StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(answer_to(request), testing::EndsWith("\r\n\r\nok\n"));
  }
}

TEST_F(HealthServerTest, ClosesSilentClients) { EXPECT_EQ(answer_to(""), ""); }

TEST_F(HealthServerTest, AnswersAfterManySilentClients) {
  std::vector<Fd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(connected());
  while (loop_->poll()) continue;
  silent.clear();
  while (loop_->poll()) continue;
  EXPECT_THAT(answer_to("GET / HTTP/1.1\r\n\r\n"), testing::StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HealthServerTest, RefusesWhatIsNotAPort) {
  EXPECT_EQ(HealthServer::from_environment(*loop_, {}).value(), nullptr);
  for (const char* port : {"0", "65536", "-1", "80a", "http"}) {
    const auto server = HealthServer::from_environment(*loop_, {{"TORCHELASTIC_HEALTH_CHECK_PORT", port}});
    ASSERT_FALSE(server);
    EXPECT_EQ(server.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(server.error().message, testing::HasSubstr(port));
  }
}

}  // namespace
}  // namespace muster
