#include "muster/shm/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "muster/base/random.h"
#include "muster/shm/peer_memory.h"

namespace muster::test {
namespace {

TEST(Arena, GivesDisjointAlignedMemory) {
  const auto arena = Arena::create();
  Random random(1);
  std::vector<std::pair<uint8_t*, size_t>> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (!blocks.empty() && random.chance(0.4)) {
      const size_t victim = random.below(blocks.size());
      const auto [data, bytes] = blocks[victim];
      for (size_t at = 0; at < bytes; ++at) ASSERT_EQ(data[at], static_cast<uint8_t>(bytes));
      arena->free(data);
      blocks[victim] = blocks.back();
      blocks.pop_back();
      continue;
    }
    const size_t bytes = random.below(20000);
    const auto data = arena->allocate(bytes);
    ASSERT_TRUE(data);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(*data) % 64, 0u);
    std::memset(*data, static_cast<uint8_t>(bytes), bytes);
    blocks.emplace_back(static_cast<uint8_t*>(*data), bytes);
  }
  for (const auto& [data, bytes] : blocks) arena->free(data);
  EXPECT_FALSE(arena->in_use());
  arena->free(nullptr);
}

TEST(Arena, ReturnsUnusedMemory) {
  const auto arena = Arena::create(size_t{4} << 30);
  std::vector<void*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(*arena->allocate(size_t{100} << 20));
  EXPECT_GE(arena->mapped_bytes(), size_t{600} << 20);
  for (void* block : blocks) arena->free(block);
  EXPECT_LE(arena->mapped_bytes(), size_t{256} << 20);
}

TEST(Arena, NamesTheExhaustedResource) {
  const auto arena = Arena::create(1 << 20);
  const auto first = arena->allocate(600 << 10);
  ASSERT_TRUE(first);
  const auto second = arena->allocate(600 << 10);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(second.error().message,
            "cannot get 614400 bytes of shared memory for a tensor: 614400 of 1048576 bytes are in use");
  arena->free(*first);
  const auto third = arena->allocate(600 << 10);
  ASSERT_TRUE(third);
  arena->free(*third);
  EXPECT_FALSE(arena->allocate(SIZE_MAX));
}

TEST(Arena, FindsOnlyItsOwnMemory) {
  const auto arena = Arena::create();
  const auto data = static_cast<uint8_t*>(*arena->allocate(1000));
  const auto location = arena->find(data + 10, 990);
  ASSERT_TRUE(location);
  EXPECT_NE(location->segment, 0u);
  EXPECT_FALSE(arena->find(data, size_t{1} << 40));
  const int elsewhere = 0;
  EXPECT_FALSE(arena->find(&elsewhere, 4));
  arena->free(data);
}

TEST(Arena, ServesManyThreads) {
  const auto arena = Arena::create();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      for (int i = 0; i < 300; ++i) {
        const auto data = arena->allocate(1 + 97 * i);
        ASSERT_TRUE(data);
        std::memset(*data, t, 1 + 97 * i);
        ASSERT_TRUE(arena->find(*data, 1 + 97 * i));
        ASSERT_EQ(static_cast<uint8_t*>(*data)[97 * i], t);
        arena->free(*data);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(arena->in_use());
}

/// Runs `body` in a forked child and returns its result. `body` must not use gtest's assertions.
template <class Body>
bool in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Arena, IsReadAndWrittenByAnotherProcess) {
  const auto arena = Arena::create();
  auto* const data = static_cast<uint8_t*>(*arena->allocate(5000));
  std::memset(data, 7, 5000);
  const auto location = *arena->find(data, 5000);
  const pid_t owner = getpid();
  EXPECT_TRUE(in_child([&] {
    PeerMemory peers;
    const auto mapped = peers.map(owner, location, 5000);
    if (!mapped || (*mapped)[4999] != 7) return false;
    (*mapped)[1] = 42;
    return *peers.map(owner, location, 5000) == *mapped;
  }));
  EXPECT_EQ(data[1], 42);
  arena->free(data);
}

TEST(Arena, OfAForkedChildIsItsOwn) {
  const auto arena = Arena::create();
  auto* const kept = static_cast<uint8_t*>(*arena->allocate(64));
  kept[0] = 1;
  EXPECT_TRUE(in_child([&] {
    auto* const own = static_cast<uint8_t*>(*arena->allocate(64));
    std::memset(own, 9, 64);
    arena->free(kept);  // must not release pages that the parent uses
    arena->free(own);
    return true;
  }));
  auto* const next = static_cast<uint8_t*>(*arena->allocate(64));
  EXPECT_EQ(kept[0], 1);
  arena->free(next);
  arena->free(kept);
}

TEST(Arena, ServesAChildThatWasForkedWhileOthersAllocate) {
  const auto arena = Arena::create();
  auto* const kept = static_cast<uint8_t*>(*arena->allocate(64));
  kept[0] = 1;
  std::atomic<bool> stopping = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stopping) {
        void* const data = *arena->allocate(1000);
        EXPECT_TRUE(arena->find(data, 1000));
        arena->free(data);
      }
    });
  }
  for (int i = 0; i < 30 && !testing::Test::HasFailure(); ++i) {
    EXPECT_TRUE(in_child([&] {
      alarm(30);  // ends the child if it waits for a thread that does not exist in the child
      if (kept[0] != 1 || arena->find(kept, 64)) return false;
      auto* const own = static_cast<uint8_t*>(*arena->allocate(64));
      std::memset(own, 9, 64);
      const auto children = Arena::create();
      children->free(*children->allocate(64));
      const bool found = arena->find(own, 64).has_value();
      arena->free(kept);
      arena->free(own);
      return found && arena->mapped_bytes() > 0;
    })) << "fork "
        << i;
  }
  stopping = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(kept[0], 1);
  arena->free(kept);
}

TEST(PeerMemory, RefusesInvalidLocations) {
  const auto arena = Arena::create();
  void* const data = *arena->allocate(100);
  const auto good = *arena->find(data, 100);
  PeerMemory peers;
  EXPECT_TRUE(peers.map(getpid(), good, 100));
  auto location = good;
  location.offset = location.segment_bytes - 50;
  EXPECT_FALSE(peers.map(getpid(), location, 100));
  location = good;
  location.segment_bytes *= 2;
  EXPECT_FALSE(peers.map(getpid(), location, 100));
  location = good;
  ++location.segment;
  EXPECT_FALSE(peers.map(getpid(), location, 100));
  location.fd = 0;
  EXPECT_FALSE(peers.map(getpid(), location, 100));
  const auto no_process = peers.map(-1, location, 100);
  ASSERT_FALSE(no_process);
  EXPECT_EQ(no_process.error().code, ErrorCode::kUnavailable);
  arena->free(data);
}

/// A segment of one page that belongs to a peer.
struct Foreign {
  Foreign() : file(memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    struct stat status {};
    EXPECT_EQ(ftruncate(file.get(), kBytes), 0);
    EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    EXPECT_EQ(fstat(file.get(), &status), 0);
    location = {status.st_ino, kBytes, 0, file.get()};
  }
  static constexpr size_t kBytes = 4096;
  Fd file;
  Arena::Location location;
};

/// Only the least recently used mapping is removed, so the mappings that a call has just found stay valid.
TEST(PeerMemory, UnmapsTheLeastRecentlyUsed) {
  PeerMemory peers;
  const auto map = [&](const Arena::Location& location) { return peers.map(getpid(), location, Foreign::kBytes); };
  // The files are closed at once, so a segment that was unmapped cannot be mapped again.
  std::vector<Arena::Location> places;
  while (places.size() < PeerMemory::kMaxMappings) {
    const Foreign segment;
    ASSERT_TRUE(map(segment.location));
    places.push_back(segment.location);
  }
  const auto first = map(places[0]);
  ASSERT_TRUE(first);
  ASSERT_TRUE(map(Foreign().location));
  EXPECT_FALSE(map(places[1]));
  const auto again = map(places[0]);
  ASSERT_TRUE(again) << again.error().to_string();
  EXPECT_EQ(*again, *first);
}

TEST(PeerMemory, ForgetsTheLeastRecentlyUsedSegments) {
  PeerMemory peers;
  for (uint64_t segment = 1; segment <= PeerMemory::kMaxMappings; ++segment) peers.add_known(segment);
  peers.add_known(1);  // is known already, so no other segment is forgotten
  EXPECT_TRUE(peers.is_known(1));
  EXPECT_TRUE(peers.is_known(2));
  peers.add_known(PeerMemory::kMaxMappings + 1);
  EXPECT_FALSE(peers.is_known(1));
  EXPECT_TRUE(peers.is_known(2));
  EXPECT_TRUE(peers.is_known(PeerMemory::kMaxMappings + 1));
  peers.add_known(1);
  EXPECT_TRUE(peers.is_known(1)) << "once it was asked about again";
}

}  // namespace
}  // namespace muster::test
