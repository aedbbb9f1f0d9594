#include "muster/io/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <numeric>

#include "io/io_testing.h"
#include "muster/io/stream.h"

namespace muster {
namespace {

using testing::HasSubstr;

/// A temporary directory with a socket. The destructor removes both.
struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/muster-test-XXXXXX";
    MUSTER_CHECK(mkdtemp(name) != nullptr, "mkdtemp failed");
    path = name;
  }
  ~Folder() {
    unlink(socket().c_str());
    rmdir(path.c_str());
  }
  std::string socket() const { return path + "/socket"; }
  Address address() const { return *Address::parse("unix:" + socket()); }
};

TEST(Socket, ListenerPicksAPortAndReportsATakenOne) {
  const auto listener = listen_on(loopback());
  ASSERT_TRUE(listener);
  const Address address = *local_address(listener->get());
  EXPECT_NE(address.port(), 0);
  const auto second = listen_on(address);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().message, HasSubstr(address.to_string()));
}

TEST(Socket, ListenerOnAnAddressOfAnotherHostIsUnavailable) {
  EXPECT_EQ(listen_on(*Address::parse("203.0.113.77:0")).error().code, ErrorCode::kUnavailable);
}

TEST(Socket, IsNonBlockingAndClosedOnExec) {
  const auto listener = listen_on(loopback());
  const auto client = start_connect(*local_address(listener->get()));
  pollfd entry{listener->get(), POLLIN, 0};
  ASSERT_EQ(poll(&entry, 1, 60'000), 1);
  Address peer;
  const auto server = accept_from(listener->get(), &peer);
  ASSERT_TRUE(server && *server);
  EXPECT_EQ(peer, *local_address(client->get()));
  for (const int fd : {listener->get(), client->get(), (*server)->get()}) {
    EXPECT_TRUE(fcntl(fd, F_GETFL) & O_NONBLOCK);
    EXPECT_TRUE(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  }
  EXPECT_FALSE(accept_from(listener->get())->has_value());
}

TEST(UnixSocket, FileIsPrivateAndALiveOneIsNotReplaced) {
  const Folder folder;
  const auto listener = listen_on(folder.address());
  ASSERT_TRUE(listener) << listener.error().message;
  struct stat status;
  ASSERT_EQ(stat(folder.socket().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u & ~umask(umask(0)) & 0777);
  EXPECT_EQ(listen_on(folder.address()).error().code, ErrorCode::kUnavailable);
}

TEST(UnixSocket, FileOfADeadProcessIsReplaced) {
  const Folder folder;
  { ASSERT_TRUE(listen_on(folder.address())); }  // closed, and its file stays
  ASSERT_EQ(access(folder.socket().c_str(), F_OK), 0);
  EXPECT_EQ(start_connect(folder.address()).error().code, ErrorCode::kUnavailable);
  const auto listener = listen_on(folder.address());
  EXPECT_TRUE(listener) << listener.error().message;
}

TEST(UnixSocket, FileOfAnotherKindIsNotReplaced) {
  const Folder folder;
  { const Fd file(open(folder.socket().c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)); }
  EXPECT_FALSE(listen_on(folder.address()));
  struct stat status;
  ASSERT_EQ(stat(folder.socket().c_str(), &status), 0);
  EXPECT_TRUE(S_ISREG(status.st_mode));
}

TEST(UnixSocket, HasThePidAndUidOfItsPeer) {
  const SocketPair pair;
  const auto peer = unix_peer(pair.one.get());
  ASSERT_TRUE(peer);
  EXPECT_EQ(peer->pid, getpid());
  EXPECT_EQ(peer->uid, getuid());
}

TEST(DescriptorPassing, CarriesAnOpenFile) {
  const SocketPair channel, cargo;
  ASSERT_TRUE(send_fd(channel.one.get(), cargo.one.get(), soon()));
  const auto received = receive_fd(channel.two.get(), soon());
  ASSERT_TRUE(received) << received.error().message;
  EXPECT_NE(received->get(), cargo.one.get());
  EXPECT_TRUE(fcntl(received->get(), F_GETFD) & FD_CLOEXEC);
  ASSERT_EQ(write(cargo.two.get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(received->get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

TEST(DescriptorPassing, ReportsAMissingDescriptor) {
  const SocketPair channel;
  ASSERT_TRUE(send_fd(channel.one.get(), -1, soon()));
  const auto received = receive_fd(channel.two.get(), soon());
  ASSERT_TRUE(received) << received.error().message;
  EXPECT_FALSE(*received);
}

TEST(DescriptorPassing, FailsForASilentLostOrDataOnlyPeer) {
  SocketPair channel;
  EXPECT_EQ(receive_fd(channel.one.get(), Deadline::after(10ms)).error().code, ErrorCode::kTimeout);
  ASSERT_EQ(write(channel.two.get(), "x", 1), 1);
  EXPECT_EQ(receive_fd(channel.one.get(), soon()).error().code, ErrorCode::kProtocol);
  channel.two.reset();
  EXPECT_EQ(receive_fd(channel.one.get(), soon()).error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(send_fd(channel.one.get(), 0, soon()).error().code, ErrorCode::kPeerLost);
}

TEST(PlainStream, MovesScatteredBytesInOrder) {
  SocketPair pair;
  const auto one = plain_stream(std::move(pair.one)), two = plain_stream(std::move(pair.two));
  char hello[] = "hello ", world[] = "world";
  const iovec from[] = {{hello, 6}, {nullptr, 0}, {world, 5}};
  EXPECT_EQ(one->write(from).value(), 11u);
  EXPECT_FALSE(one->wants_write());
  char first[3], rest[20];
  const iovec into[] = {{first, sizeof first}, {rest, sizeof rest}};
  EXPECT_EQ(two->read(into).value(), 11u);
  EXPECT_EQ(std::string(first, 3) + std::string(rest, 8), "hello world");
  EXPECT_EQ(two->read(into).value(), 0u);
}

TEST(PlainStream, ReportsAFullSocket) {
  SocketPair pair;
  const auto one = plain_stream(std::move(pair.one)), two = plain_stream(std::move(pair.two));
  std::string bytes(1 << 16, 'x');
  const iovec segment{bytes.data(), bytes.size()};
  while (one->write({&segment, 1}).value() > 0) {
  }
  EXPECT_TRUE(one->wants_write());
  while (two->read({&segment, 1}).value() > 0) {
  }
  EXPECT_EQ(one->write({&segment, 1}).value(), bytes.size());
  EXPECT_FALSE(one->wants_write());
}

TEST(PlainStream, AcceptsMoreSegmentsThanTheKernel) {
  SocketPair pair;
  const auto one = plain_stream(std::move(pair.one)), two = plain_stream(std::move(pair.two));
  std::string bytes(3000, 0);
  std::iota(bytes.begin(), bytes.end(), 0);
  std::vector<iovec> segments;
  for (char& byte : bytes) segments.push_back({&byte, 1});
  std::string arrived;
  for (size_t sent = 0; sent < bytes.size();) {
    sent += one->write(std::span(segments).subspan(sent)).value();
    std::string buffer(5000, 0);
    const iovec segment{buffer.data(), buffer.size()};
    arrived += buffer.substr(0, two->read({&segment, 1}).value());
  }
  EXPECT_EQ(arrived, bytes);
}

TEST(PlainStream, ReportsALostPeerWithoutASignal) {
  SocketPair pair;
  const auto one = plain_stream(std::move(pair.one));
  pair.two.reset();
  char byte = 0;
  const iovec segment{&byte, 1};
  EXPECT_EQ(one->read({&segment, 1}).error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(one->write({&segment, 1}).error().code, ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace muster
