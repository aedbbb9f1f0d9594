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

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct ReducerOptions {
  std::vector<std::string> names;  ///< of the parameters, for messages; empty: by number
  size_t bucket_bytes = 25 << 20;
  size_t first_bucket_bytes = 1 << 20;    ///< small, so that the first reduction starts early in backward
  std::vector<size_t> bucket_bytes_list;  ///< of the first buckets instead, the last of it for all others
  /// Gradients are views of the bucket; false: they keep memory of their own, and are copied back (torch's default).
  bool gradient_as_bucket_view = true;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool skip_all_reduce_unused_parameters = false;
  bool verify = true;  ///< that all ranks have the same model: one exchange, so all ranks alike
  /// What is verified: all parameters of the model, frozen ones too, and its buffers. Without any: the reducer's own.
  NamedTensors model_parameters, model_buffers;
  std::vector<bool> sparse;                       ///< by parameter: its gradient is sparse; empty: none is
  std::optional<at::ScalarType> reduction_dtype;  ///< gradients of real parameters are reduced in it
  bool optimizer_in_backward = false;             ///< see Reducer::set_optimizer_in_backward()
  /// Told of a failure before it leaves a backward. May throw something else in its place: Python's exceptions.
  std::function<void(const ErrorException&)> on_failure;
};

/// Averages gradients over a group's ranks while backward still runs. One for each model replica, in C++ and Python
/// alike (muster::nn::DistributedDataParallel, muster.nn.DistributedDataParallel). Parameters' gradients lie in
/// buckets, one flat tensor each, in memory that the ranks of this host share; hooks on the parameters fill them, and a
/// bucket that is full is all-reduced (or given to the hook) while the rest of backward goes on. After the first
/// backward, buckets are built anew in the order in which gradients came, rank 0's order for all.
///
/// A backward that fails leaves nothing that a later one could take for its own: what it began is waited for, and the
/// next step begins only if all ranks failed at the same point (failure_agreement.h); if not, it fails at all of them.
///
/// Every rank must construct it with the same parameters, and call alike. Not thread-safe, but for the hooks that
/// autograd's threads run. Throws muster::ErrorException for failures, c10::Error as torch's reducer for wrong use.
class Reducer {
 public:
  /// Checks that all ranks have the same model (the error names the parameter or buffer and the rank), by one exchange.
  /// Broadcasts nothing. `group` is shared with whoever else uses it.
  Reducer(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options);
  ~Reducer();  // takes its hooks off the parameters
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void prepare_for_forward();
  /// Arms the hooks: the next backward reduces. `outputs` of forward, to search for unused parameters if that is asked
  /// for; empty otherwise. Without this call (no_sync) gradients only accumulate.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// Takes the hooks off the parameters: nothing is reduced any more.
  void remove_hooks();
  /// Before forward: new buckets, once, in the order of the first backward. Whether it did.
  bool rebuild_buckets();

  /// In place of the all-reduce, for every bucket: its future's tensor is the result, already averaged. The buffer it
  /// gets has as many elements as the bucket's gradients together. Once, before the first backward. Where it fails and
  /// the group, or one of `groups` that it has besides, is dead, that group's error is thrown, whatever the hook made
  /// of it. A future that is not complete within the group's timeout is a failure, and ends the group.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<std::shared_ptr<Group>> groups = {});
  /// The future of what reduces the bucket when there is no hook: an averaging all-reduce of its buffer, in place.
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce(c10d::GradBucket& bucket);
  /// That, or the hook.
  c10::intrusive_ptr<c10::ivalue::Future> run_hook(c10d::GradBucket& bucket);
  void set_static_graph();
  /// Reduces all at once at the end of the first backward of a static graph, which only counts: to be queued at the
  /// engine when that backward begins. Queued already if prepare_for_backward() was given the outputs. Does nothing at
  /// other times.
  void delay_all_reduce();
  /// The optimizer ran within backward: gradients need not be there afterwards.
  void set_optimizer_in_backward();
  /// Gradients of real parameters are reduced in that dtype, whatever theirs. Before the first backward.
  void set_reduction_dtype(at::ScalarType dtype);
  /// To be waited for at the end of this backward.
  void wait_at_end(c10::intrusive_ptr<c10::ivalue::Future> future);

  // Uneven inputs (join): a rank that has run out of data shadows the others.
  /// In place of a backward: takes part in the others' with zeros, which count for no use of a parameter, and leaves
  /// the averages as gradients, as a backward does.
  void shadow_backward();
  /// The next backward divides by that many ranks, those that have data, in place of all.
  void divide_once_by(int ranks);
  // As torch's Python code does it:
  /// Buckets with zeros, in the order of reduction.
  std::vector<c10d::GradBucket> zero_buckets() const;
  /// The forward's all-reduce, whose result counts who still has data; the next backward divides by the initial number
  /// of ranks, or by those who have.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial);
  void push_all_rebuilt_parameters();

  /// int32, by parameter: used here in this backward (or since the last that reduced); after one that searched for
  /// unused parameters and reduced, at how many ranks.
  at::Tensor used_map() const;
  /// Whether the set of unused parameters has never changed.
  bool graph_is_static() const;
  /// The graph is static and its first backward has not been reduced yet: delay_all_reduce() will reduce it.
  bool in_first_static_iteration() const;
  /// Throws what is wrong if the last backward has not been finished.
  void check_finished() const;
  /// What was wrong last in a backward, or was noted here; empty if nothing was.
  std::string last_error() const;
  void note_error(std::string text);
  void reset();
  void set_group(std::shared_ptr<Group> group);

  /// Parameters by bucket, in the order of reduction; and the buckets' bytes.
  std::vector<std::vector<size_t>> bucket_parameters() const;
  std::vector<size_t> bucket_bytes() const;
  /// Of the last backward that reduced, once it has ended. Always recorded: a few clock readings a bucket.
  const BackwardTimes& times() const;
  /// What each of the last steps waited for.
  const StepHistory& history() const;
  const std::vector<std::string>& names() const;
  Group& group() const;

 private:
  struct Impl;
  class Locked;
  std::shared_ptr<Impl> impl_;  // shared with the hooks, which may outlive this in autograd's threads
};

}  // namespace muster
