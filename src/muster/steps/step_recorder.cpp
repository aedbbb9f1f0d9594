#include "muster/steps/step_recorder.h"

#include <algorithm>

namespace muster {
namespace {

constexpr size_t kSpans = 1024;

}  // namespace

StepRecorder::StepRecorder(const GroupSpec& membership)
    : spans_(Recorder::create(membership, Recorder::entries_from_environment() == 0 ? 0 : kSpans)) {}

void StepRecorder::set_plan(const std::vector<std::string>& names, const std::vector<std::vector<size_t>>& plan) {
  if (!spans_) return;
  plan_ = plan;
  texts_.clear();
  for (const auto& parameters : plan) {
    std::string text;
    for (const size_t index : parameters) {
      const bool named = index < names.size() && !names[index].empty();
      text += (named ? names[index] : std::to_string(index)) + '\n';
    }
    const auto [known, fresh] = known_.try_emplace(text, 0);
    if (fresh) known->second = spans_->keep_text(text);
    texts_.push_back(known->second);
  }
}

void StepRecorder::name_parameters(Span& span, size_t last_parameter) const {
  if (span.bucket >= plan_.size()) return;
  const auto& parameters = plan_[span.bucket];
  span.names = texts_[span.bucket];
  span.last =
      static_cast<uint32_t>(std::find(parameters.begin(), parameters.end(), last_parameter) - parameters.begin());
}

void StepRecorder::add(const BackwardTimes& times, const std::vector<size_t>& bytes) {
  history_.add(times.forward, times.backward, times.last_gradient, times.ended);
  if (!spans_) return;
  const auto record = [&](Span::Kind kind, TimePoint begin, TimePoint end) {
    spans_->record({.kind = kind, .step = times.iteration, .begin = begin, .end = end});
  };
  if (times.forward.ns != 0) record(Span::Kind::kForward, times.forward, times.backward);
  record(Span::Kind::kBackward, times.backward, times.last_gradient);
  record(Span::Kind::kWaiting, times.last_gradient, times.ended);
  TimePoint free;
  for (size_t i = 0; i < times.buckets.size(); ++i) {
    const BucketTimes& bucket = times.buckets[i];
    if (bucket.begun.ns == 0) continue;  // not reduced: a single rank, or no rank used its parameters
    Span span{.kind = Span::Kind::kBucket,
              .step = times.iteration,
              .bucket = static_cast<uint32_t>(i),
              .bytes = i < bytes.size() ? bytes[i] : 0,
              .end = bucket.ended,
              .started = started(bucket, free)};
    // A bucket of unused parameters has no gradients.
    span.full = bucket.ready.ns != 0 ? bucket.ready : span.started;
    span.begin = bucket.first_ready.ns != 0 ? bucket.first_ready : span.full;
    free = std::max(free, span.end);
    name_parameters(span, bucket.last_parameter);
    spans_->record(span);
  }
}

}  // namespace muster
