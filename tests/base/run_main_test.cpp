#include "muster/base/run_main.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace muster {
namespace {

using ::testing::HasSubstr;

class RunMain : public testing::Test {
 protected:
  RunMain() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muster-main-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    ::setenv("TORCHELASTIC_ERROR_FILE", (folder_ / "error.json").c_str(), 1);
    ::setenv("RANK", "2", 1);
  }
  ~RunMain() override {
    ::unsetenv("TORCHELASTIC_ERROR_FILE");
    ::unsetenv("RANK");
    std::filesystem::remove_all(folder_);
  }

  /// Runs the body, and returns what it printed to standard error.
  template <class Body>
  std::string errors_of(int status, Body body) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(run_main(body), status);
    return testing::internal::GetCapturedStderr();
  }
  std::string error_file() const {
    std::ifstream file(folder_ / "error.json");
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
};

TEST_F(RunMain, SuccessPrintsNothing) {
  EXPECT_EQ(errors_of(0, [] {}), "");
  EXPECT_EQ(errors_of(0, []() -> Result<> { return {}; }), "");
  EXPECT_EQ(error_file(), "");
}

TEST_F(RunMain, ErrorsAndExceptionsBecomeASentence) {
  EXPECT_EQ(errors_of(1, []() -> Result<> { return fail(ErrorCode::kTimeout, "nobody came"); }),
            "error: rank 2: timeout: nobody came\n");
  EXPECT_EQ(errors_of(1, [] { throw 3; }), "error: rank 2: an exception that is not a std::exception\n");
  EXPECT_EQ(errors_of(1, [] { throw std::runtime_error("no data in \"x\""); }), "error: rank 2: no data in \"x\"\n");
  EXPECT_THAT(error_file(), HasSubstr(R"("message":"error: rank 2: no data in \"x\"")"));
  EXPECT_THAT(error_file(), HasSubstr(R"("py_callstack":"")"));
  ::unsetenv("RANK");
  EXPECT_EQ(errors_of(1, [] { throw std::runtime_error("no data"); }), "error: no data\n");
}

TEST_F(RunMain, TheStackOfTorchGoesToTheErrorFile) {
  const auto body = [] { throw std::runtime_error("bad shape\nException raised from check at a.cpp:3\nframe #0: f"); };
  EXPECT_EQ(errors_of(1, body), "error: rank 2: bad shape\n");
  EXPECT_THAT(error_file(), HasSubstr(R"("message":"error: rank 2: bad shape")"));
  EXPECT_THAT(error_file(), HasSubstr("frame #0: f"));
}

}  // namespace
}  // namespace muster
