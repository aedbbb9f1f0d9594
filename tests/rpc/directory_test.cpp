// The directory of workers while others join and leave.
#include "muster/rpc/directory.h"

#include <atomic>
#include <thread>

#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

WorkerRecord record_of(const std::string& name, int id) {
  WorkerRecord record;
  record.worker = {name, id};
  record.tcp_address = "127.0.0.1:1";  // nobody answers there
  return record;
}

TEST(RpcDirectory, AWorkerMayLeaveWhileItIsLookedUp) {
  const std::shared_ptr<Store> store = memory_store();
  Directory directory(store, "rpc");
  const int id = directory.new_id(Deadline::after(kPatience)).value();
  const WorkerRecord self = record_of("b", id);
  constexpr int kRounds = 5'000;
  std::atomic<int> joined{0}, left{0};
  std::thread leaves([&] {
    for (int round = 1; round <= kRounds; ++round) {
      joined.wait(round - 1);
      EXPECT_TRUE(directory.leave(self, Deadline::after(kPatience)));
      left = round;
      left.notify_one();
    }
  });
  int failed = 0;
  for (int round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(directory.join(self, Deadline::after(kPatience)));
    joined = round;
    joined.notify_one();
    while (failed == 0 && left < round) failed += !directory.list(Deadline::after(std::chrono::seconds(2)));
    left.wait(round - 1);
  }
  leaves.join();
  EXPECT_EQ(failed, 0);
  EXPECT_FALSE(directory.find("b", Deadline::after(kPatience)).value());
}

TEST(RpcDirectory, ANameIsTakenOverWhileItIsRemoved) {
  const std::shared_ptr<Store> store = memory_store();
  std::atomic<int> failed{0};
  const auto take_turns = [&](int id) {
    Directory directory(store, "rpc");
    for (int i = 0; i < 1'000 && failed == 0; ++i) {
      const WorkerRecord self = record_of("name", 1'000 * id + i);  // as if the worker before it had died
      failed += !directory.join(self, Deadline::after(std::chrono::seconds(2)));
      failed += !directory.leave(self, Deadline::after(std::chrono::seconds(2)));
    }
  };
  std::thread other(take_turns, 0);
  take_turns(1);
  other.join();
  EXPECT_EQ(failed, 0);
}

}  // namespace
}  // namespace muster::rpc::test
