#include "muster/store/connect.h"

#include <optional>
#include <vector>

namespace muster {
namespace {

constexpr std::string_view kTcpScheme = "tcp://";

bool refusal(const Error& error) {
  return error.code == ErrorCode::kAuthentication || error.code == ErrorCode::kProtocol;
}

// Resolves host names.
Result<std::vector<Address>> addresses_of_store(const std::string& url) {
  if (!url.starts_with(kTcpScheme)) {
    MUSTER_ASSIGN(const Address address, Address::parse(url));
    return std::vector{address};
  }
  MUSTER_ASSIGN(const HostPort where, parse_host_port(std::string_view(url).substr(kTcpScheme.size()), 0));
  if (where.port == 0) return fail(ErrorCode::kInvalidArgument, "the store's address " + url + " has no port");
  return resolve(where.host, where.port);
}

}  // namespace

DialOptions store_dial_options(const Address& address, const Credentials& credentials, ByteView hello) {
  DialOptions options{credentials, Bytes(hello.begin(), hello.end())};
  if (address.is_unix()) options.credentials.tls = nullptr;
  return options;
}

// A host name may have several addresses, and the server may listen on only some of them. So this dials all addresses
// and uses the first connection.
Result<Connection> connect_to_store(const std::string& url, const Credentials& credentials, const Deadline& deadline,
                                    ByteView hello) {
  MUSTER_ASSIGN(const auto addresses, addresses_of_store(url));
  MUSTER_ASSIGN(const auto loop, Loop::create());
  std::optional<Connection> connection;
  std::optional<Error> error;
  size_t failures = 0;
  std::vector<std::unique_ptr<Dial>> dials;
  for (const Address& address : addresses) {
    DialOptions options = store_dial_options(address, credentials, hello);
    options.retry = true;
    dials.push_back(dial(*loop, address, options, deadline, [&](Result<Connection> outcome) {
      if (outcome && !connection) connection = std::move(*outcome);
      if (outcome) return;
      ++failures;
      // A server's refusal tells more than the error of an address where no server listens.
      if (!error || refusal(outcome.error())) error = outcome.error();
    }));
  }
  const auto refused = [&] { return error && refusal(*error); };
  const auto done = [&] { return connection || refused() || failures == addresses.size(); };
  while (!done()) loop->run_once(deadline.or_sooner(loop->clock().now() + 1s));  // each dial ends at the deadline
  if (!connection) return tl::unexpected(error->in("connecting to the store at " + url));
  if (to_string(connection->hello) != kStoreHello) {
    return fail(ErrorCode::kProtocol, "the muster server at " + url + " is no store");
  }
  return std::move(*connection);
}

Result<> close_session(const std::string& url, const Credentials& credentials, const SessionId& session,
                       const Deadline& deadline) {
  MUSTER_ASSIGN(const Connection connection, connect_to_store(url, credentials, deadline, proxy_hello(session)));
  Bytes close = encode_session_close();
  const iovec segment{close.data(), close.size()};
  MUSTER_ASSIGN(const size_t sent, connection.stream->write({&segment, 1}));
  if (sent == close.size()) return {};
  return fail(ErrorCode::kUnavailable, "a new connection to the store at " + url + " takes no bytes");
}

}  // namespace muster
