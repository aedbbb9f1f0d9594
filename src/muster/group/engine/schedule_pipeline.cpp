#include "muster/group/engine/schedule_pipeline.h"

#include <algorithm>
#include <limits>

namespace muster {
namespace {

/// The addresses between the first and the last byte of a buffer.
struct AddressRange {
  explicit AddressRange(const BufferView& buffer) {
    buffer.visit(0, buffer.bytes(), [this](const uint8_t* data, size_t bytes) {
      const auto address = reinterpret_cast<uintptr_t>(data);
      begin = std::min(begin, address);
      end = std::max(end, address + bytes);
    });
  }
  bool overlaps(const AddressRange& other) const { return begin < other.end && other.begin < end; }

  uintptr_t begin = std::numeric_limits<uintptr_t>::max(), end = 0;
};

/// True if `next` reads what `current` writes, or writes what it reads or writes.
bool depends_on(const Operation& next, const Operation& current) {
  const AddressRange input(next.input), output(next.output), before(current.input), written(current.output);
  return written.overlaps(input) || written.overlaps(output) || before.overlaps(output);
}

}  // namespace

bool SchedulePipeline::resume(const Operation& operation) {
  if (early_ == 0 || early_ != operation.call.sequence) return false;
  early_ = 0;
  turn_ = 1 - turn_;
  return true;
}

/// A barrier says that the operations before it have ended at all ranks, and those after it have not begun.
void SchedulePipeline::begin_early(const Operation& next, const Operation& current, Rank self,
                                   std::span<Link* const> links) {
  if (next.call.sequence == considered_) return;
  considered_ = next.call.sequence;
  const auto is_barrier = [](const Operation& each) { return each.call.collective == Collective::kBarrier; };
  if (next.staging != nullptr || is_barrier(next) || is_barrier(current) || depends_on(next, current)) return;
  ScheduleRunner& other = runners_[1 - turn_];
  if (!other.plan(next, self, static_cast<int>(links.size()))) return;
  if (std::ranges::any_of(other.peers(), [&](Rank peer) { return links[peer] == nullptr; })) return;
  early_ = next.call.sequence;
  other.begin(next, links);
}

}  // namespace muster
