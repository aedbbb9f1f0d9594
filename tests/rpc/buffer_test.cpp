#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "muster/rpc/message.h"

namespace muster::rpc {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(Buffer, ALargeOneUsesTheMemoryOfAnEarlierOne) {
  const uint8_t* first = nullptr;
  {
    const Buffer buffer = Buffer::allocate(9 * kMiB + 5);
    first = buffer.data();
    const Buffer second = Buffer::allocate(9 * kMiB);
    EXPECT_NE(second.data(), first) << "it is in use";
    const Buffer copy = buffer;
    std::fill_n(copy.data(), copy.size(), uint8_t{7});
  }
  std::vector<Buffer> again;
  for (int i = 0; i < 2; ++i) again.push_back(Buffer::allocate(8 * kMiB));
  EXPECT_TRUE(again[0].data() == first || again[1].data() == first);
  EXPECT_EQ(again[0].size(), 8 * kMiB);
}

TEST(Buffer, ManyThreadsMayAllocateAndDropThem) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (size_t i = 0; i < 50; ++i) {
        const size_t bytes = (4 + i % 3 * 60) * kMiB;  // more in all than is kept
        const Buffer buffer = Buffer::allocate(bytes);
        buffer.data()[0] = buffer.data()[bytes - 1] = static_cast<uint8_t>(thread);
        std::this_thread::yield();
        EXPECT_EQ(buffer.data()[0], thread);
        EXPECT_EQ(buffer.data()[bytes - 1], thread);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Buffer, ACopyIsEqual) {
  for (const size_t bytes : {size_t{0}, size_t{1}, 5 * kMiB + 1}) {
    Bytes data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 31);
    EXPECT_TRUE(std::ranges::equal(Buffer::copy_of(data).view(), data));
  }
}

}  // namespace
}  // namespace muster::rpc
