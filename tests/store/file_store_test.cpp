#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "contract/store_contract.h"

namespace muster {
namespace {

struct TemporaryFile {
  TemporaryFile() {
    std::string pattern = testing::TempDir() + "/muster-file-store-XXXXXX";
    directory = mkdtemp(pattern.data());
    path = directory + "/store";
  }
  ~TemporaryFile() { std::filesystem::remove_all(directory); }
  std::string directory, path;
};

struct FileWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return *file_store(file.path); }
  TemporaryFile file;
};
std::unique_ptr<StoreWorld> make_file_world() { return std::make_unique<FileWorld>(); }

INSTANTIATE_TEST_SUITE_P(File, StoreContract, testing::Values(make_file_world));

Deadline soon() { return Deadline::after(60s); }

Bytes contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void overwrite(const std::string& path, ByteView bytes) {
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
}

TEST(FileStore, OutlivesItsHandles) {
  const TemporaryFile file;
  EXPECT_OK((*file_store(file.path))->set("k", as_bytes("v"), soon()));
  EXPECT_EQ((*file_store(file.path))->get("k", soon()), to_bytes("v"));
}

TEST(FileStore, WorksBetweenProcesses) {
  const TemporaryFile file;
  const auto store = *file_store(file.path);
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      const auto mine = *file_store(file.path);
      bool fine = true;
      for (int n = 0; n < 100; ++n) fine = fine && mine->add("sum", 1, soon()).has_value();
      fine = fine && mine->barrier("end", 4, soon()).has_value();
      _exit(fine ? 0 : 1);
    }
    children.push_back(pid);
  }
  EXPECT_OK(store->barrier("end", 4, soon()));
  EXPECT_EQ(store->add("sum", 0, soon()), 300);
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(FileStore, IgnoresAndOverwritesATornTail) {
  const TemporaryFile file;
  EXPECT_OK((*file_store(file.path))->set("a", as_bytes("whole"), soon()));
  const Bytes whole = contents(file.path);
  EXPECT_OK((*file_store(file.path))->set("b", as_bytes("the last record"), soon()));
  const Bytes both = contents(file.path);
  for (size_t size = whole.size(); size < both.size(); ++size) {
    overwrite(file.path, ByteView(both).first(size));
    const auto store = *file_store(file.path);
    EXPECT_EQ(store->list_keys("", soon()), std::vector<Key>{"a"}) << size;
    EXPECT_OK(store->set("c", as_bytes("after"), soon()));
    EXPECT_EQ((*file_store(file.path))->list_keys("", soon()), (std::vector<Key>{"a", "c"})) << size;
  }
  Bytes flipped = both;
  flipped.back() ^= 1;
  overwrite(file.path, flipped);
  EXPECT_EQ((*file_store(file.path))->list_keys("", soon()), std::vector<Key>{"a"});
}

TEST(FileStore, StartsOverWhenTheFirstWriterWasKilled) {
  const TemporaryFile file;
  overwrite(file.path, as_bytes("MUST"));
  const auto store = *file_store(file.path);
  EXPECT_EQ(store->num_keys(soon()), 0);
  EXPECT_OK(store->set("k", as_bytes("v"), soon()));
  EXPECT_EQ((*file_store(file.path))->get("k", soon()), to_bytes("v"));
}

TEST(FileStore, RefusesAFileOfAnotherKind) {
  const TemporaryFile file;
  overwrite(file.path, as_bytes("import torch\nprint(torch.__version__)\n"));
  const Bytes before = contents(file.path);
  const auto store = *file_store(file.path);
  expect_error(store->num_keys(soon()), ErrorCode::kProtocol, file.path);
  expect_error(store->set("k", as_bytes("v"), soon()), ErrorCode::kProtocol, file.path);
  EXPECT_EQ(contents(file.path), before);
}

TEST(FileStore, SurvivesKilledWriters) {
  const TemporaryFile file;
  for (int round = 0; round < 5; ++round) {
    const pid_t pid = fork();
    if (pid == 0) {
      const auto mine = *file_store(file.path);
      const Bytes value(100000, 7);
      while (true) (void)mine->set("big", value, soon());
    }
    const auto store = *file_store(file.path);
    EXPECT_OK(store->wait({"big"}, soon()));
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    EXPECT_EQ(store->add("rounds", 1, soon()), round + 1);
    EXPECT_EQ(store->get("big", soon())->size(), 100000U);
    EXPECT_EQ(store->delete_key("big", soon()), true);
  }
}

TEST(FileStore, ReportsAFullDisk) {
  const auto store = file_store("/dev/full");
  if (!store) GTEST_SKIP() << store.error().to_string();
  expect_error((*store)->set("k", as_bytes("v"), soon()), ErrorCode::kResourceExhausted, "No space left");
}

TEST(FileStore, NamesAPathThatCannotBeOpened) {
  expect_error(file_store("/no/such/folder/store"), ErrorCode::kIo, "/no/such/folder/store");
}

}  // namespace
}  // namespace muster
