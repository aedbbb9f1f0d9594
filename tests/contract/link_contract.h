#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "muster/transport/link.h"

namespace muster {

/// Two connected ends and whatever drives them. The left end belongs to rank 0, the right one to rank 1.
class LinkPair {
 public:
  virtual ~LinkPair() = default;
  /// Drives both ends until `done()`, or for long enough that nobody would wait longer.
  virtual Result<> run_until(const std::function<bool()>& done) = 0;
  /// Drives both ends until nothing happens any more; false when that does not come, which is a spinning link.
  virtual bool settle() = 0;

  std::unique_ptr<Link> left, right;
};

/// What a file per implementation hands to INSTANTIATE_TEST_SUITE_P(..., LinkContract, ...).
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

/// Remembers how an operation ended.
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

/// Bytes that differ from place to place, so that a shift or a repeat shows.
std::string pattern(size_t bytes, uint64_t seed = 1);
void send_text(Link& link, std::string_view text, Completion completion);
void receive_text(Link& link, std::string& into, Completion completion);

}  // namespace muster
