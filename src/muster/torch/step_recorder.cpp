#include "muster/torch/step_recorder.h"

namespace muster {
namespace {

constexpr size_t kSpans = 1024;

}  // namespace

StepRecorder::StepRecorder(const Membership& membership)
    : spans_(Recorder::create(membership, Recorder::entries_from_environment() == 0 ? 0 : kSpans)) {}

void StepRecorder::add(const BackwardTimes& times, const std::vector<size_t>& bytes) {
  history_.add(times.forward, times.backward, times.waited, times.ended);
  if (!spans_) return;
  const auto record = [&](Span::Kind kind, TimePoint begin, TimePoint end) {
    Span span;
    span.kind = kind;
    span.step = times.iteration;
    span.begin = begin;
    span.end = end;
    spans_->record(span);
  };
  if (times.forward.ns != 0) record(Span::Kind::kForward, times.forward, times.backward);
  record(Span::Kind::kBackward, times.backward, times.waited);
  record(Span::Kind::kWaiting, times.waited, times.ended);
  TimePoint free;
  for (size_t i = 0; i < times.buckets.size(); ++i) {
    const BucketTimes& bucket = times.buckets[i];
    if (bucket.begun.ns == 0) continue;  // nothing was reduced: there is one rank, or nobody used its parameters
    Span span;
    span.kind = Span::Kind::kBucket;
    span.step = times.iteration;
    span.bucket = static_cast<uint32_t>(i);
    span.bytes = i < bytes.size() ? bytes[i] : 0;
    span.end = bucket.ended;
    span.started = started(bucket, free);
    // One whose parameters were not used had no gradients.
    span.full = bucket.ready.ns != 0 ? bucket.ready : span.started;
    span.begin = bucket.first_ready.ns != 0 ? bucket.first_ready : span.full;
    free = std::max(free, span.end);
    spans_->record(span);
  }
}

}  // namespace muster
