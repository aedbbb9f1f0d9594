#pragma once

#include "muster/transport/link_negotiation.h"

namespace muster {

/// Makes a link from a connection whose ends have agreed.
using LinkFactory = std::function<Result<std::unique_ptr<Link>>(NegotiatedLink)>;

/// Listen and connect for every kind of link over a socket. Only the factory differs.
Result<std::unique_ptr<Listener>> listen_for_links(Loop& loop, const Address& address, LinkIdentity self,
                                                   LinkHello::Wire wire, LinkFactory factory, LinkHandler handler);
std::unique_ptr<Dial> dial_link(Loop& loop, const Address& address, LinkIdentity self, LinkHello::Wire wire,
                                Rank expected, const Deadline& deadline, LinkFactory factory, ConnectHandler handler);

}  // namespace muster
