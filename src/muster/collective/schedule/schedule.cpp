#include "muster/collective/schedule/schedule.h"

#include <fmt/format.h>

#include "muster/collective/cost/cost.h"

namespace muster {
namespace {

std::string describe(const Range& range) {
  static constexpr const char* kBuffers[] = {"input", "output", "scratch"};
  return fmt::format("{}[{}, {})", kBuffers[static_cast<int>(range.buffer)], range.offset, range.offset + range.bytes);
}

std::string combined(const Step& step) {
  return fmt::format("{} op {} -> {}", describe(step.first_operand()), describe(step.second_operand()),
                     describe(step.to));
}

std::string describe(const Step& step) {
  switch (step.kind) {
    case Step::Kind::kSend:
      return fmt::format("send {} to {}", describe(step.from), step.peer);
    case Step::Kind::kReceive:
      return fmt::format("receive {} from {}", describe(step.to), step.peer);
    case Step::Kind::kReceiveReduce:
      return fmt::format("receive {} from {}, {}", describe(step.from), step.peer, combined(step));
    case Step::Kind::kCopy:
      return fmt::format("copy {} -> {}", describe(step.from), describe(step.to));
    case Step::Kind::kReduce:
      return fmt::format("reduce {}", combined(step));
  }
  return {};
}

}  // namespace

Result<Schedule> plan(const CollectiveSpec& spec) {
  if (const Algorithm* algorithm = choose(spec)) return algorithm->schedule(spec);
  return fail(ErrorCode::kUnsupported, fmt::format("{} has no schedule over links", name(spec.collective)));
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    text += fmt::format("{}: {}", i, describe(step));
    if (step.after != Step::kNone) text += fmt::format(" after {}", step.after);
    if (step.and_after != Step::kNone) text += fmt::format(" and {}", step.and_after);
    text += '\n';
  }
  return text;
}

}  // namespace muster
