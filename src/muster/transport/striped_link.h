#pragma once

#include <memory>
#include <vector>

#include "muster/transport/link.h"

namespace muster {

/// The bytes of one stripe: so many bytes go over one subflow before the next subflow is used.
inline constexpr size_t kStripeBytes = size_t{64} << 10;

/// One link made of several links to the same peer, its subflows. Stripes of the byte stream go over them in turn. This
/// helps on networks that give one connection only a part of their bandwidth. Both ends need the same number of
/// subflows in the same order. Pings and control messages use the first one. The link ends as a whole: when an
/// operation needs a subflow that has ended, or when all subflows have ended. Until then, bytes that were sent can be
/// received.
std::unique_ptr<Link> striped_link(std::vector<std::unique_ptr<Link>> subflows);

/// Collects the subflows of one link, which arrive in any order.
class SubflowSet {
 public:
  using LossHandler = std::function<void(const Error& why)>;

  /// Returns the link if its last missing subflow has arrived, else null. `lost` is called if the subflow ends before
  /// that. A second subflow with the same index is closed with kAlreadyExists.
  std::unique_ptr<Link> add(std::unique_ptr<Link> link, const Subflow& subflow, LossHandler lost);
  /// Closes the subflows that have arrived.
  void close(const Error& why);

 private:
  std::vector<std::unique_ptr<Link>> subflows_;
};

}  // namespace muster
