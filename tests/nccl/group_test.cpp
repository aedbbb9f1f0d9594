// Groups over NCCL, with the fake of this folder.
#include "muster/nccl/group.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <future>
#include <latch>
#include <thread>

#include "contract/group_contract.h"
#include "device/stream.h"
#include "muster/nccl/communicator.h"
#include "muster/store/stat.h"

namespace muster {
namespace {

using device_double::Event;
using device_double::Stream;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;

/// Each thread has a stream of its own.
Stream& current() {
  static thread_local Stream& own = device_double::stream(0, device_double::new_stream_number());
  return own;
}

/// A device whose memory is the host's.
class TestDevice final : public nccl::Device {
 public:
  void make_current() override {}
  nccl::Stream stream() override { return static_cast<device_double::StreamHandle*>(&current()); }
  bool capturing() override { return current().graph() != nullptr; }
  std::unique_ptr<Device::Event> record() override {
    auto made = std::make_unique<Recorded>();
    made->event.record(current());
    return made;
  }
  std::shared_ptr<void> allocate(size_t bytes) override {
    Stream* const stream = &current();
    return {std::malloc(bytes), [stream](void* memory) { stream->enqueue([memory] { std::free(memory); }); }};
  }
  void copy(void* to, const void* from, size_t bytes) override {
    current().launch([=] { std::memcpy(to, from, bytes); });
  }

 private:
  struct Recorded final : Device::Event {
    bool reached() override { return event.reached(); }
    device_double::Event event;
  };
};

Result<std::unique_ptr<Group>> try_to_form(Store& store, Rank rank, int size, Duration timeout = 60s,
                                           const std::string& name = "test") {
  auto host = Group::form(store, {rank, size, name, 0}, test::options_for("shm,unix", timeout));
  EXPECT_TRUE(host) << host.error().to_string();
  return nccl::form_group(std::move(*host), std::make_shared<TestDevice>());
}

std::unique_ptr<Group> form(Store& store, Rank rank, int size, Duration timeout = 60s,
                            const std::string& name = "test") {
  auto group = try_to_form(store, rank, size, timeout, name);
  EXPECT_TRUE(group) << group.error().to_string();
  return group ? std::move(*group) : nullptr;
}

void run_on_device(int size, const std::function<void(Group&)>& body, Duration timeout = 60s) {
  const auto store = memory_store();
  test::run_ranks(size, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = form(**handle, rank, size, timeout);
    ASSERT_TRUE(group);
    body(*group);
    (void)group->barrier();  // no rank leaves while another still works
  });
}

const GroupKind kNccl{"Nccl", [](Rank) { return GroupOptions{}; },
                      [](int size, const std::function<void(Group&)>& body) { run_on_device(size, body); },
                      /*has_bitwise_reductions=*/false};
INSTANTIATE_TEST_SUITE_P(Nccl, GroupContract, group_sizes(kNccl, {1, 2, 3, 5}), group_name);

BufferView view(std::vector<float>& data) { return {data.data(), data.size(), Dtype::kFloat32}; }

TEST(NcclGroup, MessagesArriveInTheirOrder) {
  run_on_device(3, [](Group& group) {
    const Rank rank = group.membership().rank;
    std::vector<float> sent(200'000, static_cast<float>(rank)), received(200'000, -1);
    if (rank == 0) {
      ASSERT_TRUE(group.send(view(sent), 1, 0).wait());
      ASSERT_TRUE(group.receive(view(received), 2, 0).wait());
    } else {
      ASSERT_TRUE(group.receive(view(received), rank - 1, 0).wait());
      ASSERT_TRUE(group.send(view(sent), (rank + 1) % 3, 0).wait());
    }
    EXPECT_EQ(received[199'999], static_cast<float>((rank + 2) % 3));
  });
}

TEST(NcclGroup, MessagesInPiecesAreCopied) {
  run_on_device(2, [](Group& group) {
    const Rank rank = group.membership().rank;
    std::vector<float> memory(6, static_cast<float>(rank));
    const BufferView ends({{&memory[0], 8}, {&memory[4], 8}}, Dtype::kFloat32);
    ASSERT_TRUE((rank == 0 ? group.send(ends, 1, 0) : group.receive(ends, 0, 0)).wait());
    EXPECT_THAT(memory, ElementsAre(0, 0, rank, rank, 0, 0));
  });
}

TEST(NcclGroup, RefusesWhatNcclDoesNotHave) {
  run_on_device(2, [](Group& group) {
    std::vector<float> data(4, 1);
    const auto error = [](const Work& work) { return work.wait().error(); };
    EXPECT_THAT(error(group.send(view(data), 1, 7)).message, HasSubstr("use tag 0"));
    EXPECT_THAT(error(group.receive(view(data), kAnyRank, 0)).message, HasSubstr("name one"));
    EXPECT_THAT(error(group.send(view(data), 9, 0)).message, HasSubstr("the group's ranks are 0 to 1"));
    std::vector<int32_t> bits(4, 1);
    const Error refused = error(group.all_reduce({bits.data(), 4, Dtype::kInt32}, ReduceOp::kBitAnd));
    EXPECT_EQ(refused.code, ErrorCode::kUnsupported);
    EXPECT_THAT(refused.message, HasSubstr("NCCL cannot reduce int32 by band"));
    ASSERT_TRUE(group.all_reduce(view(data), ReduceOp::kSum).wait()) << "the group stays usable";
    EXPECT_EQ(data[0], 2);
  });
}

/// The sum of 1 over the ranks.
float count(Group& group) {
  std::vector<float> one{1};
  const Result<> summed = group.all_reduce(view(one), ReduceOp::kSum).wait();
  EXPECT_TRUE(summed) << summed.error().to_string();
  return one[0];
}

TEST(NcclGroup, Splits) {
  const auto store = memory_store();
  test::run_ranks(3, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = form(**handle, rank, 3);
    const auto part = group->split(**handle, rank % 2, 0, "parity");
    ASSERT_TRUE(part) << part.error().to_string();
    std::vector<float> data{static_cast<float>(rank)};
    ASSERT_TRUE((*part)->all_reduce(view(data), ReduceOp::kSum).wait());
    EXPECT_EQ(data[0], rank == 1 ? 1 : 2);
    EXPECT_EQ((*part)->membership().size, rank == 1 ? 1 : 2);
    EXPECT_EQ((*part)->membership().name, fmt::format("test/parity/{}", rank % 2));
    EXPECT_EQ((*part)->transport(), "nccl");
    (void)group->barrier();
  });
}

TEST(NcclGroup, GrowsByRanksOfAnotherGroup) {
  const auto store = memory_store();
  test::run_ranks(5, [&](Rank place) {
    const auto handle = store->clone();
    const bool left = place < 2;
    const auto part = form(**handle, left ? place : place - 2, left ? 2 : 3, 60s, left ? "left" : "right");
    const auto whole = part->merge(**handle, {place, 5, "whole", 0});
    ASSERT_TRUE(whole) << whole.error().to_string();
    EXPECT_EQ((*whole)->transport(), "nccl");
    EXPECT_EQ(count(**whole), 5);
    EXPECT_EQ(count(*part), left ? 2 : 3) << "the old group stays usable";
    (void)(*whole)->barrier();
  });
}

TEST(NcclGroup, ShrinksWhenARankIsLost) {
  const auto store = memory_store();
  test::run_ranks(4, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = form(**handle, rank, 4);
    EXPECT_EQ(count(*group), 4);
    if (rank == 1) return;
    std::vector<float> data(1000, 1);
    EXPECT_FALSE(group->all_reduce(view(data), ReduceOp::kSum).wait());
    const auto rest = group->shrink(**handle, {1}, /*abort_first=*/true);
    ASSERT_TRUE(rest) << rest.error().to_string();
    EXPECT_EQ((*rest)->transport(), "nccl");
    EXPECT_EQ(count(**rest), 3);
    (void)(*rest)->barrier();
  });
}

TEST(NcclGroup, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  run_on_device(
      3,
      [](Group& group) {
        std::vector<float> data(4, 1);
        ASSERT_TRUE(group.barrier().wait());
        if (group.membership().rank == 1) {
          while (group.status()) (void)group.wait_for_pending(Deadline::after(1ms));
        } else {
          const auto result = group.all_reduce(view(data), ReduceOp::kSum, {.timeout = 300ms}).wait();
          ASSERT_FALSE(result);
          EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
          EXPECT_THAT(result.error().to_string(), HasSubstr("during all_reduce #2 (float32[4], sum)"));
        }
        const auto later = group.barrier().wait();  // also at the rank that is late
        ASSERT_FALSE(later);
        EXPECT_EQ(later.error().rank, 1);
        EXPECT_THAT(later.error().message,
                    ContainsRegex("ranks 0, 2 are at all_reduce #2.*; rank 1 \\(host .*, pid .*\\)"
                                  " has not arrived, last seen at barrier #1"));
      },
      20s);
}

TEST(NcclGroup, CallsThatDifferAreNamedAtTheDeadline) {
  run_on_device(
      3,
      [](Group& group) {
        std::vector<float> data(4, 1);
        const CallOptions options{.timeout = 300ms};
        if (group.membership().rank == 2) {
          (void)group.barrier(options).wait();  // may end before the calls of the others
        } else {
          EXPECT_FALSE(group.all_reduce(view(data), ReduceOp::kSum, options).wait());
        }
        while (group.status()) (void)group.wait_for_pending(Deadline::after(1ms));
        const Error error = group.barrier().wait().error();
        EXPECT_EQ(error.code, ErrorCode::kMismatch);
        EXPECT_THAT(error.rank, AnyOf(0, 2)) << "a rank blames another one, and may hear that first";
        EXPECT_THAT(error.message, HasSubstr("rank 2 is at barrier #1, the others at all_reduce #1 (float32[4], sum)"));
      },
      20s);
}

template <class Function>
Function* of_fake(const char* name) {
  void* const fake = dlopen(std::getenv("MUSTER_NCCL_LIBRARY"), RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(fake, name));
}
TEST(NcclGroup, AGraphCapturesCollectivesAndMessages) {
  run_on_device(2, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());
    const Rank rank = group.membership().rank;
    std::vector<float> data(3, 1), received(3, 0);
    device_double::Graph graph;
    graph.begin(current());
    EXPECT_TRUE(group.all_reduce(view(data), ReduceOp::kSum).done());
    const std::vector<Message> messages{{view(data), 1 - rank, 0, true}, {view(received), 1 - rank, 0, false}};
    EXPECT_TRUE(group.exchange(messages).front().done());
    graph.end();
    EXPECT_THAT(data, ElementsAre(1, 1, 1)) << "nothing has run";
    for (const float expected : {2, 4, 8}) {
      graph.replay(current());
      current().synchronize();
      EXPECT_THAT(data, ElementsAre(expected, expected, expected));
      EXPECT_EQ(received, data);
    }
    ASSERT_TRUE(group.all_reduce(view(data), ReduceOp::kSum).wait()) << "calls go on as before";
  });
}

TEST(NcclGroup, ARankThatIsLostEndsTheReplaysOfTheOthers) {
  run_on_device(2, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());
    std::vector<float> data(3, 1);
    device_double::Graph graph;
    graph.begin(current());
    EXPECT_TRUE(group.all_reduce(view(data), ReduceOp::kSum).done());
    graph.end();
    if (group.membership().rank == 1) return group.leave();
    graph.replay(current());
    current().synchronize();  // does not hang
    const auto result = group.barrier().wait();
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().to_string(), HasSubstr("has left the group"));
  });
}

void let_next_kernel(int what) { of_fake<void(int)>("fake_nccl_let_next_kernel")(what); }

TEST(NcclGroup, AGroupThatIsLeftAbortsNothing) {
  auto* const aborts = of_fake<int()>("fake_nccl_aborts");
  const int before = aborts();
  run_on_device(2, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());
    group.leave();
    group.leave();  // as shutdown() and the destructor do
  });
  EXPECT_EQ(aborts(), before);
}

TEST(NcclGroup, AGraphMayOutliveItsGroup) {
  const auto store = memory_store();
  std::latch both_have_captured(2);
  test::run_ranks(2, [&](Rank rank) {
    const auto handle = store->clone();
    auto group = form(**handle, rank, 2);
    std::vector<float> data(3, 1);
    device_double::Graph graph;
    graph.begin(current());
    EXPECT_TRUE(group->all_reduce(view(data), ReduceOp::kSum).wait());
    graph.end();
    both_have_captured.arrive_and_wait();
    group->abort({ErrorCode::kAborted, "by the test"});
    EXPECT_FALSE(group->barrier().wait());
    group.reset();
  });
}

TEST(NcclGroup, AListOfCollectivesIsOneKernel) {
  run_on_device(1, [](Group& group) {  // its kernels are all that the process has
    ASSERT_TRUE(group.barrier().wait());
    std::vector<float> reduced(4, 1), cast(2, 2), gathered(3, -1), own(3, 5), ends(6, 1);
    const BufferView pieces({{&ends[0], 8}, {&ends[4], 8}}, Dtype::kFloat32);
    std::vector<Operation> operations;
    operations.push_back({{.collective = Collective::kAllReduce}, view(reduced), view(reduced)});
    operations.push_back(
        {{.collective = Collective::kAllReduce, .op = ReduceOp::kPremulSum}, pieces, pieces, {}, {}, 3});
    operations.push_back({{.collective = Collective::kBroadcast}, view(cast), view(cast)});
    operations.push_back({{.collective = Collective::kAllGather}, view(own), view(gathered)});
    auto* const kernels = of_fake<int()>("fake_nccl_kernels");
    const int before = kernels();
    const Work work = group.submit(std::move(operations));
    ASSERT_TRUE(work.wait()) << work.wait().error().to_string();
    EXPECT_EQ(kernels(), before + 1);
    EXPECT_EQ(work.sequence(), 5u);
    EXPECT_THAT(gathered, ElementsAre(5, 5, 5));
    EXPECT_THAT(ends, ElementsAre(3, 3, 1, 1, 3, 3));
  });
}

TEST(NcclGroup, AnErrorOfTheNetworkEndsTheGroupAtAllRanks) {
  run_on_device(3, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());  // all ranks have formed the group
    std::vector<float> data(1000, 1);
    if (group.membership().rank == 0) let_next_kernel(2);
    const auto result = group.all_reduce(view(data), ReduceOp::kSum).wait();
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().to_string(), HasSubstr("remote process exited or there was a network error"));
    EXPECT_THAT(result.error().to_string(), HasSubstr("all_reduce #2"));
    EXPECT_FALSE(group.status());
  });
}

TEST(NcclGroup, ACallbackMayWaitForAnOperationThatIsLate) {
  run_on_device(
      2,
      [](Group& group) {
        std::vector<float> data(4, 1);
        std::promise<Result<>> seen;
        group.barrier({.async = true}).on_done([&](const Result<>&) {
          if (group.membership().rank == 0) {
            seen.set_value(group.all_reduce(view(data), ReduceOp::kSum, {.timeout = 300ms, .async = true}).wait());
          } else {
            while (group.status()) (void)group.wait_for_pending(Deadline::after(1ms));
            seen.set_value(group.status());
          }
        });
        EXPECT_FALSE(seen.get_future().get());
      },
      20s);
}

TEST(NcclGroup, AKernelThatHangsIsEndedAtItsDeadline) {
  run_on_device(2, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());  // all ranks have formed the group
    std::vector<float> data(1000, 1);
    if (group.membership().rank == 0) let_next_kernel(1);
    const Work work = group.all_reduce(view(data), ReduceOp::kSum, {.timeout = 200ms, .async = true});
    EXPECT_FALSE(work.wait());
    EXPECT_FALSE(group.status());
  });
}

TEST(NcclGroup, ARankThatLeavesEndsTheCallsOfTheOthers) {
  run_on_device(3, [](Group& group) {
    ASSERT_TRUE(group.barrier().wait());  // all ranks have formed the group
    if (group.membership().rank == 2) return group.leave();
    std::vector<float> data(1000, 1);
    const auto result = group.all_reduce(view(data), ReduceOp::kSum).wait();
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().to_string(), HasSubstr("has left the group"));
    EXPECT_FALSE(group.status());
  });
}

/// MUSTER_RANKS sets the number of ranks.
TEST(NcclGroup, FormsWithoutTheStore) {
  int size = 24;
  if (const char* const text = std::getenv("MUSTER_RANKS")) std::from_chars(text, text + std::strlen(text), size);
  const auto store = memory_store();
  const auto operations = [&] { return store->stat(Deadline::after(60s))->operations; };
  std::latch hosts_formed(size + 1), counted(1), formed(size + 1);
  std::thread ranks([&] {
    test::run_ranks(size, [&](Rank rank) {
      const auto handle = store->clone();
      auto host = Group::form(**handle, {rank, size, "test", 0}, test::options_for("shm,unix", 300s));
      EXPECT_TRUE(host) << host.error().to_string();
      hosts_formed.arrive_and_wait();
      counted.wait();
      if (!host) return formed.arrive_and_wait();
      const auto group = nccl::form_group(std::move(*host), std::make_shared<TestDevice>());
      EXPECT_TRUE(group) << group.error().to_string();
      formed.arrive_and_wait();
    });
  });
  hosts_formed.arrive_and_wait();
  const uint64_t before = operations();
  const uint64_t of_counting = operations() - before;
  counted.count_down();
  formed.arrive_and_wait();
  EXPECT_EQ(operations() - before, 2 * of_counting) << "only the store's statistics were read, twice";
  ranks.join();
}

TEST(NcclGroup, ALargeCommunicatorHasSeveralRoots) {
  const auto library = nccl::Library::get();
  ASSERT_TRUE(library) << library.error().to_string();
  test::run_group(5, "shm", [&](Group& host) {
    const auto formed = nccl::Communicator::form(
        **library, std::make_shared<TestDevice>(), host, [] { return std::nullopt; }, Deadline::after(60s),
        /*ranks_per_root=*/2);
    EXPECT_TRUE(formed) << formed.error().to_string();
    EXPECT_EQ(of_fake<int()>("fake_nccl_roots")(), 3);
  });
}

TEST(NcclGroup, AllRanksSayWhichRankCouldNotFormIt) {
  of_fake<void(int)>("fake_nccl_fail_init")(2);
  const auto store = memory_store();
  test::run_ranks(8, [&](Rank rank) {  // in the tree of PeerMonitor, the peer of rank 2 is rank 0, and of 7 it is 1
    const auto handle = store->clone();
    auto group = try_to_form(**handle, rank, 8);
    const Error error = group ? (*group)->barrier().wait().error() : group.error();
    EXPECT_EQ(error.rank, 2);
    EXPECT_THAT(error.message, HasSubstr("failed: invalid usage: Duplicate GPU detected"));
    EXPECT_THAT(error.message, HasSubstr("each rank needs a GPU of its own"));
  });
  of_fake<void(int)>("fake_nccl_fail_init")(-1);
}

TEST(NcclGroup, ALibraryThatIsTooOldOrMissingIsRefused) {
  // In processes of their own, because the library is loaded once.
  const auto load = [](const char* variable, const char* value) {
    setenv(variable, value, 1);
    const auto library = nccl::Library::get();
    std::fprintf(stderr, "%s\n", library ? "loaded" : library.error().to_string().c_str());
    std::_Exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(load("FAKE_NCCL_VERSION", "22005"), testing::ExitedWithCode(0), "is NCCL 2.20.5; muster needs 2.21.0");
  EXPECT_EXIT(load("MUSTER_NCCL_LIBRARY", "/nowhere/libnccl.so"), testing::ExitedWithCode(0),
              "NCCL cannot be loaded: /nowhere/libnccl.so");
}

}  // namespace
}  // namespace muster
