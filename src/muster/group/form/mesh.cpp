#include "muster/group/form/mesh.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "muster/base/random.h"
#include "muster/group/form/host_comm_exchange.h"
#include "muster/io/host_identity.h"
#include "muster/io/outward_address.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

/// A rank's abstract Unix address for a purpose other than its links. The suffix is "-host-comm" or "-messages".
Address related_address(const std::string& local_address, const std::string& suffix) {
  return Address::unix_abstract(local_address.substr(std::string("unix:@").size()) + suffix);
}

/// The state of form_mesh(). Each step of build() leaves its result in a field for the later steps.
class MeshBuilder {
 public:
  MeshBuilder(RankExchange& ranks, const GroupOptions& options, const Deadline& deadline)
      : spec_(ranks.spec()), options_(options), deadline_(deadline), ranks_(ranks) {}

  Result<Mesh> build() {
    MUSTER_ASSIGN(allowed_, parse_transports(options_.transports));
    MUSTER_ASSIGN(mesh_.loop, Loop::create());
    MUSTER_TRY(exchange_ranks());
    MUSTER_TRY(offer_host_comm());
    MUSTER_TRY(choose_transports());
    MUSTER_TRY(exchange_tcp_addresses());
    MUSTER_TRY(connect());
    MUSTER_TRY(share_host_comm());
    mesh_.link_table->set_events({});
    // A large group keeps its listeners, because it connects on demand, and because a rank that dials while the group
    // fails must learn the reason.
    if (spec_.size <= kMaxFullMesh) mesh_.link_table->stop_connecting();
    mesh_.transport = transport();
    return std::move(mesh_);
  }

 private:
  const std::vector<Rank>& host_ranks() const { return mesh_.topology.host_ranks(spec_.rank); }
  bool is_first_on_host() const { return host_ranks().front() == spec_.rank; }

  Result<> exchange_ranks() {
    RankInfo self;
    self.rank = spec_.rank;
    self.size = spec_.size;
    self.pid = getpid();
    self.host = host_name();
    self.domain = shared_memory_domain();
    if (!options_.host_label.empty()) self.domain += "/label:" + options_.host_label;
    self.process_domain = process_domain();
    self.shares_memory = allowed_.front() == Transport::kShm;
    if (spec_.rank == 0) {
      MUSTER_ASSIGN(const Tuning tuning, load_tuning());
      self.tuning = tuning.encode();
    }
    for (bool met = false; !met;) {
      MUSTER_ASSIGN(met, try_exchange_ranks(self));
    }
    mesh_.name = ranks_.spec().name;
    mesh_.topology = Topology(mesh_.members);
    MUSTER_ASSIGN(mesh_.tuning, Tuning::decode(mesh_.members[0].tuning));
    return {};
  }

  /// False if the group that has this name now is over. The caller then tries the next group of the name.
  Result<bool> try_exchange_ranks(RankInfo& self) {
    // The instance kGaveUp is reserved for ranks that gave up.
    do {
      fill_secure_random({reinterpret_cast<uint8_t*>(&self.instance), sizeof(self.instance)});
    } while (self.gave_up());
    identity_ = LinkIdentity{spec_.rank, spec_.size, ranks_.spec().name, spec_.generation, options_.credentials};
    if (Bytes& secret = identity_.credentials.secret; secret.empty()) {
      MUSTER_ASSIGN(secret, ranks_.share_secret(deadline_));
    }
    MUSTER_ASSIGN(mesh_.p2p, P2pEngine::create(identity_, options_.tcp_streams));
    mesh_.link_table = std::make_unique<LinkTable>(*mesh_.loop, identity_, options_.tcp_streams);
    // A peer that is lost while it forms the group ends the forming. A peer that is lost after it formed the group does
    // not: this rank can finish without that peer, and may be the only rank that can forward the peer's report.
    const auto died = [this](Rank, const Error& why) {
      if (why.phase == GroupPhase::kForming && !error_) error_ = why;
    };
    const auto lost = [died](Rank rank, LinkTable::Side, const Error& why) { died(rank, why); };
    mesh_.link_table->set_events({.lost = lost, .died = died});
    MUSTER_TRY(listen_locally(self));
    MUSTER_ASSIGN(auto members, ranks_.exchange_members(self, deadline_));
    if (!members) return false;
    mesh_.members = std::move(*members);
    return true;
  }

  /// The first allowed transport is used within the host. If it is tcp, there is no local listener.
  Result<> listen_locally(RankInfo& self) {
    if (allowed_.front() == Transport::kTcp) return {};
    std::array<uint8_t, 12> name;
    fill_secure_random(name);
    const Address address = Address::unix_abstract("muster-" + to_hex(name));
    MUSTER_ASSIGN(self.local_address, mesh_.link_table->listen(address, allowed_.front()));
    MUSTER_TRY(mesh_.p2p->listen(related_address(self.local_address, "-messages"), allowed_.front()));
    return {};
  }

  Result<> choose_transports() {
    const RankInfo& self = mesh_.members[spec_.rank];
    const bool tcp_allowed = std::ranges::count(allowed_, Transport::kTcp) != 0;
    for (const RankInfo& member : mesh_.members) {
      const bool local = !self.local_address.empty() && !member.local_address.empty() && member.domain == self.domain;
      chosen_.push_back(local ? allowed_.front() : Transport::kTcp);
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

  /// A second exchange, only for groups that need TCP, so that other groups open no port. All ranks see the
  /// same members, so all ranks agree on whether this exchange happens.
  Result<> exchange_tcp_addresses() {
    const bool one_host = std::ranges::all_of(
        mesh_.members, [this](const RankInfo& member) { return member.domain == mesh_.members[0].domain; });
    tcp_addresses_.resize(spec_.size);
    if (one_host && !needs_tcp_) return {};
    std::string mine;
    if (needs_tcp_) {
      MUSTER_ASSIGN(const auto address, tcp_address(one_host));
      MUSTER_ASSIGN(const auto links, mesh_.link_table->listen(address, Transport::kTcp));
      MUSTER_ASSIGN(const auto messages, mesh_.p2p->listen(address, Transport::kTcp));
      mine = links + " " + messages;
    }
    MUSTER_ASSIGN(tcp_addresses_, ranks_.exchange("tcp", mine, deadline_));
    return {};
  }

  Result<Address> tcp_address(bool one_host) const {
    if (!options_.interface.empty()) return interface_address(options_.interface);
    return one_host ? interface_address("127.0.0.1") : outward_address();
  }

  Result<> connect() {
    std::vector<LinkTable::Endpoint> messages;
    std::vector<Rank> peers;
    for (const RankInfo& member : mesh_.members) {
      const Rank rank = member.rank;
      std::string link_address = member.local_address, message_address;
      if (chosen_[rank] == Transport::kTcp) {
        const std::string& pair = tcp_addresses_[rank];  // empty if there is no TCP address, as for this rank itself
        const size_t blank = std::min(pair.find(' '), pair.size());
        link_address = pair.substr(0, blank);
        message_address = pair.substr(std::min(blank + 1, pair.size()));
      } else {
        message_address = related_address(member.local_address, "-messages").to_string();
      }
      const ProcessIdentity process{member.pid, member.process_domain};
      mesh_.link_table->set_endpoint(rank, {member.to_string(), process, link_address, chosen_[rank]});
      messages.push_back({member.to_string(), process, message_address, chosen_[rank]});
      const bool parent_or_child = tree_parent(std::max(rank, spec_.rank)) == std::min(rank, spec_.rank);
      if (rank != spec_.rank && (spec_.size <= kMaxFullMesh || parent_or_child)) peers.push_back(rank);
    }
    mesh_.p2p->begin(messages);
    return mesh_.link_table->connect(peers, deadline_, [this] { return error_; });
  }

  std::string transport() const {
    if (mesh_.host_comm_memory && mesh_.topology.hosts.size() == 1) return "shm";
    std::set<std::string> kinds;
    for (const RankInfo& member : mesh_.members) {
      if (member.rank != spec_.rank) kinds.insert(name(chosen_[member.rank]));
    }
    std::string text;
    for (const auto& kind : kinds) text += (text.empty() ? "" : "+") + kind;
    return text.empty() ? "self" : text;
  }

  Result<> offer_host_comm() {
    if (host_ranks().size() == 1) return {};
    const RankInfo& first = mesh_.members[host_ranks().front()];
    host_comm_.emplace(*mesh_.loop, identity_.credentials.secret, related_address(first.local_address, "-host-comm"),
                       deadline_);
    return is_first_on_host() ? host_comm_->offer(static_cast<int>(host_ranks().size())) : Result<>{};
  }

  Result<> share_host_comm() {
    if (!host_comm_) return {};
    MUSTER_ASSIGN(mesh_.host_comm_memory,
                  is_first_on_host() ? host_comm_->serve([this] { return error_; }) : host_comm_->receive());
    if (mesh_.host_comm_memory) return {};
    const RankInfo& first = mesh_.members[host_ranks().front()];
    mesh_.no_host_comm_memory = host_comm_->no_memory().value_or(
        Error{ErrorCode::kResourceExhausted, first.to_string() + " cannot allocate shared memory", first.rank, {}});
    return {};
  }

  const GroupSpec spec_;  ///< with the requested name
  const GroupOptions& options_;
  const Deadline deadline_;
  RankExchange& ranks_;
  LinkIdentity identity_;
  std::vector<Transport> allowed_;
  std::vector<Transport> chosen_;  ///< by rank
  bool needs_tcp_ = false;
  /// By rank: the address for links and the address for messages, separated by a space.
  std::vector<std::string> tcp_addresses_;
  Mesh mesh_;
  std::optional<HostCommExchange> host_comm_;
  std::optional<Error> error_;
};

}  // namespace

Result<Mesh> form_mesh(RankExchange& ranks, const GroupOptions& options, const Deadline& deadline) {
  return MeshBuilder(ranks, options, deadline).build();
}

}  // namespace muster
