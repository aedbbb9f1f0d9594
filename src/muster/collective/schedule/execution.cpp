#include "muster/collective/schedule/execution.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "muster/base/check.h"
#include "muster/kernels/reduce.h"

namespace muster {

// With a call, the first send to a peer begins with the call's four words and the number of bytes that this run sends
// to the peer, in the byte order of the machine (a peer of another order would be seen as a mismatch), and the first
// receive from a peer takes them before its own bytes.
//
// A step waits for the steps named by `after` and `and_after` to end and for the step before it in its lane (same peer,
// same direction) to start; `awaited` counts these. At zero it becomes ready. Ready steps are started by one loop in
// drain_ready(): a completion that arrives while that loop is on the stack (links may complete inline) only adds to its
// queue, so there is no recursion however long the schedule is.
struct PreparedSchedule::Run {
  struct Words {
    std::array<uint64_t, 4> call{};
    uint64_t bytes = 0;
    friend bool operator==(const Words&, const Words&) = default;
  };
  static_assert(sizeof(Words) == 40, "without gaps: it is sent as it is");
  /// What is said between this rank and one peer.
  struct Talk {
    Words mine, expected, theirs;
  };

  struct Node {
    uint8_t awaits = 0;  ///< when a run begins
    uint8_t awaited = 0;
    bool in_flight = false;
    bool first_in_lane = false;
    uint32_t next_in_lane = Step::kNone;
    // The steps that wait for this one, as a list through their own nodes: by `after` and by `and_after` apart.
    uint32_t waiters[2] = {Step::kNone, Step::kNone};
    uint32_t next_waiter[2] = {Step::kNone, Step::kNone};
  };

  explicit Run(Schedule what) : schedule(std::move(what)), nodes(schedule.steps.size()) {
    ready.reserve(nodes.size());
    for (const Step& step : schedule.steps) {
      if (step.peer != kNoRank) peers.push_back(step.peer);
    }
    std::ranges::sort(peers);
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    talks.resize(peers.size());
    connect();
  }

  size_t index_of(Rank peer) const {
    return static_cast<size_t>(std::ranges::lower_bound(peers, peer) - peers.begin());
  }

  void connect() {
    std::vector<uint32_t> last_in_lane(2 * peers.size(), Step::kNone);
    for (uint32_t i = 0; i < nodes.size(); ++i) {
      const Step& step = schedule.steps[i];
      wait_for(i, step.after, 0);
      wait_for(i, step.and_after, 1);
      if (step.peer == kNoRank) continue;
      const bool sends = step.kind == Step::Kind::kSend;
      Talk& talk = talks[index_of(step.peer)];
      (sends ? talk.mine : talk.expected).bytes += (step.kind == Step::Kind::kReceive ? step.to : step.from).bytes;
      uint32_t& last = last_in_lane[2 * index_of(step.peer) + (sends ? 0 : 1)];
      nodes[i].first_in_lane = last == Step::kNone;
      if (last != Step::kNone) {
        nodes[last].next_in_lane = i;
        ++nodes[i].awaits;
      }
      last = i;
    }
  }

  void wait_for(uint32_t step, uint32_t other, int list) {
    if (other == Step::kNone) return;
    MUSTER_CHECK(other < step, "a step waits for a later one");
    nodes[step].next_waiter[list] = std::exchange(nodes[other].waiters[list], step);
    ++nodes[step].awaits;
  }

  void start() {
    for (const Rank peer : peers) {
      MUSTER_CHECK(static_cast<size_t>(peer) < links.size() && links[peer] != nullptr,
                   "a schedule needs a link that is not there");
    }
    MUSTER_CHECK(scratch.bytes() >= schedule.scratch_bytes, "too little scratch for the schedule");
    ready.clear();
    next_ready = 0;
    unfinished = nodes.size();
    failed = false;
    result = {};
    for (uint32_t i = 0; i < nodes.size(); ++i) {
      nodes[i].awaited = nodes[i].awaits;
      if (nodes[i].awaited == 0) ready.push_back(i);
    }
    drain_ready();
  }

  void introduce(const Call& call) {
    for (Talk& talk : talks) talk.mine.call = talk.expected.call = call.pack();
  }

  void drain_ready() {
    if (on_stack) return;
    on_stack = true;
    while (next_ready < ready.size() && !failed) begin(ready[next_ready++]);
    on_stack = false;
    if (!done || (!failed && unfinished > 0)) return;
    const Completion report = std::exchange(done, nullptr);
    report(std::move(result));  // may begin the next run
  }

  void begin(uint32_t index) {
    const Step& step = schedule.steps[index];
    if (nodes[index].next_in_lane != Step::kNone) release_dependency(nodes[index].next_in_lane);
    switch (step.kind) {
      case Step::Kind::kSend:
        send(index);
        break;
      case Step::Kind::kReceive:
        receive(index, step.to);
        break;
      case Step::Kind::kReceiveReduce:
        receive(index, step.from);
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

  // What completions capture fits into a std::function without an allocation.
  void send(uint32_t index) {
    const Step& step = schedule.steps[index];
    auto& list = std::get<std::vector<ConstSegment>>(lists);
    list.clear();
    if (says_call && nodes[index].first_in_lane) list.push_back({&talks[index_of(step.peer)].mine, sizeof(Words)});
    append(list, step.from);
    launch(index);
    links[step.peer]->send(list, [this, index](Result<> outcome) { completed(index, std::move(outcome)); });
  }

  void receive(uint32_t index, const Range& into) {
    Link& link = *links[schedule.steps[index].peer];
    launch(index);
    if (says_call && nodes[index].first_in_lane) {
      ++in_flight;
      const Segment words{&talks[index_of(schedule.steps[index].peer)].theirs, sizeof(Words)};
      link.receive({&words, 1}, [this, index](Result<> outcome) { introduced(index, std::move(outcome)); });
    }
    auto& list = std::get<std::vector<Segment>>(lists);
    list.clear();
    append(list, into);
    link.receive(list, [this, index](Result<> outcome) { completed(index, std::move(outcome)); });
  }

  void launch(uint32_t index) {
    nodes[index].in_flight = true;
    ++in_flight;
  }

  // These run on the links' loop, perhaps inside begin().
  void introduced(uint32_t index, Result<> outcome) {
    --in_flight;
    const Talk& talk = talks[index_of(schedule.steps[index].peer)];
    if (failed || !outcome || talk.theirs == talk.expected) return;  // a broken link will say so to the step itself
    const Rank peer = links[schedule.steps[index].peer]->peer().rank;
    fail_with(Error{ErrorCode::kMismatch, difference(peer, talk), peer, {}});
  }

  static std::string difference(Rank peer, const Talk& talk) {
    const Call mine = Call::unpack(talk.mine.call), theirs = Call::unpack(talk.theirs.call);
    if (talk.theirs.call != talk.mine.call) {
      return fmt::format(
          "rank {} called {} where this rank called {}; all ranks must make the same calls in the same "
          "order",
          peer, theirs.to_string(), mine.to_string());
    }
    const size_t element = size_of(mine.dtype);
    return fmt::format("rank {} sends {} elements to this rank, which expects {} from it", peer,
                       talk.theirs.bytes / element, talk.expected.bytes / element);
  }

  void completed(uint32_t index, Result<> outcome) {
    nodes[index].in_flight = false;
    --in_flight;
    if (failed) return;
    if (!outcome) return fail_with(std::move(outcome.error()));
    if (schedule.steps[index].kind == Step::Kind::kReceiveReduce) reduce(schedule.steps[index]);
    end(index);
    drain_ready();
  }

  void fail_with(Error error) {
    failed = true;
    result = tl::unexpected(std::move(error));
    drain_ready();
  }

  void end(uint32_t index) {
    --unfinished;
    for (int list = 0; list < 2; ++list) {
      for (uint32_t i = nodes[index].waiters[list]; i != Step::kNone; i = nodes[i].next_waiter[list])
        release_dependency(i);
    }
  }

  void release_dependency(uint32_t index) {
    if (--nodes[index].awaited == 0) ready.push_back(index);
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
    const Dtype dtype = buffers.input.dtype();
    for (size_t done_bytes = 0; done_bytes < step.to.bytes;) {
      const Segment a = at(first, done_bytes);
      const Segment b = at(second, done_bytes, a.bytes);
      const Segment to = at(step.to, done_bytes, b.bytes);
      reduce_two(to.data, a.data, b.data, to.bytes / size_of(dtype), dtype, buffers.op);
      done_bytes += to.bytes;
    }
  }

  const BufferView& place(const Range& range) const {
    if (range.place == BufferKind::kScratch) return scratch;
    return range.place == BufferKind::kInput ? buffers.input : buffers.output;
  }
  Segment at(const Range& range, size_t skip, size_t limit = SIZE_MAX) const {
    return place(range).at(range.offset + skip, std::min(limit, range.bytes - skip));
  }
  template <class LinkSegment>
  void append(std::vector<LinkSegment>& list, const Range& range) const {
    place(range).visit(range.offset, range.bytes, [&](uint8_t* data, size_t bytes) { list.push_back({data, bytes}); });
  }

  const Schedule schedule;
  std::vector<Rank> peers;
  std::vector<Node> nodes;
  std::vector<uint32_t> ready;  ///< every step enters once a run, in the order in which they became ready
  size_t next_ready = 0;
  size_t unfinished = 0;
  size_t in_flight = 0;  ///< completions that links owe
  bool on_stack = false;
  bool failed = false;

  // Of this run.
  std::span<Link* const> links;
  Buffers buffers;
  BufferView scratch;
  bool says_call = false;
  std::vector<Talk> talks;  ///< by index in `peers`
  Completion done;
  Result<> result;
  std::tuple<std::vector<ConstSegment>, std::vector<Segment>> lists;  ///< what a link is told; it keeps its own copy
};

PreparedSchedule::PreparedSchedule(Schedule schedule) : run_(std::make_unique<Run>(std::move(schedule))) {}
PreparedSchedule::~PreparedSchedule() = default;
PreparedSchedule::PreparedSchedule(PreparedSchedule&&) noexcept = default;
PreparedSchedule& PreparedSchedule::operator=(PreparedSchedule&&) noexcept = default;

const Schedule& PreparedSchedule::schedule() const { return run_->schedule; }
const std::vector<Rank>& PreparedSchedule::peers() const { return run_->peers; }
bool PreparedSchedule::running() const { return run_->done != nullptr; }

void PreparedSchedule::start(std::span<Link* const> links, Buffers buffers, MutableByteView scratch, Completion done,
                             const Call* call) {
  Run& run = *run_;
  MUSTER_CHECK(!running() && run.in_flight == 0, "one run at a time");
  run.links = links;
  run.buffers = std::move(buffers);
  run.scratch = BufferView(scratch.data(), scratch.size(), Dtype::kUint8);
  run.done = std::move(done);
  run.says_call = call != nullptr;
  if (call != nullptr) run.introduce(*call);
  run.start();
}

std::vector<Rank> PreparedSchedule::waiting_for() const {
  std::vector<Rank> ranks;
  for (size_t i = 0; i < run_->nodes.size(); ++i) {
    if (run_->nodes[i].in_flight) ranks.push_back(run_->schedule.steps[i].peer);
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace muster
