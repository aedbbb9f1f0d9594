#include "muster/group/form/mesh.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "muster/base/random.h"
#include "muster/group/shutdown_errors.h"
#include "muster/io/connect/handshake.h"
#include "muster/io/host_identity.h"
#include "muster/io/outward_address.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

/// Of what else a rank listens for beside its abstract Unix address: "-team", "-messages".
Address beside(const std::string& local_address, const std::string& what) {
  return Address::unix_abstract(local_address.substr(std::string("unix:@").size()) + what);
}

Result<std::vector<Transport>> parse_transports(const std::string& text) {
  std::vector<Transport> allowed;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const auto transport = std::ranges::find(kTransports, word, [](Transport t) { return name(t); });
    if (transport == std::end(kTransports)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is not a transport; use some of shm, unix and tcp, as in shm,tcp", word));
    }
    allowed.push_back(*transport);
    begin = end + 1;
  }
  return allowed;
}

/// Forms one mesh; lives as long as that takes.
class MeshBuilder {
 public:
  MeshBuilder(Store& store, const GroupSpec& membership, const GroupOptions& options, const Deadline& deadline)
      : membership_(membership), options_(options), deadline_(deadline), rendezvous_(store, membership) {}

  Result<Mesh> build() {
    MUSTER_ASSIGN(allowed_, parse_transports(options_.transports));
    MUSTER_ASSIGN(mesh_.loop, Loop::create());
    MUSTER_TRY(introduce());
    MUSTER_TRY(choose_transports());
    MUSTER_TRY(open_tcp());
    MUSTER_TRY(link_up());
    MUSTER_TRY(share_host_comm());
    mesh_.link_table->on_link(nullptr);
    // With all links there is nothing left to listen for. Else who dials while the group dies still has to hear why.
    if (membership_.size <= kMaxFullMesh) mesh_.link_table->stop();
    place_p2p_engines();
    mesh_.transport = transport();
    return std::move(mesh_);
  }

 private:
  bool leads() const { return membership_.rank == 0; }
  /// The ranks of this host.
  const std::vector<Rank>& locals() const { return mesh_.topology.hosts[mesh_.topology.host_of[membership_.rank]]; }
  bool has_host_comm() const { return locals().size() > 1; }
  bool leads_host() const { return locals().front() == membership_.rank; }

  Result<> introduce() {
    RankInfo self;
    self.rank = membership_.rank;
    self.size = membership_.size;
    self.pid = getpid();
    self.host = host_name();
    self.domain = shared_memory_domain();
    if (!options_.host_label.empty()) self.domain += "/label:" + options_.host_label;
    self.process_domain = process_domain();
    if (leads()) {
      MUSTER_ASSIGN(const Tuning tuning, load_tuning());
      self.tuning = tuning.encode();
    }
    for (;;) {
      MUSTER_ASSIGN(const bool met, meet(self));
      if (met) break;
      MUSTER_TRY(rendezvous_.go_on(deadline_));
    }
    mesh_.name = rendezvous_.membership().name;
    mesh_.topology = Topology(mesh_.members);
    MUSTER_ASSIGN(mesh_.tuning, Tuning::decode(mesh_.members[0].tuning));
    return has_host_comm() && leads_host() ? offer_host_comm() : Result<>{};
  }

  /// False: the group that has this name now is over; there may be a next one.
  Result<bool> meet(RankInfo& self) {
    do {
      fill_unguessable({reinterpret_cast<uint8_t*>(&self.instance), sizeof(self.instance)});
    } while (self.gave_up());
    identity_ = LinkIdentity{membership_.rank, membership_.size, rendezvous_.membership().name, membership_.generation,
                             options_.credentials};
    if (identity_.credentials.secret.empty()) MUSTER_TRY(agree_on_secret(self));
    MUSTER_ASSIGN(mesh_.p2p, P2pEngine::create(identity_, options_.tcp_streams));
    mesh_.link_table = std::make_unique<LinkTable>(*mesh_.loop, identity_, options_.tcp_streams);
    // Whoever is lost while the group still forms ends the forming. (The group sets its own handler afterwards, which
    // hears of links that have ended, too.)
    mesh_.link_table->on_link([this](Rank, Link& link) {
      link.on_close([this](const Error& why) {
        if (!had_formed(why) && !error_) error_ = why;
      });
    });
    MUSTER_TRY(listen_locally());
    self.local_address = local_address_;
    self.shares_memory = local_transport_ == Transport::kShm;
    MUSTER_ASSIGN(const bool announced, rendezvous_.announce(self, deadline_));
    if (!announced) return false;
    auto members = rendezvous_.members(deadline_);
    if (!members || !*members) rendezvous_.give_up(self);
    if (!members) return tl::unexpected(std::move(members.error()));
    if (!*members) return false;
    mesh_.members = std::move(**members);
    return true;
  }

  /// Whoever can use the store may join the group: the store is what vouches for the ranks when the job has no secret.
  Result<> agree_on_secret(RankInfo& self) {
    if (leads()) {
      self.secret = generate_secret();
      identity_.credentials.secret = self.secret;
      return {};
    }
    MUSTER_ASSIGN(const auto leader, rendezvous_.leader(deadline_));
    if (leader.secret.empty()) {
      return fail(ErrorCode::kAuthentication,
                  fmt::format("{} has the job's secret and rank {} has none; set MUSTER_SECRET at every rank",
                              leader.to_string(), membership_.rank),
                  membership_.rank);
    }
    identity_.credentials.secret = leader.secret;
    return {};
  }

  /// The first transport, of those for one host, decides; with none of them there is no local listener.
  Result<> listen_locally() {
    const auto local = std::find_if(allowed_.begin(), allowed_.end(), [](Transport t) { return t != Transport::kTcp; });
    if (local == allowed_.end() || allowed_.front() == Transport::kTcp) return {};
    local_transport_ = *local;
    std::array<uint8_t, 12> name;
    fill_unguessable(name);
    const Address address = Address::unix_abstract("muster-" + to_hex(name));
    MUSTER_ASSIGN(local_address_, mesh_.link_table->listen(address, *local));
    MUSTER_TRY(mesh_.p2p->listen(beside(local_address_, "-messages"), *local));
    return {};
  }

  Result<> choose_transports() {
    const RankInfo& self = mesh_.members[membership_.rank];
    const bool tcp_allowed = std::count(allowed_.begin(), allowed_.end(), Transport::kTcp) != 0;
    for (const RankInfo& member : mesh_.members) {
      const bool local = !local_address_.empty() && !member.local_address.empty() && member.domain == self.domain;
      chosen_.push_back(local ? local_transport_ : Transport::kTcp);
      if (member.rank == self.rank || local) continue;
      needs_tcp_ = true;
      if (!tcp_allowed) {
        return fail(ErrorCode::kUnavailable,
                    fmt::format("{} is on another host and tcp is not among the transports '{}'", member.to_string(),
                                options_.transports),
                    member.rank);
      }
    }
    return {};
  }

  /// Only a group that spans hosts opens a port: the second round is theirs alone. All ranks see the same members, so
  /// all agree on whether there is one.
  Result<> open_tcp() {
    const bool one_host = std::all_of(mesh_.members.begin(), mesh_.members.end(), [this](const RankInfo& member) {
      return member.domain == mesh_.members[0].domain;
    });
    if (one_host && !needs_tcp_) return {};
    std::string mine;
    if (needs_tcp_) {
      MUSTER_ASSIGN(const auto address, tcp_address(one_host));
      MUSTER_ASSIGN(const auto links, mesh_.link_table->listen(address, Transport::kTcp));
      MUSTER_ASSIGN(const auto messages, mesh_.p2p->listen(address, Transport::kTcp));
      mine = links + " " + messages;
    }
    MUSTER_ASSIGN(const auto addresses, rendezvous_.exchange("tcp", mine, deadline_));
    for (const std::string& pair : addresses) {
      const size_t blank = std::min(pair.find(' '), pair.size());
      tcp_addresses_.push_back(pair.substr(0, blank));
      message_addresses_.push_back(pair.substr(std::min(blank + 1, pair.size())));
    }
    return {};
  }

  Result<Address> tcp_address(bool one_host) const {
    if (!options_.interface.empty()) return interface_address(options_.interface);
    return one_host ? interface_address("127.0.0.1") : outward_address();
  }

  /// Whether two ranks are linked when the group forms.
  bool linked_at_once(Rank low, Rank high) const {
    return membership_.size <= kMaxFullMesh || tree_parent(high) == low;
  }

  Result<> link_up() {
    std::vector<LinkTable::Place> places;
    std::vector<Rank> others;
    for (const RankInfo& member : mesh_.members) {
      const Rank rank = member.rank;
      const bool tcp = chosen_[rank] == Transport::kTcp;
      const std::string address = !tcp ? member.local_address : tcp_addresses_.empty() ? "" : tcp_addresses_[rank];
      places.push_back({member.to_string(), address, chosen_[rank]});
      if (rank == membership_.rank) continue;
      if (linked_at_once(std::min(rank, membership_.rank), std::max(rank, membership_.rank))) others.push_back(rank);
    }
    mesh_.link_table->set_places(std::move(places));
    return mesh_.link_table->link_with(others, deadline_, [this] { return error_; });
  }

  void place_p2p_engines() {
    for (const RankInfo& member : mesh_.members) {
      const bool tcp = chosen_[member.rank] == Transport::kTcp;
      // Without a network there is one rank, or all are local.
      const std::string address = !tcp                         ? beside(member.local_address, "-messages").to_string()
                                  : message_addresses_.empty() ? ""
                                                               : message_addresses_[member.rank];
      mesh_.places.push_back({member, address, chosen_[member.rank]});
    }
  }

  std::string transport() const {
    if (mesh_.host_comm_memory && mesh_.topology.hosts.size() == 1) return "shm";
    std::set<std::string> kinds;
    for (const RankInfo& member : mesh_.members) {
      if (member.rank != membership_.rank) kinds.insert(name(chosen_[member.rank]));
    }
    std::string text;
    for (const auto& kind : kinds) text += (text.empty() ? "" : "+") + kind;
    return text.empty() ? "self" : text;
  }

  /// The host's first rank makes the host communicator's memory and hands it, over a Unix socket of its own, to each
  /// rank that asks. Without memory it hands out nothing: then the group does without.
  Result<> offer_host_comm() {
    auto memory = HostComm::allocate(static_cast<int>(locals().size()));
    if (memory) {
      mesh_.host_comm_memory = std::move(*memory);
    } else if (memory.error().code == ErrorCode::kResourceExhausted) {
      mesh_.no_host_comm_memory = std::move(memory.error());
    } else {
      return tl::unexpected(std::move(memory.error()));
    }
    Acceptor::Options options;
    options.credentials.secret = identity_.credentials.secret;
    MUSTER_ASSIGN(host_comm_acceptor_,
                  Acceptor::create(*mesh_.loop, beside(local_address_, "-team"), options,
                                   [this](Connection connection) { await_request(std::move(connection)); }));
    return {};
  }

  /// The descriptor is sent on request only: it must not be in flight while the peer still reads the handshake, where
  /// nobody would take it.
  void await_request(Connection connection) {
    const int fd = connection.stream->fd();
    host_comm_connections_.push_back(std::move(connection));
    const auto watched = mesh_.loop->watch(fd, EPOLLIN, [this, fd](uint32_t) { answer_request(fd); });
    if (!watched && !error_) error_ = watched.error();
  }

  /// A connection that ends without a request was nobody's: whether a rank is lost, its links tell.
  void answer_request(int fd) {
    const auto connection =
        std::ranges::find(host_comm_connections_, fd, [](const Connection& each) { return each.stream->fd(); });
    uint8_t request = 0;
    const iovec segment{&request, 1};
    const auto got = connection->stream->read({&segment, 1});
    if (got && *got == 0) return;  // it has yet to come
    mesh_.loop->unwatch(fd);
    if (!got) {
      host_comm_connections_.erase(connection);
      return;
    }
    const auto sent = send_fd(fd, mesh_.host_comm_memory.get(), deadline_);
    if (!sent && !error_) error_ = sent.error();
    ++host_comm_given_;
  }

  Result<> share_host_comm() {
    if (!has_host_comm()) return {};
    if (!leads_host()) return receive_host_comm();
    const size_t others = locals().size() - 1;
    const auto given = mesh_.loop->run_until([&] { return host_comm_given_ == others || error_; }, deadline_);
    if (error_) return tl::unexpected(*error_);
    return given;
  }

  Result<> receive_host_comm() {
    std::optional<Result<Connection>> connected;
    DialOptions options;
    options.retry = true;  // it listens once it knows the members
    options.credentials.secret = identity_.credentials.secret;
    const auto attempt = dial(*mesh_.loop, beside(mesh_.members[locals().front()].local_address, "-team"), options,
                              deadline_, [&](Result<Connection> connection) { connected = std::move(connection); });
    MUSTER_TRY(mesh_.loop->run_until([&] { return connected.has_value(); }, deadline_));
    if (!*connected) return tl::unexpected(connected->error());
    Stream& stream = *(**connected).stream;
    uint8_t request = 1;
    const iovec segment{&request, 1};
    MUSTER_TRY(stream.write({&segment, 1}));
    MUSTER_ASSIGN(mesh_.host_comm_memory, receive_fd(stream.fd(), deadline_));
    if (!mesh_.host_comm_memory) {
      const RankInfo& leader = mesh_.members[locals().front()];
      mesh_.no_host_comm_memory =
          Error{ErrorCode::kResourceExhausted, leader.to_string() + " has no memory for it", leader.rank, {}};
    }
    return {};
  }

  const GroupSpec& membership_;
  const GroupOptions& options_;
  Deadline deadline_;
  Rendezvous rendezvous_;
  LinkIdentity identity_;
  std::string local_address_;  ///< of links within the host; empty where there are none
  std::vector<Transport> allowed_;
  Transport local_transport_ = Transport::kTcp;
  std::vector<Transport> chosen_;  ///< by rank
  bool needs_tcp_ = false;
  std::vector<std::string> tcp_addresses_, message_addresses_;  ///< by rank
  Mesh mesh_;
  std::unique_ptr<Acceptor> host_comm_acceptor_;
  std::vector<Connection> host_comm_connections_;
  size_t host_comm_given_ = 0;
  std::optional<Error> error_;
};

}  // namespace

Result<Mesh> form_mesh(Store& store, const GroupSpec& membership, const GroupOptions& options,
                       const Deadline& deadline) {
  return MeshBuilder(store, membership, options, deadline).build();
}

}  // namespace muster
