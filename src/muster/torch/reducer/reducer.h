#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "muster/group/group.h"
#include "muster/steps/backward_times.h"
#include "muster/steps/step_history.h"

namespace muster {

class ErrorException;
class LazyDeviceGroup;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The options of DistributedDataParallel that concern the reducer.
struct ReducerOptions {
  std::vector<std::string> names;  ///< names of the parameters, for messages; if empty, messages use their numbers
  size_t bucket_bytes = 25 << 20;
  size_t first_bucket_bytes = 1 << 20;    ///< small, so that the first reduction starts early
  std::vector<size_t> bucket_bytes_list;  ///< limits of the first buckets instead; the last entry is for all others
  /// Gradients are views of the bucket. False: they keep memory of their own and are copied (torch's default).
  bool gradient_as_bucket_view = true;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool skip_all_reduce_unused_parameters = false;
  bool verify = true;  ///< checks that all ranks have the same model, by one exchange; the same at all ranks
  /// The tensors to verify: all parameters of the model, including frozen ones, and its buffers. If empty, the
  /// reducer's own parameters.
  NamedTensors model_parameters, model_buffers;
  std::vector<bool> sparse;  ///< by parameter: true if its gradient is sparse; if empty, all are dense
  std::optional<at::ScalarType> reduction_dtype;  ///< the dtype in which gradients of real parameters are reduced
  bool optimizer_in_backward = false;             ///< see Reducer::set_optimizer_in_backward()
  /// Of the group, for parameters on a device; must outlive the reducer. Null: their gradients are reduced through
  /// memory of the host.
  LazyDeviceGroup* device_group = nullptr;
  /// Called with a failure before it leaves a backward. May throw another exception instead, such as Python's.
  std::function<void(const ErrorException&)> on_failure;
};

/// Averages gradients over a group's ranks while backward still runs. Used by muster::nn::DistributedDataParallel and
/// muster.nn.DistributedDataParallel, one for each model replica. The gradients lie in buckets, one buffer each: on the
/// parameters' device, or in memory that the ranks of this host share. Hooks on the parameters fill the buckets, and a
/// full bucket is all-reduced (or given to the communication hook) while backward continues. After the first backward
/// the buckets are rebuilt in the order in which gradients arrived at rank 0.
///
/// A backward that fails waits for the operations that it has submitted. The next one begins only if all ranks failed
/// at the same point (failure_agreement.h); otherwise it fails at all ranks.
///
/// Every rank must construct it with the same parameters and make the same calls. Not thread-safe, except for the hooks
/// that autograd's threads run. Throws muster::ErrorException for failures, and for wrong use c10::Error, as torch
/// does.
class Reducer {
 public:
  /// Collective if options.verify: checks that all ranks have the same model, and throws an error that names the tensor
  /// and the rank. Broadcasts nothing. `group` is shared with its other users.
  Reducer(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options);
  ~Reducer();  // removes its hooks from the parameters
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void prepare_for_forward();
  /// Arms the hooks: the next backward reduces. `outputs` of forward are needed to find unused parameters, and for a
  /// static graph. Without this call (no_sync) gradients only accumulate.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// Removes the hooks from the parameters: later backwards reduce nothing.
  void remove_hooks();
  /// Before forward: rebuilds the buckets once, in the order of the first backward. Returns true if it did.
  bool rebuild_buckets();

  /// Replaces the all-reduce of every bucket. The tensor of the hook's future is the result, already averaged. A user's
  /// hook gets a buffer that holds the bucket's gradients without gaps. Call it at most once, before the first
  /// backward. If the hook fails while the group, or one of the other `groups` that it uses, is dead, the error of that
  /// group is thrown. If a future is not complete within the group's timeout, the backward fails and the group is
  /// aborted.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<std::shared_ptr<Group>> groups = {});
  void set_static_graph();
  /// Reduces all gradients at the end of the first backward of a static graph, because that backward only counts. Queue
  /// it at autograd's engine when that backward begins; prepare_for_backward() does so if it gets the outputs. In other
  /// backwards it does nothing.
  void delay_all_reduce();
  /// The optimizer runs within backward, so the reducer does not hand out gradients afterwards.
  void set_optimizer_in_backward();
  /// Gradients of real parameters are reduced in this dtype. Before the first backward.
  void set_reduction_dtype(at::ScalarType dtype);
  /// The end of this backward waits for `future`.
  void wait_at_end(c10::intrusive_ptr<c10::ivalue::Future> future);

  // Uneven inputs (join): a rank that has run out of data shadows the backwards of the others.
  /// Takes part in the other ranks' backward with zeros, which do not count as a use of the parameters. Afterwards the
  /// gradients are the averages, as after a backward.
  void shadow_backward();
  /// The next backward divides by `ranks`, the number of ranks that have data, instead of by all ranks.
  void divide_once_by(int ranks);
  /// `work` is an all-reduce whose result is the number of ranks that still have data. The next backward divides by it,
  /// or by the number of all ranks if `divide_by_initial`.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial);

  /// int32 by parameter: 1 if this rank has used it since the last backward that reduced. After a backward with
  /// find_unused_parameters, the number of ranks that used it.
  at::Tensor used_map() const;
  /// True if the graph was declared static, or if the set of unused parameters has never changed.
  bool graph_is_static() const;
  /// True if the graph is static and its first backward has not been reduced yet: delay_all_reduce() will reduce it.
  bool in_first_static_iteration() const;
  /// Throws if the last backward has not finished; the error says which gradients are missing.
  void check_finished() const;
  /// The last error of a backward, or the last one noted; empty if there was none.
  std::string last_error() const;
  void note_error(std::string text);
  void reset();
  void set_group(std::shared_ptr<Group> group, LazyDeviceGroup* device_group = nullptr);

  /// The parameters of each bucket, in the order of reduction, and the bytes of each bucket.
  std::vector<std::vector<size_t>> bucket_parameters() const;
  std::vector<size_t> bucket_bytes() const;
  /// Times of the last backward that reduced. Always recorded, because it costs only a few clock readings for each
  /// bucket.
  const BackwardTimes& times() const;
  /// The times of the last steps.
  const StepHistory& history() const;
  const std::vector<std::string>& names() const;
  Group& group() const;

 private:
  struct Impl;
  class Locked;
  std::shared_ptr<Impl> impl_;  // shared with the hooks, which may outlive this in autograd's threads
};

}  // namespace muster
