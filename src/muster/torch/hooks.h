#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "muster/group/group.h"

// Communication hooks: they reduce a Reducer's buckets with fewer bytes, for slow links (Reducer::set_hook). Every hook
// averages over the ranks in place: its future's tensor is the bucket's own buffer, with the same bits at all ranks. A
// gradient that is infinite or NaN at one rank is so at all ranks, as GradScaler needs. A bucket on a device is copied
// to memory of the host, where the hook compresses it; that copy becomes the bucket's buffer, and the future's tensor.
//
// Hooks compress float32 buckets, and average buckets of other dtypes uncompressed. The part of a bucket that
// compression loses is added to the bucket in the next step (error feedback). This error is reset when the bucket holds
// other parameters, as after the first step.
//
// Invalid options throw c10::ValueError, from check() before there is a group. One thread at a time calls a hook, and
// the call does not wait for other ranks. The destructor of a hook fails its pending reductions.

namespace muster {

/// A group, and another one of the same ranks that only one hook uses. The second phase of a reduction begins when the
/// first one is done. That is not in the order of the group's other calls, so the second phase needs a group of its
/// own. Made by hook_groups() or ProcessGroupMuster::duplicate(). Shared, because the hooks' threads and the other
/// users of the groups end in any order.
///
///   ddp.register_comm_hook(muster::int8_hook(muster::hook_groups(group)));
struct HookGroups {
  std::shared_ptr<Group> group;
  std::shared_ptr<Group> secondary_group;  ///< for int8 and PowerSGD; other hooks need none
};

/// Collective, with a barrier. Returns `group` and a secondary group that is split off it. The ranks form the secondary
/// group in `store`, or in job_store() if that is null. The secondary group holds that store. Throws ErrorException.
HookGroups hook_groups(std::shared_ptr<Group> group, std::shared_ptr<Store> store = nullptr);

using Hook = std::unique_ptr<c10d::CommHookInterface>;

/// Makes a bucket for calling a hook without a Reducer. `flat` holds the gradients of the parameters one after the
/// other, as bucket `index` of `count`. The bucket refers to the shapes of `parameters`.
c10d::GradBucket bucket_of(size_t index, size_t count, const at::Tensor& flat,
                           const std::vector<at::Tensor>& parameters);

/// Averages uncompressed, as without a hook.
Hook all_reduce_hook(HookGroups groups);

/// Sends gradients as `wire`, at::kHalf or at::kBFloat16: half the bytes. Each rank first divides them by the number of
/// ranks, in float32, so float16 overflows only if the average does. No error feedback.
Hook half_compress_hook(HookGroups groups, at::ScalarType wire);
[[deprecated("renamed to half_compress_hook")]] inline Hook half_hook(HookGroups groups, at::ScalarType wire) {
  return half_compress_hook(std::move(groups), wire);
}

struct Int8Options {
  size_t block = 256;  ///< elements that share a scale (4 bytes); a multiple of 64
  void check() const;
};
/// Sends gradients as int8: a quarter of the bytes. Each rank sums one part of the bucket in float32 and quantizes the
/// average. Both roundings have error feedback. With two ranks, only the first rounding happens.
Hook int8_hook(HookGroups groups, const Int8Options& options = {});

struct TopKOptions {
  double ratio = 0.01;  ///< share of a bucket's elements that each rank sends, 0 < ratio <= 1; 8 bytes each
  void check() const;
};
/// Each rank sends the elements of a bucket with the greatest magnitudes; the others stay in the error (Aji and
/// Heafield 2017, Stich et al. 2018). Each rank receives the messages of all other ranks, so the gain shrinks with the
/// number of ranks.
Hook top_k_hook(HookGroups groups, const TopKOptions& options = {});

struct PowerSgdOptions {
  size_t rank = 2;
  /// The first steps, in which gradients change most, are not compressed.
  uint64_t start_powerSGD_iter = 10;  // NOLINT(readability-identifier-naming): as torch's PowerSGDState
  /// A matrix is compressed only if that makes it smaller by at least this factor.
  double min_compression_rate = 2;
  uint64_t seed = 0;  ///< of the initial Q; the same at all ranks
  void check() const;
};
/// Sends matrices as products of two thin matrices, with error feedback and a warm start (PowerSGD: Vogels et al. 2019,
/// algorithms 1 and 2). Vectors and small matrices are not compressed. The rows of a tensor's matrix are its first
/// dimension.
Hook power_sgd_hook(HookGroups groups, const PowerSgdOptions& options = {});

}  // namespace muster
