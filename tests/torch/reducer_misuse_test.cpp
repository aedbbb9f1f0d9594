#include "torch/reducer_model.h"

namespace muster::test {
namespace {

TEST(ReducerMisuse, NamesParametersWithoutAGradient) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    backward(reducer, model, input_of(0), false);
    const std::string error = error_of([&] { backward(reducer, model, input_of(0)); });
    EXPECT_NE(error.find("Expected to have finished reduction in the prior iteration"), std::string::npos) << error;
    EXPECT_NE(error.find("did not receive grad for rank 0: extra.weight"), std::string::npos) << error;
    EXPECT_NE(error.find("Parameter indices which did not receive grad for rank 0: 3"), std::string::npos) << error;
    EXPECT_NE(error.find("find_unused_parameters=True"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { reducer.check_finished(); }), "");
    reducer.reset();
    backward(reducer, model, input_of(0));
    EXPECT_EQ(error_of([&] { reducer.check_finished(); }), "");
  });
}

TEST(ReducerMisuse, RefusesADuplicateGradient) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    reducer.prepare_for_backward({});
    model.forward(input_of(0), false).sum().backward();
    const std::string error = error_of([&] { model.forward(input_of(0), false).sum().backward(); });
    EXPECT_NE(error.find("Expected to mark a variable ready only once"), std::string::npos) << error;
    EXPECT_NE(error.find("with name second.weight has been marked as ready twice"), std::string::npos) << error;
  });
}

TEST(ReducerMisuse, NamesTheParameterAndTheRankThatDiffer) {
  run(3, [](const std::shared_ptr<Group>& group) {
    const Rank rank = group->membership().rank;
    const auto error_with = [&](const std::vector<at::Tensor>& parameters) {
      return error_of([&] { const Reducer reducer(group, parameters, {.names = {"a", "b"}}); });
    };
    const at::Tensor a = at::ones({2, 3}).requires_grad_(true);
    const at::Tensor b = at::ones({rank == 2 ? 5 : 4}).requires_grad_(true);
    std::string error = error_with({a, b});
    EXPECT_NE(error.find("parameter 1 differs: rank 2 has b: Float[5], rank 0 has b: Float[4]"), std::string::npos)
        << error;
    error =
        error_with(rank == 1 ? std::vector<at::Tensor>{a} : std::vector<at::Tensor>{a, a.detach().requires_grad_()});
    EXPECT_NE(error.find("parameter 1 differs: rank 1 has none"), std::string::npos) << error;
    error = error_with({rank == 1 ? a.to(at::kDouble).detach().requires_grad_(true) : a});
    EXPECT_NE(error.find("parameter 0 differs: rank 1 has a: Double[2, 3]"), std::string::npos) << error;
    EXPECT_EQ(error_with({a}), "");
    error = error_of([&] { const Reducer reducer(group, {a}, {.names = {rank == 2 ? "z" : "a"}}); });
    EXPECT_NE(error.find("rank 2 has z: Float[2, 3], rank 0 has a: Float[2, 3]"), std::string::npos) << error;
  });
}

TEST(ReducerMisuse, RefusesParametersWithoutGradients) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const at::Tensor a = at::ones({2}).requires_grad_(true);
    EXPECT_NE(error_of([&] { const Reducer reducer(group, {}, {}); }), "");
    EXPECT_NE(error_of([&] { const Reducer reducer(group, {a, a}, {}); }).find("twice"), std::string::npos);
    EXPECT_NE(error_of([&] { const Reducer reducer(group, {at::ones({2})}, {}); }), "");
  });
}

TEST(ReducerMisuse, DestructorRemovesHooks) {
  run(1, [](const std::shared_ptr<Group>& group) {
    const Model model;
    {
      Reducer reducer(group, model.parameters, {});
      reducer.prepare_for_backward({});
    }
    const uint64_t before = group->sequence();
    model.forward(input_of(0)).sum().backward();
    EXPECT_EQ(group->sequence(), before);
    Reducer next(group, model.parameters, {});
    backward(next, model, input_of(0));
    EXPECT_EQ(next.times().iteration, 1U);
  });
}

TEST(ReducerMisuse, ReportsALostPeerAndContinuesInANewGroup) {
  const auto store = memory_store();
  const auto lose = [&](Rank rank, const std::string& links) {
    const auto handle = store->clone();
    const auto form = [&](int size) {
      const GroupSpec membership{rank, size, c10::str(links, size), 0};
      return std::shared_ptr<Group>(value_or_throw(Group::form(**handle, membership, options_for(links))));
    };
    std::shared_ptr<Group> group = form(3);
    const Model model;
    Reducer reducer(group, model.parameters, small_buckets());
    backward(reducer, model, input_of(rank));
    if (rank == 2) {
      value_or_throw(group->barrier().wait());  // an abort would also end operations that are still pending
      group->abort({ErrorCode::kPeerLost, "rank 2 is gone", 2});
      return;
    }
    try {
      value_or_throw(group->barrier().wait());
      for (int i = 0; i < 2; ++i) backward(reducer, model, input_of(rank));
      FAIL() << "a peer is missing";
    } catch (const ErrorException& error) {
      EXPECT_EQ(error.error().rank, 2) << error.what();
    }
    std::shared_ptr<Group> next = form(2);
    reducer.set_group(next);
    group.reset();
    model.zero_grad();
    backward(reducer, model, input_of(rank));
    expect_close(model.gradients(), expected_gradients(2));
    value_or_throw(next->barrier().wait());
  };
  for (const std::string links : {"shm", "tcp"}) {
    run_ranks(3, [&](Rank rank) { lose(rank, links); });
  }
}

}  // namespace
}  // namespace muster::test
