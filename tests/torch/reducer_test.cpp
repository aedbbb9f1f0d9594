#include "torch/reducer_model.h"

#include <atomic>
#include <chrono>
#include <future>

#include "muster/shm/arena.h"

namespace muster::test {
namespace {

/// Returns half of the average in another tensor, and keeps no memory of the bucket.
class HalvingHook : public c10d::CommHookInterface {
 public:
  explicit HalvingHook(Group& group, std::vector<size_t>& seen) : group_(group), seen_(seen) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    seen_.push_back(bucket.getIndex());
    const at::Tensor result = bucket.getBuffer().clone();
    all_reduce(group_, result, ReduceOp::kAverage);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(result.div_(2));
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  Group& group_;
  std::vector<size_t>& seen_;
};

TEST(Reducer, MatchesOneProcessOnTheJoinedBatch) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kComplexFloat}) {
    const auto expected = expected_gradients(3, 1, dtype);
    run_everywhere(3, [&](const std::shared_ptr<Group>& group) {
      for (const bool as_view : {true, false}) {
        for (const size_t bytes : {size_t{1}, size_t{300}, size_t{25} << 20}) {
          const Model model(dtype);
          ReducerOptions options = small_buckets();
          options.first_bucket_bytes = options.bucket_bytes = bytes;
          options.gradient_as_bucket_view = as_view;
          Reducer reducer(group, model.parameters, options);
          for (int i = 0; i < 3; ++i) {  // after the first step, the buckets are rebuilt
            model.zero_grad();
            backward(reducer, model, input_of(group->membership().rank, 0, dtype));
            expect_close(model.gradients(), expected, c10::str("bytes ", bytes, ", view ", as_view, ", step ", i));
            expect_same_bits(*group, model.gradients());
          }
          EXPECT_EQ(reducer.times().iteration, 3U);
        }
      }
    });
  }
}

TEST(Reducer, LeavesGradientsInTheBucketsMemory) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, {});
    backward(reducer, model, input_of(0));
    backward(reducer, model, input_of(0));
    const at::Tensor first = model.parameters[0].grad();
    for (const at::Tensor& gradient : model.gradients()) {
      EXPECT_TRUE(gradient.is_alias_of(first)) << "all fit into one bucket";
      EXPECT_EQ(reinterpret_cast<uintptr_t>(gradient.data_ptr()) % 64, 0U);
    }
    ASSERT_TRUE(group->arena());
    EXPECT_TRUE(group->arena()->find(first.data_ptr(), first.nbytes())) << "the other ranks of this host can read it";
    const void* before = first.data_ptr();
    backward(reducer, model, input_of(1));
    EXPECT_EQ(model.parameters[0].grad().data_ptr(), before);
  });
}

/// Rank 1 begins the first bucket only when rank 0 is about to get its last gradient. Both ranks get their last
/// gradient only when the first bucket is reduced.
void expect_overlap(const std::shared_ptr<Group>& group, std::promise<void>& rank_zero_continued) {
  constexpr std::chrono::seconds kLimit(30);
  const Model model;
  Reducer reducer(group, model.parameters, small_buckets());
  backward(reducer, model, input_of(0));
  ASSERT_TRUE(reducer.rebuild_buckets());
  const auto plan = reducer.bucket_parameters();
  std::promise<void> reduced;
  std::atomic<size_t> count = 0;
  group->on_completion([&](const Finished&) {
    if (count++ == 0) reduced.set_value();
  });
  const bool first = group->membership().rank == 0;
  if (!first) {
    model.parameters[plan.front().front()].register_hook([&](const at::Tensor&) {
      EXPECT_EQ(rank_zero_continued.get_future().wait_for(kLimit), std::future_status::ready) << "it waits in backward";
    });
  }
  model.parameters[plan.back().back()].register_hook([&](const at::Tensor&) {
    if (first) rank_zero_continued.set_value();
    EXPECT_EQ(reduced.get_future().wait_for(kLimit), std::future_status::ready) << "before the last gradient came";
  });
  backward(reducer, model, input_of(0));
  EXPECT_TRUE(group->wait_for_pending(Deadline::after(kLimit)));
  EXPECT_EQ(count, plan.size());
  group->on_completion(nullptr);
}

TEST(Reducer, ReducesABucketWhileBackwardRuns) {
  for (const char* links : kLinks) {
    SCOPED_TRACE(links);
    std::promise<void> rank_zero_continued;
    run_over(links, 2, [&](const std::shared_ptr<Group>& group) { expect_overlap(group, rank_zero_continued); });
  }
}

TEST(Reducer, CopiesNothingAtASingleRank) {
  const auto expected = expected_gradients(1);
  run(1, [&](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    reducer.prepare_for_backward({});
    at::real(model.forward(input_of(0)).pow(2)).mean().backward();
    expect_close(model.gradients(), expected);
    EXPECT_FALSE(model.parameters[0].grad().is_view());
    std::vector<size_t> seen;
    reducer.set_hook(std::make_unique<HalvingHook>(*group, seen));
    model.zero_grad();
    backward(reducer, model, input_of(0));
    EXPECT_TRUE(at::allclose(model.parameters[0].grad() * 2, expected[0]));
    EXPECT_FALSE(seen.empty());
  });
}

TEST(Reducer, KeepsTheLayoutOfAParameter) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const at::Tensor weight =
        at::ones({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast).detach().requires_grad_(true);
    const at::Tensor sliced = at::ones({4, 6}).slice(1, 0, 6, 2).detach().requires_grad_(true);
    Reducer reducer(group, {weight, sliced}, {});
    const double factor = group->membership().rank + 1;
    reducer.prepare_for_backward({});
    ((weight * at::arange(48).view({4, 3, 2, 2}) * factor).sum() + (sliced * at::arange(12).view({4, 3})).sum())
        .backward();
    EXPECT_EQ(weight.grad().strides(), weight.strides());
    EXPECT_TRUE(at::equal(weight.grad(), at::arange(48).view({4, 3, 2, 2}) * 1.5));
    EXPECT_TRUE(at::equal(sliced.grad(), at::arange(12).view({4, 3}).to(at::kFloat)));
  });
}

TEST(Reducer, AccumulatesWithoutReducingUntilItIsArmed) {
  const auto expected = expected_gradients(2, 3);
  run(2, [&](const std::shared_ptr<Group>& group) {
    for (const bool as_view : {true, false}) {
      const Model model;
      ReducerOptions options = small_buckets();
      options.gradient_as_bucket_view = as_view;
      Reducer reducer(group, model.parameters, options);
      const Rank rank = group->membership().rank;
      for (int step = 0; step < 2; ++step) {
        const uint64_t before = group->sequence();
        for (int i = 0; i < 2; ++i) at::real(model.forward(input_of(rank, i)).pow(2)).mean().backward();
        EXPECT_EQ(group->sequence(), before);
        backward(reducer, model, input_of(rank, 2));
        expect_close(model.gradients(), expected, c10::str("view ", as_view, ", step ", step));
        const at::NoGradGuard no_grad;
        for (const at::Tensor& gradient : model.gradients()) gradient.zero_();
      }
    }
  });
}

TEST(Reducer, RebuildsInTheOrderOfRankZero) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const Model model;
    ReducerOptions options = small_buckets();
    options.first_bucket_bytes = 1;
    Reducer reducer(group, model.parameters, options);
    EXPECT_EQ(reducer.bucket_parameters(), (std::vector<std::vector<size_t>>{{3}, {2, 1}, {0}}));
    EXPECT_FALSE(reducer.rebuild_buckets()) << "no backward yet";
    // Gradients arrive in another order at each rank.
    const bool swap = group->membership().rank == 1;
    reducer.prepare_for_backward({});
    for (const size_t index : swap ? std::vector<size_t>{2, 0, 3, 1} : std::vector<size_t>{0, 1, 2, 3}) {
      model.parameters[index].mutable_grad() = at::full_like(model.parameters[index], index + 1.0);
    }
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : model.parameters) {
      if (swap) {
        loss = loss + parameter.sum();
      } else {
        loss = parameter.sum() + loss;
      }
    }
    loss.backward();
    EXPECT_TRUE(reducer.rebuild_buckets());
    EXPECT_FALSE(reducer.rebuild_buckets());
    std::vector<int64_t> flat;
    for (const auto& bucket : reducer.bucket_parameters()) {
      for (const size_t index : bucket) flat.push_back(static_cast<int64_t>(index));
      flat.push_back(-1);
    }
    const at::Tensor mine = at::tensor(flat, at::kLong);
    expect_same_bits(*group, {mine});
    backward(reducer, model, input_of(0));
    for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(model.parameters[i].grad().defined());
  });
}

TEST(Reducer, FindsUnusedParameters) {
  run_everywhere(2, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    for (const bool as_view : {true, false}) {
      const Model model;
      ReducerOptions options = small_buckets();
      options.find_unused_parameters = true;
      options.gradient_as_bucket_view = as_view;
      Reducer reducer(group, model.parameters, options);
      backward(reducer, model, input_of(rank), false);  // no rank uses the third layer
      EXPECT_FALSE(model.parameters[3].grad().defined());
      EXPECT_EQ(reducer.used_map()[0].item<int>(), 2);
      EXPECT_EQ(reducer.used_map()[3].item<int>(), 0);
      EXPECT_TRUE(reducer.graph_is_static());
      expect_same_bits(*group, {model.parameters[0].grad()});

      model.zero_grad();
      backward(reducer, model, input_of(rank), rank == 1);  // one rank uses it: the other rank adds zero
      const at::Tensor gradient = model.parameters[3].grad();
      ASSERT_TRUE(gradient.defined());
      EXPECT_EQ(reducer.used_map()[3].item<int>(), 1) << "how many ranks have used it";
      expect_same_bits(*group, {gradient});
      const Model alone;
      at::real(alone.forward(input_of(1)).pow(2)).mean().backward();
      EXPECT_TRUE(at::allclose(gradient, alone.parameters[3].grad() / 2, 1e-4, 1e-6));
      EXPECT_EQ(reducer.graph_is_static(), rank == 0);
    }
  });
}

TEST(Reducer, SkipsBucketsThatAreUnusedEverywhere) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const Model model;
    ReducerOptions options = small_buckets();
    options.bucket_bytes = options.first_bucket_bytes = 1;
    options.find_unused_parameters = options.skip_all_reduce_unused_parameters = true;
    Reducer reducer(group, model.parameters, options);
    const uint64_t before = group->sequence();
    backward(reducer, model, input_of(0), false);
    EXPECT_EQ(group->sequence(), before + 4) << "three of four buckets, and the map of used parameters";
    EXPECT_FALSE(model.parameters[3].grad().defined());
    EXPECT_TRUE(model.parameters[0].grad().defined());
  });
}

TEST(Reducer, CountsAStaticGraphsGradientsInTheFirstBackward) {
  run_everywhere(2, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const Model model, reference;
    ReducerOptions options = small_buckets();
    options.static_graph = true;
    Reducer reducer(group, model.parameters, options);
    // parameters[0] gets gradients from two backwards, as with reentrant checkpoints. parameters[3] is never used.
    const auto step = [&](const Model& of, Reducer* reducer, int64_t iteration) {
      const at::Tensor output = of.forward(input_of(rank, iteration), false);
      if (reducer != nullptr) reducer->prepare_for_backward({output});
      output.pow(2).mean().backward();
    };
    for (int64_t iteration = 0; iteration < 4; ++iteration) {
      model.zero_grad();
      reducer.prepare_for_forward();
      EXPECT_EQ(reducer.rebuild_buckets(), iteration == 2);
      step(model, &reducer, iteration);
      EXPECT_FALSE(model.parameters[3].grad().defined());
      expect_same_bits(*group, {model.parameters[0].grad(), model.parameters[1].grad(), model.parameters[2].grad()});
      reference.zero_grad();
      for (int64_t r = 0; r < 2; ++r) (reference.forward(input_of(r, iteration), false).pow(2).mean() / 2).backward();
      EXPECT_TRUE(at::allclose(model.parameters[0].grad(), reference.parameters[0].grad(), 1e-4, 1e-6));
    }
    const std::string error = error_of([&] { backward(reducer, model, input_of(rank), true); });
    EXPECT_NE(error.find("Your training graph has changed in this iteration"), std::string::npos) << error;
    EXPECT_NE(error.find("extra.weight"), std::string::npos) << error;
  });
}

TEST(Reducer, GivesBucketsToAHook) {
  const auto expected = expected_gradients(2);
  run_everywhere(2, [&](const std::shared_ptr<Group>& group) {
    for (const bool as_view : {true, false}) {
      const Model model;
      ReducerOptions options = small_buckets();
      options.gradient_as_bucket_view = as_view;
      Reducer reducer(group, model.parameters, options);
      std::vector<size_t> seen;
      reducer.set_hook(std::make_unique<HalvingHook>(*group, seen));
      EXPECT_NE(error_of([&] { reducer.set_hook(std::make_unique<HalvingHook>(*group, seen)); }), "");
      backward(reducer, model, input_of(group->membership().rank));
      std::vector<at::Tensor> doubled = model.gradients();
      for (at::Tensor& gradient : doubled) gradient = gradient * 2;
      expect_close(doubled, expected);
      EXPECT_EQ(seen.size(), reducer.bucket_parameters().size());
      EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    }
  });
}

TEST(Reducer, IsIdleAfterAHookFailed) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    std::vector<size_t> seen;
    reducer.set_hook(std::make_unique<HalvingHook>(*group, seen));
    group->abort({ErrorCode::kPeerLost, "rank 7 went away", 7});
    for (int i = 0; i < 2; ++i) {
      const std::string error = error_of([&] { backward(reducer, model, input_of(0)); });
      EXPECT_NE(error.find("rank 7 went away"), std::string::npos) << error;
      EXPECT_EQ(seen.size(), 1U) << "the second step is refused before it begins";
      EXPECT_EQ(error_of([&] { reducer.check_finished(); }), "");
    }
  });
}

TEST(Reducer, ReducesSparseGradients) {
  run_everywhere(2, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const at::Tensor table = at::ones({6, 3}).requires_grad_(true), weight = at::ones({3}).requires_grad_(true);
    ReducerOptions options;
    options.sparse = {true, false};
    Reducer reducer(group, {table, weight}, options);
    for (int i = 0; i < 3; ++i) {
      table.mutable_grad().reset();
      weight.mutable_grad().reset();
      reducer.rebuild_buckets();
      reducer.prepare_for_backward({});
      const at::Tensor rows = at::embedding(table, at::tensor({1, rank + 2}, at::kLong), -1, false, true);
      (rows * weight).sum().backward();
      ASSERT_TRUE(table.grad().is_sparse());
      at::Tensor expected = at::zeros({6, 3});
      expected[1] = 1;
      expected[2] = expected[3] = 0.5;
      EXPECT_TRUE(at::equal(table.grad().to_dense(), expected));
      EXPECT_TRUE(at::equal(weight.grad(), at::full({3}, 2.F)));
    }
  });
}

TEST(Reducer, HasABucketForEachDtype) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const at::Tensor a = at::ones({3}, at::kFloat).requires_grad_(true),
                     b = at::ones({5}, at::kDouble).requires_grad_(true),
                     c = at::ones({2}, at::kBFloat16).requires_grad_(true), d = at::ones({0}).requires_grad_(true);
    Reducer reducer(group, {a, b, c, d}, {});
    EXPECT_EQ(reducer.bucket_parameters().size(), 3U);
    const double factor = group->membership().rank;
    reducer.prepare_for_backward({});
    ((a * factor).sum().to(at::kDouble) + (b * factor).sum() + (c * factor).sum().to(at::kDouble) + d.sum()).backward();
    EXPECT_TRUE(at::equal(a.grad(), at::full({3}, 0.5F)));
    EXPECT_TRUE(at::equal(b.grad(), at::full({5}, 0.5, at::kDouble)));
    EXPECT_TRUE(at::equal(c.grad(), at::full({2}, 0.5, at::kBFloat16)));
    EXPECT_EQ(d.grad().numel(), 0);
  });
}

/// Stands for the all-reduce of a forward that has counted the ranks with data.
class Counted : public c10d::Work {
 public:
  explicit Counted(at::Tensor count) : count_(std::move(count)) {}
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return {count_}; }

 private:
  at::Tensor count_;
};

TEST(Reducer, ShadowsARankWithoutData) {
  run(2, [](const std::shared_ptr<Group>& group) {
    for (const bool by_initial : {true, false}) {
      const Model model, alone;
      Reducer reducer(group, model.parameters, small_buckets());
      const bool joined = group->membership().rank == 1;
      const at::Tensor count = at::full({1}, joined ? 0 : 1, at::kInt);
      all_reduce(*group, count);
      if (joined) {
        reducer.shadow_backward();
        EXPECT_TRUE(reducer.rebuild_buckets());
        continue;
      }
      reducer.set_forward_work(c10::make_intrusive<Counted>(count), by_initial);
      backward(reducer, model, input_of(0));
      alone.forward(input_of(0)).pow(2).mean().backward();
      std::vector<at::Tensor> expected = alone.gradients();
      for (at::Tensor& gradient : expected) gradient = gradient / (by_initial ? 2 : 1);
      expect_close(model.gradients(), expected);
      EXPECT_TRUE(reducer.rebuild_buckets());
    }
  });
}

TEST(Reducer, RecordsTimesInOrder) {
  run(2, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    backward(reducer, model, input_of(0));
    const BackwardTimes& times = reducer.times();
    EXPECT_LE(times.forward, times.backward);
    EXPECT_LE(times.backward, times.last_gradient);
    EXPECT_LE(times.last_gradient, times.ended);
    ASSERT_EQ(times.buckets.size(), reducer.bucket_parameters().size());
    for (const BucketTimes& bucket : times.buckets) {
      EXPECT_LE(times.backward, bucket.first_ready);
      EXPECT_LE(bucket.first_ready, bucket.ready);
      EXPECT_LE(bucket.ready, bucket.begun);
      EXPECT_LE(bucket.begun, bucket.ended);
      EXPECT_LE(bucket.ended, times.ended);
    }
  });
}

TEST(Reducer, RecordsWhenAHookCompletes) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    std::vector<size_t> seen;
    reducer.set_hook(std::make_unique<HalvingHook>(*group, seen));  // the hook completes its future before it returns
    backward(reducer, model, input_of(0));
    const auto& buckets = reducer.times().buckets;
    ASSERT_GT(buckets.size(), 1U);
    for (size_t i = 1; i < buckets.size(); ++i) EXPECT_LE(buckets[i - 1].ended, buckets[i].begun);
  });
}

}  // namespace
}  // namespace muster::test
