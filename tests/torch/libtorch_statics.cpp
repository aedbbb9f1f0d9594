#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <sstream>

#include "torch/models.h"

namespace muster::test {
namespace {

// What libtorch makes when it is first asked for it (types' names, operators' older forms, the default generator) is
// made before there are ranks, which are threads here: ThreadSanitizer does not see the guards of such values, since
// libtorch is not instrumented, and takes the second rank's look at them for a race.
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
