#include "muster/base/error.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "muster/base/check.h"

namespace muster {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return fail(ErrorCode::kInvalidArgument, "odd", 3);
  return value / 2;
}

Result<int> quarter(int value) {
  MUSTER_ASSIGN(const int once, half(value));
  MUSTER_TRY(half(once));
  return once / 2;
}

TEST(Error, TravelsUpThroughTryAndAssign) {
  EXPECT_EQ(quarter(8), 2);
  EXPECT_EQ(quarter(3).error().message, "odd");
  EXPECT_EQ(quarter(2).error().rank, 3);
}

TEST(Error, PrintsTheMessageAfterItsContext) {
  const Error error{ErrorCode::kPeerLost, "rank 3 (host b, pid 812) closed its link", 3, {}};
  EXPECT_EQ(error.to_string(), "peer lost: rank 3 (host b, pid 812) closed its link");
  EXPECT_EQ(error.in("all_reduce #41").in("an outer layer").to_string(),
            "peer lost: rank 3 (host b, pid 812) closed its link (during all_reduce #41)");
}

TEST(Error, MapsSystemErrorsToCodes) {
  EXPECT_EQ(fail_errno(EADDRINUSE, "cannot bind").value().code, ErrorCode::kUnavailable);
  EXPECT_EQ(fail_errno(ECONNRESET, "cannot read").value().code, ErrorCode::kPeerLost);
  EXPECT_EQ(fail_errno(EMFILE, "cannot accept").value().code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(fail_errno(EACCES, "cannot bind x").value().message, "cannot bind x: Permission denied");
}

TEST(CheckDeathTest, ABrokenInvariantAbortsWithItsLineAndMessage) {
  EXPECT_DEATH(MUSTER_CHECK(1 == 2, "numbers differ"), "error_test.cpp:[0-9]+: check failed: 1 == 2: numbers differ");
}

}  // namespace
}  // namespace muster
