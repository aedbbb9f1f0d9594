#include "muster/collective/schedule/execution.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "muster/base/check.h"
#include "muster/collective/schedule/dependency_graph.h"
#include "muster/kernels/reduce.h"

namespace muster {

// With a call, the first send to a peer begins with a header: the call's four words and the number of bytes that this
// run sends to the peer, in the byte order of the machine (a peer of another order would be seen as a mismatch). The
// first receive from a peer takes the header before its own bytes.
//
// A step becomes ready when the dependency graph says so. One loop in drain_ready() starts the ready steps. A
// completion that arrives while this loop is on the stack (links may complete inline) only adds steps to the queue of
// this loop. So there is no recursion, however long the schedule is.
//
// All state of a run is in one object, which the next run of the same schedule uses again, so a run allocates nothing.
struct PreparedSchedule::Run {
  struct CallHeader {
    std::array<uint64_t, 4> call{};
    uint64_t bytes = 0;
    friend bool operator==(const CallHeader&, const CallHeader&) = default;
  };
  static_assert(sizeof(CallHeader) == 40, "without gaps: it is sent as it is");
  /// The headers between this rank and one peer.
  struct HeaderExchange {
    CallHeader mine, expected, theirs;
  };

  explicit Run(Schedule what) : schedule(std::move(what)), graph(schedule.steps) {
    ready.reserve(schedule.steps.size());
    for (const Step& step : schedule.steps) {
      if (step.peer != kNoRank) peers.push_back(step.peer);
    }
    std::ranges::sort(peers);
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    headers.resize(peers.size());
    for (const Step& step : schedule.steps) {
      if (step.peer == kNoRank) continue;
      HeaderExchange& exchange = headers_with(step.peer);
      (step.receives() ? exchange.expected : exchange.mine).bytes += step.on_link().bytes;
    }
  }

  HeaderExchange& headers_with(Rank peer) {
    return headers[static_cast<size_t>(std::ranges::lower_bound(peers, peer) - peers.begin())];
  }

  auto add_ready() {
    return [this](uint32_t step) { ready.push_back(step); };
  }

  void start() {
    for (const Rank peer : peers) {
      MUSTER_CHECK(static_cast<size_t>(peer) < links.size() && links[peer] != nullptr,
                   "a schedule needs a link that is not there");
    }
    MUSTER_CHECK(scratch.bytes() >= schedule.scratch_bytes, "too little scratch for the schedule");
    ready.clear();
    next_ready = 0;
    unfinished = schedule.steps.size();
    failed = false;
    result = {};
    graph.begin_run(add_ready());
    drain_ready();
  }

  void set_call(const Call& call) {
    for (HeaderExchange& exchange : headers) exchange.mine.call = exchange.expected.call = call.pack();
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
    graph.on_started(index, add_ready());
    switch (step.kind) {
      case Step::Kind::kSend:
        return send(index);
      case Step::Kind::kReceive:
      case Step::Kind::kReceiveReduce:
        return receive(index);
      case Step::Kind::kCopy:
        copy(step);
        break;
      case Step::Kind::kReduce:
        reduce(step);
    }
    end(index);
  }

  // The completions capture so little that std::function does not allocate.
  void send(uint32_t index) {
    const Step& step = schedule.steps[index];
    auto& list = std::get<std::vector<ConstSegment>>(lists);
    list.clear();
    if (sends_headers && graph.is_first_with_peer(index)) {
      list.push_back({&headers_with(step.peer).mine, sizeof(CallHeader)});
    }
    append(list, step.from);
    ++in_flight;
    links[step.peer]->send(list, [this, index](Result<> outcome) { completed(index, std::move(outcome)); });
  }

  void receive(uint32_t index) {
    const Step& step = schedule.steps[index];
    Link& link = *links[step.peer];
    ++in_flight;
    if (sends_headers && graph.is_first_with_peer(index)) {
      ++in_flight;
      const Segment header{&headers_with(step.peer).theirs, sizeof(CallHeader)};
      link.receive({&header, 1}, [this, index](Result<> outcome) { header_received(index, std::move(outcome)); });
    }
    auto& list = std::get<std::vector<Segment>>(lists);
    list.clear();
    append(list, step.on_link());
    link.receive(list, [this, index](Result<> outcome) { completed(index, std::move(outcome)); });
  }

  // These completions run on the links' loop, perhaps inside begin().
  void header_received(uint32_t index, Result<> outcome) {
    --in_flight;
    const HeaderExchange& exchange = headers_with(schedule.steps[index].peer);
    // The completion of the step itself reports a broken link.
    if (failed || !outcome || exchange.theirs == exchange.expected) return;
    const Rank peer = links[schedule.steps[index].peer]->peer().rank;
    fail_with(Error{ErrorCode::kMismatch, difference(peer, exchange), peer, {}});
  }

  static std::string difference(Rank peer, const HeaderExchange& exchange) {
    const Call mine = Call::unpack(exchange.mine.call), theirs = Call::unpack(exchange.theirs.call);
    if (exchange.theirs.call != exchange.mine.call) {
      return fmt::format(
          "rank {} called {} where this rank called {}; all ranks must make the same calls in the same "
          "order",
          peer, theirs.to_string(), mine.to_string());
    }
    const size_t element = size_of(mine.dtype);
    return fmt::format("rank {} sends {} elements to this rank, which expects {} from it", peer,
                       exchange.theirs.bytes / element, exchange.expected.bytes / element);
  }

  void completed(uint32_t index, Result<> outcome) {
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
    graph.on_ended(index, add_ready());
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
    const Dtype dtype = buffers.input.dtype();
    for (size_t done_bytes = 0; done_bytes < step.to.bytes;) {
      const Segment a = at(step.first_operand(), done_bytes);
      const Segment b = at(step.second_operand(), done_bytes, a.bytes);
      const Segment to = at(step.to, done_bytes, b.bytes);
      reduce_two(to.data, a.data, b.data, to.bytes / size_of(dtype), dtype, buffers.op);
      done_bytes += to.bytes;
    }
  }

  const BufferView& buffer_of(const Range& range) const {
    if (range.buffer == BufferKind::kScratch) return scratch;
    return range.buffer == BufferKind::kInput ? buffers.input : buffers.output;
  }
  Segment at(const Range& range, size_t skip, size_t limit = SIZE_MAX) const {
    return buffer_of(range).at(range.offset + skip, std::min(limit, range.bytes - skip));
  }
  template <class LinkSegment>
  void append(std::vector<LinkSegment>& list, const Range& range) const {
    buffer_of(range).visit(range.offset, range.bytes, [&](uint8_t* data, size_t bytes) {
      list.push_back({data, bytes});
    });
  }

  const Schedule schedule;
  DependencyGraph graph;
  std::vector<Rank> peers;
  std::vector<uint32_t> ready;  ///< each step is added once per run, when it becomes ready
  size_t next_ready = 0;
  size_t unfinished = 0;
  size_t in_flight = 0;  ///< completions that links have not called yet
  bool on_stack = false;
  bool failed = false;

  // The state of the current run.
  std::span<Link* const> links;
  Buffers buffers;
  BufferView scratch;
  bool sends_headers = false;
  std::vector<HeaderExchange> headers;  ///< by index in `peers`
  Completion done;
  Result<> result;
  std::tuple<std::vector<ConstSegment>, std::vector<Segment>> lists;  ///< arguments for a link, which copies them
};

PreparedSchedule::PreparedSchedule(Schedule schedule) : run_(std::make_unique<Run>(std::move(schedule))) {}
PreparedSchedule::~PreparedSchedule() = default;
PreparedSchedule::PreparedSchedule(PreparedSchedule&&) noexcept = default;
PreparedSchedule& PreparedSchedule::operator=(PreparedSchedule&&) noexcept = default;

const Schedule& PreparedSchedule::schedule() const { return run_->schedule; }
const std::vector<Rank>& PreparedSchedule::peers() const { return run_->peers; }
bool PreparedSchedule::running() const { return run_->done != nullptr; }
bool PreparedSchedule::all_begun() const { return run_->next_ready == run_->schedule.steps.size(); }

void PreparedSchedule::start(std::span<Link* const> links, Buffers buffers, MutableByteView scratch, Completion done,
                             const Call* call) {
  Run& run = *run_;
  MUSTER_CHECK(!running() && run.in_flight == 0, "one run at a time");
  run.links = links;
  run.buffers = std::move(buffers);
  run.scratch = BufferView(scratch.data(), scratch.size(), Dtype::kUint8);
  run.done = std::move(done);
  run.sends_headers = call != nullptr;
  if (call != nullptr) run.set_call(*call);
  run.start();
}

std::vector<Rank> PreparedSchedule::waiting_for() const {
  std::vector<Rank> ranks;
  for (uint32_t i = 0; i < run_->schedule.steps.size(); ++i) {
    if (run_->graph.is_running(i)) ranks.push_back(run_->schedule.steps[i].peer);
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace muster
