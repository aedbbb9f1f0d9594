#include "muster/torch/reducer/failure_agreement.h"

#include <c10/util/StringUtil.h>

#include <vector>

#include "muster/torch/exception.h"

namespace muster {

struct FailureAgreement::Points {
  FailurePoint here;
  std::vector<FailurePoint> all;
};

namespace {

/// An all-gather of a dtype and length that no other caller has, so that it never meets another call by chance.
template <class Points>
Work begin(Group& group, const std::shared_ptr<Points>& points) {
  constexpr Dtype kBytes = Dtype::kBits8;
  const Work work =
      group.all_gather({&points->here, sizeof(FailurePoint), kBytes},
                       {points->all.data(), points->all.size() * sizeof(FailurePoint), kBytes}, {.async = true});
  work.on_done([points](const Result<>&) {});  // keeps the memory
  return work;
}

std::string text_of(Rank rank, const FailurePoint& point) {
  return c10::str("rank ", rank, " with ", point.buckets_begun, " buckets begun in step ", point.step + 1);
}

}  // namespace

FailureAgreement::FailureAgreement(Group& group, FailurePoint here)
    : points_(std::make_shared<Points>(Points{here, std::vector<FailurePoint>(group.membership().size)})),
      work_(begin(group, points_)) {}

void FailureAgreement::confirm(Group& group) const {
  if (const Result<> result = work_.wait(); !result) {
    Error error = result.error();
    if (error.code == ErrorCode::kMismatch) {
      error.message = "an earlier backward failed at this rank, and the others went on without it: " + error.message;
    }
    throw_error(error);
  }
  for (Rank rank = 0; rank < group.membership().size; ++rank) {
    const FailurePoint& there = points_->all[rank];
    if (there == points_->here) continue;
    const Error error{ErrorCode::kMismatch,
                      c10::str("the ranks failed in an earlier backward at different points: ", text_of(rank, there),
                               ", ", text_of(group.membership().rank, points_->here)),
                      rank};
    group.abort(error);
    throw_error(error);
  }
}

}  // namespace muster
