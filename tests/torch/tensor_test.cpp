#include "muster/torch/tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "muster/torch/c10d/torch_versions.h"

namespace muster {
namespace {

TEST(TensorView, ShowsTheTensorsOwnMemory) {
  const at::Tensor tensor = at::arange(12, at::kFloat).view({3, 4});
  const auto view = view_of(tensor);
  ASSERT_TRUE(view) << view.error().to_string();
  EXPECT_EQ(view->data(), tensor.data_ptr());
  EXPECT_EQ(view->count(), 12U);
  EXPECT_EQ(view->dtype(), Dtype::kFloat32);
}

TEST(TensorView, HasTorchsNamesAndSizesForEveryDtype) {
  std::set<Dtype> known;
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    const auto dtype = dtype_of(type);
    if (!dtype) {
      EXPECT_EQ(dtype.error().code, ErrorCode::kUnsupported);
      continue;
    }
    known.insert(*dtype);
    EXPECT_EQ(size_of(*dtype), c10::elementSize(type)) << name(*dtype);
  }
  EXPECT_EQ(known.size(), static_cast<size_t>(kDtypeCount) - (MUSTER_TORCH_HAS_BCOMPLEX32 ? 0 : 1));
}

TEST(TensorView, AcceptsAnEmptyTensor) {
  const auto view = view_of(at::empty({0, 4}));
  ASSERT_TRUE(view) << view.error().to_string();
  EXPECT_EQ(view->count(), 0U);
}

TEST(TensorView, RefusesOtherTensors) {
  const at::Tensor square = at::zeros({3, 3});
  EXPECT_EQ(view_of(square.t()).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(view_of(at::Tensor()).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(view_of(square.to_sparse()).error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(view_of(at::empty({3}, at::kMeta)).error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(view_of(at::zeros({3}, at::kComplexFloat).conj()).error().code, ErrorCode::kInvalidArgument)
      << "the memory holds the numbers before conjugation";
}

}  // namespace
}  // namespace muster
