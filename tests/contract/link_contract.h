#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "muster/transport/link.h"

namespace muster {

/// Two connected links, and a driver for them. The left link belongs to rank 0, the right link to rank 1.
class LinkPair {
 public:
  virtual ~LinkPair() = default;
  /// Drives both ends until `done()`. Returns an error if that takes far too long.
  virtual Result<> run_until(const std::function<bool()>& done) = 0;
  /// Drives both ends until both are idle. False if they do not become idle, which means that a link spins.
  virtual bool settle() = 0;

  std::unique_ptr<Link> left, right;
};

/// The parameter that the test file of each implementation passes to INSTANTIATE_TEST_SUITE_P(..., LinkContract, ...).
struct LinkKind {
  std::string name;
  std::function<std::unique_ptr<LinkPair>()> make;
};
inline std::ostream& operator<<(std::ostream& out, const LinkKind& kind) { return out << kind.name; }
inline std::string kind_name(const testing::TestParamInfo<LinkKind>& info) { return info.param.name; }

class LinkContract : public testing::TestWithParam<LinkKind> {
 protected:
  void SetUp() override {
    pair_ = GetParam().make();
    ASSERT_NE(pair_, nullptr);
  }
  Link& left() { return *pair_->left; }
  Link& right() { return *pair_->right; }
  void run_until(const std::function<bool()>& done) {
    const Result<> result = pair_->run_until(done);
    ASSERT_TRUE(result) << result.error().to_string();
  }

  std::unique_ptr<LinkPair> pair_;
};

/// Records the result of an operation.
struct Outcome {
  int calls = 0;
  Result<> result;

  bool done() const { return calls > 0; }
  bool ok() const { return calls == 1 && result.has_value(); }
  Completion record() {
    return [this](Result<> ended) {
      ++calls;
      result = std::move(ended);
    };
  }
};

/// Pseudorandom bytes, so that a test detects shifted or repeated data.
std::string pattern(size_t bytes, uint64_t seed = 1);
void send_text(Link& link, std::string_view text, Completion completion);
void receive_text(Link& link, std::string& into, Completion completion);

}  // namespace muster
