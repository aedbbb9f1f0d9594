// What muster asks an MPI library. MUSTER_MPI_LIBRARY is the one of device_mpi.cpp.
#include "muster/mpi/library.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace muster::mpi {
namespace {

using testing::ExitedWithCode;

/// Exits with 1 if the library takes memory of such a device. In a process of its own, which loads the library once.
[[noreturn]] void ask(const char* device_type, const char* library_says, const char* environment_says) {
  setenv("DEVICE_MPI_TAKES_CUDA", library_says, 1);
  setenv("MUSTER_MPI_DEVICE_MEMORY", environment_says, 1);
  const auto library = Library::get();
  std::_Exit(!library ? 2 : (*library)->takes_device_memory(device_type) ? 1 : 0);
}

TEST(MpiLibrary, SaysWhetherItTakesMemoryOfADevice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ask("cuda", "1", ""), ExitedWithCode(1), "");
  EXPECT_EXIT(ask("cuda", "0", ""), ExitedWithCode(0), "");
  EXPECT_EXIT(ask("xpu", "1", ""), ExitedWithCode(0), "") << "it was not asked for this one";
  EXPECT_EXIT(ask("cuda", "1", "0"), ExitedWithCode(0), "") << "the variable comes first";
  EXPECT_EXIT(ask("cuda", "0", "1"), ExitedWithCode(1), "");
  EXPECT_EXIT(ask("cuda", "0", "yes"), ExitedWithCode(2), "");
}

}  // namespace
}  // namespace muster::mpi
