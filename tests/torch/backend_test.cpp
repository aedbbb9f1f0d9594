#include "muster/torch/backend.h"

#include <atomic>
#include <barrier>
#include <future>
#include <latch>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "muster/shm/arena.h"
#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/exception.h"
#include "torch/torch_ranks.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

TEST(ProcessGroupMuster, CompletesFuturesWithTheTensors) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    Tensors tensors{at::full({1000}, backend.getRank() + 1.F)};
    const auto work = backend.allreduce(tensors, c10d::AllreduceOptions());
    const auto future = work->getFuture();
    std::atomic<int> called = 0;
    future->addCallback([&](c10::ivalue::Future& done) {
      EXPECT_FALSE(done.hasError());
      ++called;
    });
    EXPECT_TRUE(work->wait());
    future->waitAndThrow();
    EXPECT_EQ(work->getFuture().get(), future.get());
    EXPECT_TRUE(at::equal(future->value().toTensorVector().at(0), at::full({1000}, 3.F)));
    while (called == 0) std::this_thread::yield();
    EXPECT_EQ(called, 1);
  });
}

TEST(ProcessGroupMuster, KeepsTensorsAliveUntilTheOperationEnds) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    for (int i = 0; i < 50; ++i) {
      Tensors tensors{at::full({300, 7}, 1.F).t()};  // not contiguous: the operation uses a copy
      backend.allreduce(tensors, c10d::AllreduceOptions());
    }
    Tensors last{at::ones({1})};
    backend.allreduce(last, c10d::AllreduceOptions())->wait();
    EXPECT_EQ(last[0].item<float>(), 2);
  });
}

TEST(ProcessGroupMuster, AllocatesSharedMemory) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    constexpr int64_t kCount = 300'000;
    c10::DataPtr memory = backend.getMemAllocator()->allocate(kCount * sizeof(float));
    EXPECT_TRUE(backend.group().arena()->find(memory.get(), kCount * sizeof(float)));
    Tensors tensors{at::from_blob(memory.get(), {kCount}, at::kFloat).fill_(backend.getRank() + 1.F)};
    backend.allreduce(tensors, c10d::AllreduceOptions())->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({kCount}, 3.F)));
    backend.barrier(c10d::BarrierOptions())->wait();  // the peer may still read the memory
  });
}

TEST(ProcessGroupMuster, ReportsAnAbortAsAnError) {
  std::latch ready(2);  // an abort would also end the other rank's barrier, or its group while that still forms
  test::run_backends(
      2,
      [&ready](ProcessGroupMuster& backend) {
        EXPECT_EQ(backend.getError(), c10d::ErrorType::SUCCESS);
        backend.barrier(c10d::BarrierOptions())->wait();
        ready.arrive_and_wait();
        backend.abort();
        EXPECT_EQ(backend.getError(), c10d::ErrorType::COMM_ERROR);
      },
      /*together=*/false);
}

TEST(ProcessGroupMuster, SparseAllReduceReportsItsOwnNumber) {
  test::run_backends(1, [](ProcessGroupMuster& backend) {
    Group& group = backend.group();
    const uint64_t before = group.sequence();
    std::optional<muster::Work> other;
    group.on_completion([&](const Finished&) {
      // Simulates another thread that makes a call right after the last operation of the all-reduce.
      if (group.sequence() == before + 3 && !other) other = group.barrier({.async = true});
    });
    Tensors tensors{at::ones({3}).to_sparse()};
    const auto work = backend.allreduce(tensors, c10d::AllreduceOptions());
    EXPECT_EQ(group.sequence(), before + 4) << "the other call was made before the all-reduce returned";
    EXPECT_EQ(work->getSequencenumber(), before + 3);
    ASSERT_TRUE(other);
    EXPECT_TRUE(other->wait());
    group.on_completion(nullptr);
  });
}

TEST(ProcessGroupMuster, GathersUnevenTensors) {
  test::run_backends(3, [](ProcessGroupMuster& backend) {
    const auto part = [](int64_t rank) { return at::full({rank, 2}, rank, at::kInt); };
    std::vector<Tensors> outputs{
        {at::zeros({0, 2}, at::kInt), at::zeros({1, 2}, at::kInt), at::zeros({2, 2}, at::kInt)}};
    Tensors inputs{part(backend.getRank())};
    backend.allgather(outputs, inputs, c10d::AllgatherOptions())->wait();
    for (int64_t r = 0; r < 3; ++r) EXPECT_TRUE(at::equal(outputs[0][static_cast<size_t>(r)], part(r)));
  });
}

TEST(ProcessGroupMuster, RefusesWrongArgumentsBeforeAnyRankBegins) {
  test::run_backends(1, [](ProcessGroupMuster& backend) {
    const uint64_t before = backend.getSequenceNumberForGroup();
    Tensors two{at::ones({1}), at::ones({2})};
    EXPECT_THROW(backend.allreduce(two, c10d::AllreduceOptions()), c10::ValueError) << "of different shapes";
    Tensors one{at::ones({1})};
    c10d::BroadcastOptions far;
    far.rootRank = 1;
    EXPECT_THROW(backend.broadcast(one, far), c10::ValueError);
    std::vector<Tensors> outputs{{at::ones({2})}};
    EXPECT_THROW(backend.allgather(outputs, one, c10d::AllgatherOptions()), c10::ValueError);
    Tensors meta{at::ones({2, 2}, at::kMeta)};
    EXPECT_THROW(backend.allreduce(meta, c10d::AllreduceOptions()), c10::NotImplementedError);
    Tensors whole{at::ones({1}, at::kInt)};
    c10d::AllreduceOptions scaled;
    scaled.reduceOp.op_ = c10d::ReduceOp::PREMUL_SUM;  // torch's function for this has another name in torch 2.11
    scaled.reduceOp.supplement_ = c10::make_intrusive<PreMulSumSupplement>(0.5);
    EXPECT_THROW(backend.allreduce(whole, scaled), c10::NotImplementedError);
    EXPECT_EQ(backend.getSequenceNumberForGroup(), before);
  });
}

TEST(ProcessGroupMuster, ReturnsNoWorkForACallThatBlocks) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    Tensors tensors{at::full({3, 2}, backend.getRank() + 1.F).t()};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    EXPECT_FALSE(backend.allreduce(tensors, options));
    EXPECT_TRUE(at::equal(tensors[0], at::full({2, 3}, 3.F)));
  });
}

TEST(ProcessGroupMuster, RunsACoalescingBlockAsOneOperation) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    const uint64_t before = backend.getSequenceNumberForGroup();
    backend.startCoalescing();
    EXPECT_THROW(backend.startCoalescing(), c10::ValueError);
    Tensors first{at::ones({3})}, second{at::ones({4})};
    EXPECT_TRUE(backend.allreduce(first, c10d::AllreduceOptions())->wait()) << "of what has not begun";
    backend.allreduce(second, c10d::AllreduceOptions());
    EXPECT_EQ(backend.getSequenceNumberForGroup(), before);
    EXPECT_EQ(first[0][0].item<float>(), 1);
    backend.endCoalescing()->wait();
    EXPECT_EQ(backend.getSequenceNumberForGroup(), before + 1);
    EXPECT_TRUE(at::equal(first[0], at::full({3}, 2.F)));
    EXPECT_TRUE(at::equal(second[0], at::full({4}, 2.F)));
    EXPECT_THROW(backend.endCoalescing(), c10::ValueError);
  });
}

TEST(ProcessGroupMuster, OpensOneCoalescingBlockAtATime) {
  test::run_backends(1, [](ProcessGroupMuster& backend) {
    constexpr int kRounds = 300;
    std::barrier both(2);
    std::atomic<int> opened = 0;
    const auto open_often = [&] {
      for (int i = 0; i < kRounds; ++i) {
        both.arrive_and_wait();
        bool mine = true;
        try {
          backend.startCoalescing();
          ++opened;
        } catch (const c10::ValueError&) {
          mine = false;
        }
        both.arrive_and_wait();
        if (mine) backend.endCoalescing()->wait();
      }
    };
    std::thread other(open_often);
    open_often();
    other.join();
    EXPECT_EQ(opened, kRounds);
  });
}

TEST(ProcessGroupMuster, CancelsABlockWhenOneOfItsCallsFails) {
  test::run_backends(2, [](ProcessGroupMuster& backend) {
    backend.startCoalescing();
    Tensors data{at::ones({3})}, two{at::ones({3}), at::ones({3})};
    const auto work = backend.allreduce(data, c10d::AllreduceOptions());
    EXPECT_TRUE(work->wait()) << "of what has not begun";
    EXPECT_THROW(backend.reduce(two, c10d::ReduceOptions()), c10::ValueError);
    EXPECT_THROW(work->wait(), ErrorException);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->getFuture()->hasError());
    EXPECT_THROW(backend.endCoalescing(), c10::ValueError);
    backend.allreduce(data, c10d::AllreduceOptions())->wait();
    EXPECT_TRUE(at::equal(data[0], at::full({3}, 2.F)));
  });
}

TEST(ProcessGroupMuster, NumbersCallsOfSeveralThreadsUniquely) {
  test::run_backends(1, [](ProcessGroupMuster& backend) {
    constexpr int kThreads = 4, kCalls = 200;
    std::mutex mutex;
    std::set<uint64_t> numbers;
    std::latch together(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        together.arrive_and_wait();
        for (int i = 0; i < kCalls; ++i) {
          Tensors tensors{at::ones({1})};
          const auto work = backend.allreduce(tensors, c10d::AllreduceOptions());
          work->wait();
          const std::lock_guard lock(mutex);
          numbers.insert(work->getSequencenumber());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(numbers.size(), static_cast<size_t>(kThreads) * kCalls);
  });
}

TEST(ProcessGroupMuster, WaitTimeoutDoesNotEndTheOperation) {
  std::promise<void> ended;
  const auto body = [&](ProcessGroupMuster& backend) {
    if (backend.getRank() == 1) return ended.get_future().wait();  // never joins the operation
    Tensors tensors{at::ones({4})};
    c10d::AllreduceOptions options;
    options.timeout = milliseconds(1500);
    const auto work = backend.allreduce(tensors, options);
    const auto code_of = [&](milliseconds timeout) {
      try {
        work->wait(timeout);
        return ErrorCode::kInternal;
      } catch (const ErrorException& exception) {
        return exception.error().code;
      }
    };
    EXPECT_EQ(code_of(milliseconds(1)), ErrorCode::kTimeout);
    EXPECT_EQ(backend.getError(), c10d::ErrorType::SUCCESS) << "the wait ended, the operation goes on";
    EXPECT_NE(code_of(kNoTimeout), ErrorCode::kInternal);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_EQ(backend.getError(), c10d::ErrorType::TIMEOUT);
    EXPECT_TRUE(work->getFuture()->hasError());
    const auto result = work->getFutureResult();
    result->wait();
    EXPECT_EQ(result->value().toInt(), static_cast<int64_t>(c10d::WorkResult::TIMEOUT));
    ended.set_value();
  };
  test::run_backends(2, body, /*together=*/false);
}

TEST(ProcessGroupMuster, ShutdownLeavesAGroupThatIsStillHeld) {
  std::promise<void> checked;
  const auto body = [&](ProcessGroupMuster& backend) {
    Tensors tensors{at::ones({4})};
    const auto failure = [&] {
      try {
        backend.allreduce(tensors, c10d::AllreduceOptions())->wait();
      } catch (const ErrorException& exception) {
        return exception.error();
      }
      return Error{ErrorCode::kInternal, "nothing failed", kNoRank, {}};
    };
    EXPECT_EQ(failure().code, ErrorCode::kInternal);
    if (backend.getRank() == 1) {
      backend.shutdown();
      EXPECT_NE(failure().message.find("was shut down here"), std::string::npos) << failure().message;
      return checked.get_future().wait();
    }
    const Error first = failure(), later = failure();
    EXPECT_EQ(first.code, ErrorCode::kLeft) << first.message;
    EXPECT_EQ(first.rank, 1);
    EXPECT_NE(later.message.find("has left the group"), std::string::npos) << later.message;
    checked.set_value();
  };
  test::run_backends(2, body, /*together=*/false);
}

}  // namespace
}  // namespace muster
