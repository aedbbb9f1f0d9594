#include "muster/torch/sharded_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "group/ranks.h"
#include "muster/torch/checkpoint_file.h"
#include "muster/torch/dcp/metadata.h"
#include "muster/torch/exception.h"
#include "torch/models.h"

namespace muster::checkpoint {
namespace {

class ShardedCheckpoint : public ::testing::Test {
 protected:
  ShardedCheckpoint() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muster-sharded-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~ShardedCheckpoint() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ / "step"; }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) names.insert(entry.path().filename());
    return names;
  }
  /// Saves or loads rows of the table at `size` ranks. Rank 0 has `first` rows, the others share the rest.
  void use_rows(int size, int64_t first, const at::Tensor& table, bool save) {
    test::run_group(size, "shm", [&](Group& group) {
      const int64_t rank = group.membership().rank, rest = table.size(0) - first, others = size - 1;
      const int64_t begin = rank == 0 ? 0 : first + rest * (rank - 1) / others;
      const int64_t end = rank == 0 ? first : first + rest * rank / others;
      const at::Tensor own = table.slice(0, begin, end);
      const at::Tensor shard = save ? own : at::zeros_like(own);
      int64_t step = save ? 41 : 0;
      const auto model = test::make_mlp(save ? 1 : 2 + static_cast<uint64_t>(rank));
      ShardedState state;
      state.add("model", *model).add("step", step).add_shard("table", shard, table.sizes().vec(), {begin, 0});
      if (save) return save_sharded(group, path(), state);
      load_sharded(group, path(), state);
      EXPECT_TRUE(at::equal(shard, own));
      EXPECT_EQ(step, 41);
      EXPECT_TRUE(at::equal(model->parameters()[0], test::make_mlp(1)->parameters()[0]));
    });
  }

  std::filesystem::path folder_;
};

/// The message of the error that `body` throws.
template <class Body>
std::string sharded_error_of(Body body) {
  try {
    body();
  } catch (const ErrorException& error) {
    return error.error().message;
  }
  return "nothing was thrown";
}

TEST_F(ShardedCheckpoint, LoadsAtOtherNumbersOfRanks) {
  const at::Tensor table = test::random_tensor({11, 3}, 1);
  use_rows(3, 0, table, true);  // rank 0 has an empty shard
  EXPECT_EQ(files(), (std::set<std::string>{".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}));
  use_rows(1, 11, table, false);
  use_rows(4, 2, table, false);
  for (const char* name : {"__0_1.distcp.partial", "__7_4.distcp.partial"}) {
    std::ofstream(path() + "/" + name) << "half";
  }
  use_rows(2, 7, table, true);
  EXPECT_EQ(files(), (std::set<std::string>{".metadata", "__0_5.distcp", "__1_5.distcp"})) << "the old ones are gone";
  use_rows(3, 4, table, false);
}

TEST_F(ShardedCheckpoint, ReadsBoxesOfSeveralDimensionsAndStrides) {
  const at::Tensor cube = at::arange(4 * 5 * 6, at::kLong).view({4, 5, 6});
  test::run_group(2, "shm", [&](Group& group) {
    const int64_t rank = group.membership().rank;
    ShardedState saved;
    const at::Tensor half = cube.slice(1, rank == 0 ? 0 : 3, rank == 0 ? 3 : 5);
    saved.add_shard("cube", half.transpose(0, 2).contiguous().transpose(0, 2), {4, 5, 6}, {0, rank == 0 ? 0 : 3, 0});
    save_sharded(group, path(), saved);
    const at::Tensor box = at::zeros({2, 3, 2}, at::kLong), none = at::empty({0, 5, 6}, at::kLong);
    ShardedState loaded;
    loaded.add_shard("cube", rank == 0 ? box : none, {4, 5, 6}, {1, rank == 0 ? 1 : 0, rank == 0 ? 3 : 0});
    load_sharded(group, path(), loaded);
    if (rank == 0) {
      EXPECT_TRUE(at::equal(box, cube.slice(0, 1, 3).slice(1, 1, 4).slice(2, 3, 5)));
    }
  });
}

TEST_F(ShardedCheckpoint, ErrorsReachAllRanksAndNameTheReason) {
  using ::testing::HasSubstr;
  test::run_group(2, "shm", [&](Group& group) {
    const int64_t rank = group.membership().rank;
    const auto failure = [&](at::Tensor shard, std::vector<int64_t> offsets) {
      ShardedState state;
      state.add_shard("table", std::move(shard), {4, 2}, std::move(offsets));
      return sharded_error_of([&] { save_sharded(group, path(), state); });
    };
    EXPECT_THAT(failure(at::ones({1, 2}), {rank, 0}), HasSubstr("the shards of 'table' lack 4 elements"));
    EXPECT_THAT(failure(at::ones({3, 2}), {rank, 0}), HasSubstr("two shards of 'table' overlap"));
    EXPECT_THAT(failure(at::ones({2, 2}, rank == 0 ? at::kFloat : at::kInt), {2 * rank, 0}),
                HasSubstr("'table' is float32[4, 2] at one rank, and int32[4, 2] at another"));
    EXPECT_THAT(failure(at::empty({2, 2}, rank == 0 ? at::kFloat : at::ScalarType::Bits8), {2 * rank, 0}),
                HasSubstr("cannot be saved"));
    EXPECT_THROW(failure(at::ones({2, 2}), {3, 0}), c10::ValueError);
    value_or_throw(group.barrier().wait());
    EXPECT_EQ(files(), std::set<std::string>()) << "failed saves leave nothing";
    EXPECT_EQ(failure(at::ones({2, 2}), {2 * rank, 0}), "nothing was thrown");

    const auto load_failure = [&](const std::string& name, const at::Tensor& tensor) {
      ShardedState state;
      state.add(name, tensor);
      return sharded_error_of([&] { load_sharded(group, path(), state); });
    };
    EXPECT_THAT(load_failure("other", at::ones({4, 2})), HasSubstr("'other': the checkpoint has none"));
    EXPECT_THAT(load_failure("table", at::ones({5, 2})), HasSubstr("'table': it is float32[4, 2], here float32[5, 2]"));
    EXPECT_THAT(load_failure("table", at::ones({4, 2}, at::kInt)), HasSubstr("here int32[4, 2]"));
    value_or_throw(group.barrier().wait());
    if (rank == 0) {
      for (const auto& name : files()) {
        if (name != ".metadata") std::filesystem::resize_file(path() + "/" + name, 100);
      }
    }
    EXPECT_THAT(load_failure("table", at::ones({4, 2})), HasSubstr("is truncated"));
  });
}

TEST_F(ShardedCheckpoint, RefusesChunksThatOverlap) {
  test::run_group(2, "shm", [&](Group& group) {
    ShardedState state;
    state.add_shard("table", at::ones({2, 2}), {4, 2}, {2 * group.membership().rank, 0});
    save_sharded(group, path(), state);
  });
  const at::Tensor bytes = read_file(path() + "/.metadata");
  auto metadata = dcp::decode_metadata({bytes.const_data_ptr<uint8_t>(), bytes.nbytes()}).value();
  for (dcp::Chunk& chunk : metadata.at("table").chunks) chunk.offsets[0] /= 2;  // rows 0 to 1, and 1 to 2
  const Bytes changed = dcp::encode_metadata(metadata);
  write_atomically(path() + "/.metadata", [&](const ByteSink& sink) { sink(changed.data(), changed.size()); });
  test::run_group(1, "shm", [&](Group& group) {
    ShardedState state;
    state.add("table", at::zeros({4, 2}));
    EXPECT_THAT(sharded_error_of([&] { load_sharded(group, path(), state); }), ::testing::HasSubstr("overlap"));
  });
}

TEST_F(ShardedCheckpoint, DoesNotWaitForAFifo) {
  std::filesystem::create_directories(path());
  ASSERT_EQ(::mkfifo((path() + "/.metadata").c_str(), 0600), 0);
  test::run_group(1, "shm", [&](Group& group) {
    ShardedState state;
    EXPECT_THAT(sharded_error_of([&] { load_sharded(group, path(), state); }), ::testing::HasSubstr("malformed"));
  });
}

TEST_F(ShardedCheckpoint, AcceptsTheEnumeratorsOfPython311) {
  dcp::Metadata metadata;
  metadata["a"] = {"bcomplex32", {4, 2}, {{{0, 0}, {4, 2}, "__0_0.distcp", 0, 100}}};
  std::string pickle = to_string(dcp::encode_metadata(metadata));
  const std::string type = "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n";
  const std::string by_number = type + "J" + std::string(4, '\0') + "\x85R";
  const size_t begin = pickle.find(by_number);
  ASSERT_NE(begin, std::string::npos);
  const std::string by_name = "cbuiltins\ngetattr\n" + type + "\x8c\x17" + "TORCH_CONTIGUOUS_FORMAT" + "\x86R";
  pickle.replace(begin, by_number.size(), by_name);
  EXPECT_EQ(dcp::decode_metadata(as_bytes(pickle)).value(), metadata);
}

TEST_F(ShardedCheckpoint, RefusesOtherClassesAndMalformedPickles) {
  const auto code_of = [](const std::string& pickle) { return dcp::decode_metadata(as_bytes(pickle)).error().code; };
  EXPECT_EQ(code_of("cposix\nsystem\n."), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of("I1\n."), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of("c"), ErrorCode::kProtocol);
  EXPECT_EQ(code_of("t."), ErrorCode::kProtocol);
  EXPECT_EQ(code_of("\x80\x02N."), ErrorCode::kProtocol);

  dcp::Metadata metadata;
  metadata["a"] = {"float32", {4, 2}, {{{0, 0}, {4, 2}, "__0_0.distcp", 0, 100}}};
  const Bytes good = dcp::encode_metadata(metadata);
  EXPECT_EQ(dcp::decode_metadata(good).value(), metadata);
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(dcp::decode_metadata(ByteView(good).first(length))) << length;
  }
  metadata["a"].chunks[0].file = "../secret";
  EXPECT_FALSE(dcp::decode_metadata(dcp::encode_metadata(metadata)));
  const dcp::StoredTensor wide{"float32", "0", 0, {3, 2}, {int64_t{1} << 59, 1}};
  EXPECT_FALSE(dcp::decode_tensor(dcp::encode_tensor(wide, 24)));
}

}  // namespace
}  // namespace muster::checkpoint
