#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "muster/transport/shm/shm_link.h"

namespace muster {

/// A kind of link between processes: where to listen, and how.
struct ProcessLinkKind {
  std::string name;
  std::function<Address()> address;  ///< returns a new address at every call
  std::function<Credentials()> credentials;
  bool shm = false;

  Result<std::unique_ptr<Listener>> listen(Loop& loop, LinkIdentity self, LinkHandler handler) const;
  std::unique_ptr<Dial> connect(Loop& loop, const std::string& address, LinkIdentity self, Rank expected,
                                const Deadline& deadline, ConnectHandler handler) const;
  /// Rank `rank` of 2 in group "test", generation 7.
  LinkIdentity identity(Rank rank) const;
};

inline std::ostream& operator<<(std::ostream& out, const ProcessLinkKind& kind) { return out << kind.name; }

/// All kinds that this machine supports. IPv6 is included only if the machine has it.
std::vector<ProcessLinkKind> process_link_kinds();

/// A long deadline. A wait reaches it only if there is a bug.
Deadline test_deadline();

}  // namespace muster
