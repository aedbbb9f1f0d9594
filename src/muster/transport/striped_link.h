#pragma once

#include <memory>
#include <vector>

#include "muster/transport/link.h"

namespace muster {

/// What goes over one subflow before the next has its turn.
inline constexpr size_t kStripeBytes = size_t{64} << 10;

/// One link of several to the same peer, its subflows: the stream of bytes goes over them in turn, a stripe each. For
/// networks that give one connection only a part of what they carry. Both ends make it of as many subflows, in the same
/// order. Pings and notes take the first subflow. Like every link it ends as a whole: with the first operation that a
/// subflow which has ended cannot carry, or when all subflows have; until then what the peer had sent can be received.
std::unique_ptr<Link> striped_link(std::vector<std::unique_ptr<Link>> subflows);

/// The subflows of one link as they come, in any order, until it is whole.
class SubflowSet {
 public:
  using LossHandler = std::function<void(const Error& why)>;

  /// The link if this was the last subflow that it lacked, else null. `lost` is called when the subflow ends before
  /// that. A subflow that is there already is closed with kAlreadyExists.
  std::unique_ptr<Link> add(std::unique_ptr<Link> link, const Subflow& subflow, LossHandler lost);
  /// Of those that are there.
  void close(const Error& why);

 private:
  std::vector<std::unique_ptr<Link>> subflows_;
};

}  // namespace muster
