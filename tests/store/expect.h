#pragma once

#include <gtest/gtest.h>

#include <string>

#include "muster/base/error.h"

namespace muster {

template <class T>
void expect_error(const Result<T>& result, ErrorCode code, const std::string& mentions = "") {
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, code) << result.error().to_string();
  EXPECT_NE(result.error().message.find(mentions), std::string::npos) << result.error().to_string();
}

#define EXPECT_OK(expression)                                                          \
  do {                                                                                 \
    const auto expect_ok_result = (expression);                                        \
    EXPECT_TRUE(expect_ok_result.has_value()) << expect_ok_result.error().to_string(); \
  } while (false)

}  // namespace muster
