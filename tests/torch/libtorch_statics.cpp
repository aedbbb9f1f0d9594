#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <sstream>

#include "torch/models.h"

namespace muster::test {
namespace {

// Makes libtorch create its lazy statics (names of types, older forms of operators, the default generator) before there
// are ranks, which are threads here. libtorch is not instrumented, so ThreadSanitizer does not see the guards of these
// statics, and would report the second rank's access as a race.
class LibtorchStatics : public testing::Environment {
 public:
  void SetUp() override {
    std::stringstream file;
    torch::serialize::OutputArchive written, nested;
    make_mlp(1)->save(nested);
    nested.write("note", c10::IValue("of any kind"));
    written.write("model", nested);
    written.save_to(file);
    torch::serialize::InputArchive read;
    read.load_from(file);
    torch::serialize::InputArchive model;
    read.read("model", model);
    make_mlp(2)->load(model);
  }
};

[[maybe_unused]] const testing::Environment* const kStatics = testing::AddGlobalTestEnvironment(new LibtorchStatics);

}  // namespace
}  // namespace muster::test
