#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "muster/group/group.h"

// What a Reducer may do with a bucket of gradients in place of an all-reduce (Reducer::set_hook): fewer bytes, for slow
// links. Every hook averages over the ranks in place: its future's tensor is the bucket's own buffer, which ends bit
// for bit the same at all ranks. Gradients that are infinite or NaN anywhere stay so everywhere, as GradScaler needs.
//
// Hooks work on float32 buckets; those of other dtypes are averaged uncompressed. What compression loses of a bucket is
// added to the next step's (error feedback); this memory starts anew when the bucket holds other parameters, as after
// the first step.
//
// Functions throw c10::ValueError for options that cannot be, as their check() does before there is a group. A hook is
// called by one thread at a time and blocks it for no other rank. Its destructor fails what is pending.

namespace muster {

/// A group and another of the same ranks, which only one hook uses: the second step of a reduction comes when the first
/// is done, so not in the order in which the group's other calls come. It is split off (Group::split), or
/// ProcessGroupMuster::duplicate()'s. Shared, as hooks' threads and whoever else uses the groups end in any order.
///
///   ddp.register_comm_hook(muster::int8_hook(muster::hook_groups(group)));
struct HookGroups {
  std::shared_ptr<Group> group;
  std::shared_ptr<Group> second;  ///< for int8 and PowerSGD; others need none
};

/// Collective, with a barrier: `group` and a second one that is split off it. They meet in `store`, which the second
/// then holds; without one, in the job's (job_store()). Throws ErrorException.
HookGroups hook_groups(std::shared_ptr<Group> group, std::shared_ptr<Store> store = nullptr);

using Hook = std::unique_ptr<c10d::CommHookInterface>;

/// For calling a hook without a Reducer: what `flat` holds, one gradient behind the other, each of its parameter's
/// shape, as bucket `index` of `count`. The bucket refers to the parameters' shapes.
c10d::GradBucket bucket_of(size_t index, size_t count, const at::Tensor& flat,
                           const std::vector<at::Tensor>& parameters);

/// What happens without a hook.
Hook all_reduce_hook(HookGroups groups);

/// Gradients go as `wire`, at::kHalf or at::kBFloat16: half the bytes. They are divided by the number of ranks first,
/// in float32, so float16 overflows only where the average does. No error feedback.
Hook half_hook(HookGroups groups, at::ScalarType wire);

struct Int8Options {
  size_t block = 256;  ///< elements that share a scale (4 bytes); a multiple of 64
  void check() const;
};
/// Gradients go as int8: a quarter of the bytes. Each rank sums a part of the bucket in float32 and rounds the average
/// again; both roundings have error feedback. Between two ranks there is only the first.
Hook int8_hook(HookGroups groups, const Int8Options& options = {});

struct TopKOptions {
  double ratio = 0.01;  ///< of a bucket's elements that each rank sends, 0 < ratio <= 1; 8 bytes each
  void check() const;
};
/// Of each bucket every rank sends its elements of greatest magnitude, and all others stay in the error (Aji and
/// Heafield 2017, Stich et al. 2018). Each rank receives what all others send, so the gain shrinks with their number.
Hook top_k_hook(HookGroups groups, const TopKOptions& options = {});

struct PowerSgdOptions {
  size_t rank = 2;
  /// Steps without compression first, where gradients change most.
  uint64_t start = 10;
  /// A matrix is compressed if that saves at least this factor.
  double least_gain = 2;
  uint64_t seed = 0;  ///< of the first guess; the same at all ranks
  void check() const;
};
/// Matrices go as products of two thin ones, with error feedback and a warm start (PowerSGD: Vogels et al. 2019,
/// algorithms 1 and 2); vectors and small matrices go as they are. A tensor is a matrix with the first dimension's
/// rows.
Hook power_sgd_hook(HookGroups groups, const PowerSgdOptions& options = {});

}  // namespace muster
