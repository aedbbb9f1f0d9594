#include "muster/torch/reducer/failure_agreement.h"

#include <c10/util/StringUtil.h>

#include <vector>

#include "muster/torch/exception.h"

namespace muster {

namespace {

std::string text_of(Rank rank, const FailurePoint& point) {
  return c10::str("rank ", rank, " with ", point.buckets_begun, " buckets begun in step ", point.step + 1);
}

}  // namespace

FailureAgreement::FailureAgreement(Group& group, FailurePoint here)
    : points_(std::make_shared<std::vector<FailurePoint>>(group.membership().size)) {
  (*points_)[group.membership().rank] = here;
  // No other caller uses this dtype with this length, so another call cannot match the exchange by chance.
  constexpr Dtype kBytes = Dtype::kBits8;
  FailurePoint* const own = &(*points_)[group.membership().rank];
  work_ = group.all_gather({own, sizeof here, kBytes}, {points_->data(), points_->size() * sizeof here, kBytes},
                           {.async = true});
  work_->on_done([points = points_](const Result<>&) {});  // keeps the memory until the operation ends
}

void FailureAgreement::confirm(Group& group) const {
  if (const Result<> result = work_->wait(); !result) {
    Error error = result.error();
    if (error.code == ErrorCode::kMismatch) {
      error.message = "an earlier backward failed at this rank, and the others went on without it: " + error.message;
    }
    throw_error(error);
  }
  const FailurePoint& here = (*points_)[group.membership().rank];
  for (Rank rank = 0; rank < group.membership().size; ++rank) {
    const FailurePoint& there = (*points_)[rank];
    if (there == here) continue;
    const Error error{ErrorCode::kMismatch,
                      c10::str("the ranks failed in an earlier backward at different points: ", text_of(rank, there),
                               ", ", text_of(group.membership().rank, here)),
                      rank};
    group.abort(error);
    throw_error(error);
  }
}

}  // namespace muster
