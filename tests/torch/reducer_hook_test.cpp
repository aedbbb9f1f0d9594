#include "muster/torch/hooks.h"
#include "torch/reducer_model.h"

#include <chrono>
#include <future>
#include <stdexcept>

namespace muster::test {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
constexpr std::chrono::seconds kLimit(60);

/// Calls `before`, which may throw, with the bucket. Then averages asynchronously.
class AveragingHook : public c10d::CommHookInterface {
 public:
  using Before = std::function<void(c10d::GradBucket&)>;
  AveragingHook(Reducer& reducer, Before before, std::vector<Future>* made = nullptr)
      : average_(all_reduce_hook({std::shared_ptr<Group>(&reducer.group(), [](Group*) {})})),
        before_(std::move(before)),
        made_(made) {}
  Future runHook(c10d::GradBucket& bucket) override {
    before_(bucket);
    Future future = average_->runHook(bucket);
    if (made_ != nullptr) made_->push_back(future);
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  Hook average_;
  Before before_;
  std::vector<Future>* made_;
};

ReducerOptions one_parameter_a_bucket() {
  ReducerOptions options = small_buckets();
  options.first_bucket_bytes = options.bucket_bytes = 1;
  return options;
}

TEST(ReducerHook, FailureAtOneRankFailsTheStepAtAllRanks) {
  run_everywhere(2, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const Model model;
    Reducer reducer(group, model.parameters, one_parameter_a_bucket());
    bool failing = false;
    reducer.set_hook(std::make_unique<AveragingHook>(reducer, [&](c10d::GradBucket&) {
      if (failing) throw std::runtime_error("the hook failed");
    }));
    for (int i = 0; i < 2; ++i) backward(reducer, model, input_of(rank));
    failing = rank == 1;
    if (failing) {
      // The buckets have the same shapes in every step, so only the failure agreement can tell the steps apart.
      EXPECT_NE(error_of([&] { backward(reducer, model, input_of(rank)); }).find("the hook failed"), std::string::npos);
      failing = false;
    }
    for (int i = 0; i < 2; ++i) {
      model.zero_grad();
      try {
        backward(reducer, model, input_of(rank, 1));
        ADD_FAILURE() << "rank " << rank << " took gradients of two steps for one";
      } catch (const ErrorException& error) {
        EXPECT_EQ(error.error().code, ErrorCode::kMismatch) << error.what();
      }
    }
  });
}

TEST(ReducerHook, FailureAtAllRanksLeavesNothingBehind) {
  std::promise<void> rank_zero_failed;
  const std::shared_future<void> failed = rank_zero_failed.get_future().share();
  run(2, [&](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const Model model;
    std::vector<Future> futures;
    Reducer reducer(group, model.parameters, one_parameter_a_bucket());
    bool failing = false;
    const auto before = [&](c10d::GradBucket& bucket) {
      if (!failing) return;
      if (bucket.getIndex() == 1) {
        if (rank == 0) rank_zero_failed.set_value();
        throw std::runtime_error("the hook failed");
      }
      // Keeps rank 0's first bucket in reduction until rank 0's hook has failed.
      if (rank == 1) {
        ASSERT_EQ(failed.wait_for(kLimit), std::future_status::ready);
      }
    };
    reducer.set_hook(std::make_unique<AveragingHook>(reducer, before, &futures));
    for (int i = 0; i < 2; ++i) backward(reducer, model, input_of(rank));
    failing = true;
    EXPECT_NE(error_of([&] { backward(reducer, model, input_of(rank, 7)); }).find("the hook failed"),
              std::string::npos);
    for (const Future& future : futures) EXPECT_TRUE(future->completed()) << "it still writes to gradients";
    failing = false;
    for (int i = 0; i < 2; ++i) {
      model.zero_grad();
      backward(reducer, model, input_of(rank));
      expect_close(model.gradients(), expected_gradients(2), c10::str("step ", i));
      expect_same_bits(*group, model.gradients());
    }
  });
}

TEST(ReducerHook, FailureInDifferentBucketsFailsTheNextStep) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const Model model;
    Reducer reducer(group, model.parameters, one_parameter_a_bucket());
    // A hook that sends nothing to the other ranks, so that the group's calls stay in step.
    class FailingHook : public c10d::CommHookInterface {
     public:
      explicit FailingHook(size_t bucket) : bucket_(bucket) {}
      Future runHook(c10d::GradBucket& bucket) override {
        TORCH_CHECK(bucket.getIndex() != bucket_, "the hook failed");
        auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        future->markCompleted(bucket.getBuffer());
        return future;
      }
      at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

     private:
      size_t bucket_;
    };
    reducer.set_hook(std::make_unique<FailingHook>(static_cast<size_t>(rank)));
    EXPECT_NE(error_of([&] { backward(reducer, model, input_of(rank)); }).find("the hook failed"), std::string::npos);
    const std::string error = error_of([&] { backward(reducer, model, input_of(rank)); });
    EXPECT_NE(error.find("failed in an earlier backward"), std::string::npos) << error;
    EXPECT_FALSE(group->status());
  });
}

TEST(ReducerHook, SeesGradientsWithoutGaps) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const int rank = group->membership().rank;
    std::vector<at::Tensor> parameters;
    for (const int64_t size : {3, 7, 21}) parameters.push_back(at::ones({size}).requires_grad_(true));
    Reducer reducer(group, parameters, {});
    const auto whole = [&](c10d::GradBucket& bucket) {
      EXPECT_EQ(bucket.getBuffer().numel(), 31);
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& gradient : bucket.getGradients()) gradients.push_back(gradient.reshape({-1}));
      EXPECT_TRUE(at::equal(at::cat(gradients), bucket.getBuffer()));
    };
    reducer.set_hook(std::make_unique<AveragingHook>(reducer, whole));
    for (int i = 0; i < 2; ++i) {
      for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
      reducer.prepare_for_backward({});
      at::Tensor loss = at::zeros({});
      for (size_t p = 0; p < parameters.size(); ++p) loss = loss + parameters[p].sum() * static_cast<double>(p + rank);
      loss.backward();
      for (size_t p = 0; p < parameters.size(); ++p) {
        EXPECT_TRUE(at::equal(parameters[p].grad(), at::full_like(parameters[p], static_cast<double>(p) + 0.5)));
      }
    }
  });
}

TEST(ReducerHook, TimesOutOnAFutureThatNeverCompletes) {
  run(1, [](const std::shared_ptr<Group>& group) {
    class NeverCompletingHook : public c10d::CommHookInterface {
     public:
      Future runHook(c10d::GradBucket&) override {
        return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      }
      at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }
    };
    ASSERT_TRUE(group->set_timeout(std::chrono::milliseconds(100)));
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    reducer.set_hook(std::make_unique<NeverCompletingHook>());
    try {
      backward(reducer, model, input_of(0));
      FAIL() << "nothing was reduced";
    } catch (const ErrorException& error) {
      EXPECT_EQ(error.error().code, ErrorCode::kTimeout);
      EXPECT_NE(error.error().message.find("the communication hook's future of bucket 0"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace muster::test
