#pragma once

#include <cstddef>
#include <memory>

namespace muster::load {

/// A library whose collectives are measured, as one rank sees it. Elements are float32, sums, the root is rank 0. What
/// fails ends the process with a message: a bench has nothing to go on with.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Memory for `count` elements that this library's collectives like best, or null where it has none of its own; kept
  /// until release().
  virtual float* allocate([[maybe_unused]] size_t count) { return nullptr; }
  virtual void release() {}

  virtual void all_reduce(float* data, size_t count) = 0;  ///< in place
  virtual void broadcast(float* data, size_t count) = 0;
  /// `block` elements of each rank.
  virtual void all_gather(const float* input, float* output, size_t block) = 0;
  virtual void reduce_scatter(const float* input, float* output, size_t block) = 0;
  virtual void all_to_all(const float* input, float* output, size_t block) = 0;
  virtual void barrier() = 0;
};

/// Joins the other ranks, as the command line and the environment say.
std::unique_ptr<Peer> join(int argc, char** argv);

}  // namespace muster::load
