#include "muster/collective/execution.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/base/check.h"
#include "muster/collective/reduce.h"

namespace muster {

// A step waits for the steps named by `after` and `and_after` to end and for the step before it in its lane (same peer,
// same direction) to start; `waiting_for` counts these. At zero it becomes ready. Ready steps are started by one loop
// in run(): a completion that arrives while that loop is on the stack (links may complete inline) only adds to its
// queue, so there is no recursion however long the schedule is.
struct Execution::Impl : std::enable_shared_from_this<Impl> {
  struct Node {
    Link* link = nullptr;
    bool in_flight = false;
    uint8_t waiting_for = 0;
    uint32_t next_in_lane = Step::kNone;
    // The steps that wait for this one, as a list through their own nodes: by `after` and by `and_after` apart.
    uint32_t waiters[2] = {Step::kNone, Step::kNone};
    uint32_t next_waiter[2] = {Step::kNone, Step::kNone};
  };

  Impl(const Schedule& what, std::span<Link* const> over, Buffers with, MutableByteView temporary, Completion report)
      : steps(what.steps),
        buffers(std::move(with)),
        scratch(temporary.data(), temporary.size(), Dtype::kUint8),
        done(std::move(report)),
        nodes(what.steps.size()),
        unfinished(what.steps.size()) {
    MUSTER_CHECK(temporary.size() >= what.scratch_bytes, "too little scratch for the schedule");
    ready.reserve(steps.size());
    connect(over);
  }

  void connect(std::span<Link* const> links) {
    std::vector<uint32_t> last_in_lane(2 * links.size(), Step::kNone);
    for (uint32_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      wait_for(i, step.after, 0);
      wait_for(i, step.and_after, 1);
      if (step.peer == kNoRank) continue;
      MUSTER_CHECK(static_cast<size_t>(step.peer) < links.size() && links[step.peer] != nullptr,
                   "a schedule needs a link that is not there");
      nodes[i].link = links[step.peer];
      uint32_t& last = last_in_lane[2 * step.peer + (step.kind == Step::Kind::kSend ? 0 : 1)];
      if (last != Step::kNone) {
        nodes[last].next_in_lane = i;
        ++nodes[i].waiting_for;
      }
      last = i;
    }
  }

  void wait_for(uint32_t step, uint32_t other, int list) {
    if (other == Step::kNone) return;
    MUSTER_CHECK(other < step, "a step waits for a later one");
    nodes[step].next_waiter[list] = std::exchange(nodes[other].waiters[list], step);
    ++nodes[step].waiting_for;
  }

  void start() {
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (nodes[i].waiting_for == 0) ready.push_back(i);
    }
    run();
  }

  void run() {
    if (running) return;
    const std::shared_ptr<Impl> alive = shared_from_this();  // `done` may destroy the Execution
    running = true;
    while (next_ready < ready.size() && can_go_on()) begin(ready[next_ready++]);
    running = false;
    if (reported || abandoned || (!failed && unfinished > 0)) return;
    reported = true;
    std::exchange(done, nullptr)(std::move(result));
  }

  bool can_go_on() const { return !failed && !abandoned; }

  void begin(uint32_t index) {
    const Step& step = steps[index];
    if (nodes[index].next_in_lane != Step::kNone) one_less(nodes[index].next_in_lane);
    switch (step.kind) {
      case Step::Kind::kSend:
        nodes[index].link->send(stretches<ConstSegment>(step.from), launch(index));
        break;
      case Step::Kind::kReceive:
        nodes[index].link->receive(stretches<Segment>(step.to), launch(index));
        break;
      case Step::Kind::kReceiveReduce:
        nodes[index].link->receive(stretches<Segment>(step.from), launch(index));
        break;
      case Step::Kind::kCopy:
        copy(step);
        end(index);
        break;
      case Step::Kind::kReduce:
        reduce(step);
        end(index);
        break;
    }
  }

  // The completion shares ownership: a link may hold it when the Execution is gone.
  Completion launch(uint32_t index) {
    nodes[index].in_flight = true;
    return [self = shared_from_this(), index](Result<> outcome) { self->completed(index, std::move(outcome)); };
  }

  // Runs on the links' loop, perhaps inside begin().
  void completed(uint32_t index, Result<> outcome) {
    nodes[index].in_flight = false;
    if (!can_go_on()) return;
    if (outcome) {
      if (steps[index].kind == Step::Kind::kReceiveReduce) reduce(steps[index]);
      end(index);
    } else {
      failed = true;
      result = std::move(outcome);
    }
    run();
  }

  void end(uint32_t index) {
    --unfinished;
    for (int list = 0; list < 2; ++list) {
      for (uint32_t i = nodes[index].waiters[list]; i != Step::kNone; i = nodes[i].next_waiter[list]) one_less(i);
    }
  }

  void one_less(uint32_t index) {
    if (--nodes[index].waiting_for == 0) ready.push_back(index);
  }

  void copy(const Step& step) const {
    for (size_t done_bytes = 0; done_bytes < step.from.bytes;) {
      const Segment from = at(step.from, done_bytes);
      const Segment to = at(step.to, done_bytes, from.bytes);
      if (to.data != from.data) std::memcpy(to.data, from.data, to.bytes);
      done_bytes += to.bytes;
    }
  }

  void reduce(const Step& step) const {
    const Range& first = step.from_first ? step.from : step.with;
    const Range& second = step.from_first ? step.with : step.from;
    const Dtype dtype = buffers.output.dtype();
    for (size_t done_bytes = 0; done_bytes < step.to.bytes;) {
      const Segment a = at(first, done_bytes);
      const Segment b = at(second, done_bytes, a.bytes);
      const Segment to = at(step.to, done_bytes, b.bytes);
      reduce_two(to.data, a.data, b.data, to.bytes / size_of(dtype), dtype, buffers.op);
      done_bytes += to.bytes;
    }
  }

  const BufferView& place(const Range& range) const {
    if (range.place == Place::kScratch) return scratch;
    return range.place == Place::kInput ? buffers.input : buffers.output;
  }
  Segment at(const Range& range, size_t skip, size_t limit = SIZE_MAX) const {
    return place(range).at(range.offset + skip, std::min(limit, range.bytes - skip));
  }

  /// What a link sends from or receives into; valid until the next call.
  template <class LinkSegment>
  std::span<const LinkSegment> stretches(const Range& range) {
    auto& list = std::get<std::vector<LinkSegment>>(lists);
    list.clear();
    place(range).visit(range.offset, range.bytes, [&](uint8_t* data, size_t bytes) { list.push_back({data, bytes}); });
    return list;
  }

  const std::vector<Step>& steps;
  const Buffers buffers;
  const BufferView scratch;
  std::tuple<std::vector<ConstSegment>, std::vector<Segment>> lists;
  Completion done;
  std::vector<Node> nodes;
  std::vector<uint32_t> ready;  // every step enters once, in the order in which they became ready
  size_t next_ready = 0;
  size_t unfinished;
  Result<> result;
  bool running = false;
  bool failed = false;
  bool reported = false;
  bool abandoned = false;  // the Execution is gone
};

Execution::Execution(const Schedule& schedule, std::span<Link* const> links, Buffers buffers, MutableByteView scratch,
                     Completion done)
    : impl_(std::make_shared<Impl>(schedule, links, buffers, scratch, std::move(done))) {}

Execution::~Execution() { impl_->abandoned = true; }

void Execution::start() { impl_->start(); }

bool Execution::finished() const { return impl_->reported; }

std::vector<Rank> Execution::waiting_for() const {
  std::set<Rank> ranks;
  for (size_t i = 0; i < impl_->steps.size(); ++i) {
    if (impl_->nodes[i].in_flight) ranks.insert(impl_->steps[i].peer);
  }
  return {ranks.begin(), ranks.end()};
}

}  // namespace muster
