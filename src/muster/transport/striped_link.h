#pragma once

#include <memory>
#include <vector>

#include "muster/transport/link.h"

namespace muster {

/// What goes over one lane before the next has its turn.
inline constexpr size_t kStripeBytes = size_t{64} << 10;

/// One link of several to the same peer, its lanes: the stream of bytes goes over them in turn, a stripe each. For
/// networks that give one connection only a part of what they carry. Both ends make it of as many lanes, in the same
/// order. Pings and notes take the first lane. Like every link it ends as a whole: with the first operation that a lane
/// which has ended cannot carry, or when all lanes have; until then what the peer had sent can be received.
std::unique_ptr<Link> striped_link(std::vector<std::unique_ptr<Link>> lanes);

/// The lanes of one link as they come, in any order, until it is whole.
class LaneSet {
 public:
  using LossHandler = std::function<void(const Error& why)>;

  /// The link if this was the last lane that it lacked, else null. `lost` is called when the lane ends before that. A
  /// lane that is there already is closed with kAlreadyExists.
  std::unique_ptr<Link> add(std::unique_ptr<Link> lane, const Lane& subflow, LossHandler lost);
  /// Of those that are there.
  void close(const Error& why);

 private:
  std::vector<std::unique_ptr<Link>> lanes_;
};

}  // namespace muster
