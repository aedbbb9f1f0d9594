#include "muster/io/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/io_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST(Address, ReadsAndWritesItsTextForm) {
  for (const std::string text : {"10.0.0.1:29500", "0.0.0.0:0", "[::1]:29500", "[fe80::1]:1", "[::ffff:10.0.0.1]:65535",
                                 "unix:/run/muster/x", "unix:@job", "unix:relative"}) {
    const auto address = Address::parse(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(address->to_string(), text);
    EXPECT_EQ(*Address::parse(address->to_string()), *address);
    EXPECT_EQ(Address::from_raw(address->raw(), address->raw_length()), *address);
  }
}

TEST(Address, RefusesInvalidText) {
  for (const std::string text :
       {"", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:x", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0:1", "::1:29500",
        "[::1]", "[::1]29500", "[10.0.0.1]:1", "[::g]:1", "[fe80::1%no-such-if]:1", "localhost:29500",
        "unix:", "unix:@", " 10.0.0.1:1", "10.0.0.1:1 "}) {
    const auto address = Address::parse(text);
    ASSERT_FALSE(address) << text;
    EXPECT_EQ(address.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(address.error().message, HasSubstr("'" + text + "'"));
  }
  EXPECT_FALSE(Address::parse("unix:/" + std::string(200, 'x')));
  EXPECT_FALSE(Address::parse(std::string_view("unix:/a\0b", 9)));
  EXPECT_TRUE(Address::parse("unix:/" + std::string(106, 'x')));
}

TEST(Address, HasAHostAndAPort) {
  const Address v6 = *Address::parse("[::1]:80");
  EXPECT_EQ(v6.host(), "::1");
  EXPECT_EQ(v6.port(), 80);
  EXPECT_EQ(v6.with_port(81).to_string(), "[::1]:81");
  EXPECT_EQ(Address::parse("10.1.2.3:4")->with_port(5).to_string(), "10.1.2.3:5");
  EXPECT_EQ(Address::parse("unix:/x")->host(), "/x");
  EXPECT_EQ(Address::parse("unix:/x")->port(), 0);
  EXPECT_EQ(Address::unix_abstract("job"), *Address::parse("unix:@job"));
  EXPECT_EQ(Address().to_string(), "(no address)");
}

TEST(Address, RecognizesLoopback) {
  for (const char* text : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/x"}) {
    EXPECT_TRUE(Address::parse(text)->is_loopback()) << text;
  }
  for (const char* text : {"10.0.0.1:1", "0.0.0.0:1", "[::]:1", "[::ffff:10.0.0.1]:1"}) {
    EXPECT_FALSE(Address::parse(text)->is_loopback()) << text;
  }
}

TEST(HostPort, IsSplitInEveryForm) {
  const std::tuple<const char*, const char*, int> cases[] = {
      {"node7:1234", "node7", 1234},    {"node7", "node7", 29500}, {"10.0.0.1:5", "10.0.0.1", 5},
      {"[::1]:80", "::1", 80},          {"[::1]", "::1", 29500},   {"::1", "::1", 29500},
      {"fe80::1:2", "fe80::1:2", 29500}};
  for (const auto& [text, host, port] : cases) {
    const auto split = parse_host_port(text, 29500);
    ASSERT_TRUE(split) << text;
    EXPECT_EQ(split->host, host);
    EXPECT_EQ(split->port, port);
  }
  for (const char* text : {"", ":80", "a:", "a:b", "a:70000", "a:1:2", "[::1", "[::1]80", "[]:80"}) {
    const auto split = parse_host_port(text, 1);
    ASSERT_FALSE(split) << text;
    EXPECT_EQ(split.error().code, ErrorCode::kInvalidArgument);
  }
}

TEST(Resolve, FindsNumericHostsAndNamesUnknownOnes) {
  const auto found = resolve("127.0.0.1", 80);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->front().to_string(), "127.0.0.1:80");
  EXPECT_EQ(resolve("::1", 80)->front().to_string(), "[::1]:80");
  const auto unknown = resolve("no such host", 80);  // the space makes the name invalid, so no name server is asked
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(unknown.error().message, HasSubstr("no such host"));
}

TEST(Interface, IsFoundByNameAndByAddress) {
  EXPECT_EQ(interface_address("lo")->to_string(), "127.0.0.1:0");
  EXPECT_EQ(interface_address("127.0.0.1")->to_string(), "127.0.0.1:0");
  EXPECT_EQ(interface_address("127.3.2.1")->to_string(), "127.3.2.1:0");
  if (has_ipv6()) {
    EXPECT_EQ(interface_address("::1")->to_string(), "[::1]:0");
  }
}

TEST(Interface, ThatIsUnknownListsExistingOnes) {
  for (const std::string name : {"nosuchif0", "203.0.113.77", "2001:db8::77", ""}) {
    const auto result = interface_address(name);
    ASSERT_FALSE(result) << name;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(result.error().message, HasSubstr("'" + name + "'"));
    EXPECT_THAT(result.error().message, HasSubstr("lo (127.0.0.1)"));
  }
}

TEST(LocalAddress, IsTheOneFromWhichATargetIsReached) {
  EXPECT_EQ(local_address_towards(*Address::parse("127.0.0.1:0"))->to_string(), "127.0.0.1:0");
  if (has_ipv6()) {
    EXPECT_EQ(local_address_towards(*Address::parse("[::1]:5"))->to_string(), "[::1]:0");
  }
  EXPECT_EQ(local_address_towards(*Address::parse("unix:@x")).error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster
