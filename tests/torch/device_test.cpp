// DistributedDataParallel for modules on a device. device_double stands for the device, and tests/nccl for NCCL.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "group/ranks.h"
#include "muster/torch/c10d/device/device_group.h"
#include "muster/torch/nn/distributed_data_parallel.h"
#include "torch/models.h"

namespace muster::nn {
namespace {

using test::borrowed, test::expect_close, test::random_tensor;

constexpr int kRanks = 2;

/// A device for each rank: autograd has one thread for each device, and the ranks are threads of this process.
at::Device device_of(Rank rank) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(rank)}; }

/// Its parameters are made on the device, because Module::to() cannot move them to such a device.
struct NetImpl : torch::nn::Module {
  NetImpl(uint64_t seed, at::Device device)
      : first(register_parameter("first", random_tensor({6, 16}, seed).to(device))),
        second(register_parameter("second", random_tensor({16, 3}, seed + 1).to(device))) {}
  at::Tensor forward(const at::Tensor& rows) { return rows.matmul(first).relu().matmul(second); }
  at::Tensor first, second;
};

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& each : tensors) copies.push_back(each.detach().cpu());
  return copies;
}

class DeviceTest : public testing::TestWithParam<bool> {
 protected:
  static void SetUpTestSuite() {
    ASSERT_NE(dlopen(DEVICE_DOUBLE, RTLD_NOW), nullptr) << dlerror();
    c10::register_privateuse1_backend("simulated");
  }
  void SetUp() override { setenv("MUSTER_NCCL_LIBRARY", GetParam() ? FAKE_NCCL : "", 1); }

  /// Trains with `options` on devices, and in one process on the CPU on the whole batches.
  static void expect_training_as_on_the_cpu(const DistributedDataParallelOptions& options) {
    const auto store = memory_store();
    test::run_ranks(kRanks, [&](Rank rank) {
      const auto handle = store->clone();
      const auto group = Group::form(**handle, {rank, kRanks, "test", 0}, test::options_for("shm"));
      ASSERT_TRUE(group) << group.error().to_string();
      LazyDeviceGroup on_device(**group);
      DistributedDataParallelOptions here = options;
      here.device_group = &on_device;
      const auto model = std::make_shared<NetImpl>(1 + static_cast<uint64_t>(rank), device_of(rank));
      const auto reference = std::make_shared<NetImpl>(1, at::kCPU);
      DistributedDataParallel ddp(model, borrowed(**group), here);
      torch::optim::SGD optimizer(ddp.parameters(), 0.01), plain(reference->parameters(), 0.01);
      for (uint64_t step = 0; step < 4; ++step) {
        const at::Tensor batch = random_tensor({8, 6}, step);
        optimizer.zero_grad();
        ddp.forward(batch.chunk(kRanks)[static_cast<size_t>(rank)].to(device_of(rank))).pow(2).mean().backward();
        optimizer.step();
        plain.zero_grad();
        reference->forward(batch).pow(2).mean().backward();
        plain.step();
      }
      expect_close(on_host(ddp.parameters()), on_host(reference->parameters()));
      EXPECT_EQ(on_device.formed() != nullptr, GetParam()) << "only over NCCL";
      EXPECT_TRUE((*group)->barrier().wait());
    });
  }
};
INSTANTIATE_TEST_SUITE_P(ThroughTheHostAndOverNccl, DeviceTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Nccl" : "Host"; });

TEST_P(DeviceTest, DistributedDataParallelTrainsAsOnTheCpu) {
  expect_training_as_on_the_cpu({});
  expect_training_as_on_the_cpu({.bucket_cap_mb = 0.001, .first_bucket_mb = 0.0005});
  expect_training_as_on_the_cpu({.gradient_as_bucket_view = false});
  expect_training_as_on_the_cpu({.find_unused_parameters = true});
  expect_training_as_on_the_cpu({.static_graph = true});
}

}  // namespace
}  // namespace muster::nn
