#include "sim/start_up.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace muster {
namespace {

constexpr ClientId kFirstClient = 1;
constexpr const char* kSteps[] = {"registration", "publication of its address", "reading of its peers' addresses",
                                  "all-gather",   "reading of the table",       "barrier"};

int64_t number_in(const Bytes& text) {
  int64_t number = -1;
  std::from_chars(reinterpret_cast<const char*>(text.data()), reinterpret_cast<const char*>(text.data() + text.size()),
                  number);
  return number;
}

}  // namespace

StartUp::StartUp(Options options, uint64_t seed)
    : options_(std::move(options)),
      tiers_(options_.tiers, seed, [this](int node, const Reply& reply) { on_reply(node, reply); }) {
  const int nodes = options_.tiers.nodes;
  for (int node = nodes > 1 ? 1 : 0; node < nodes; ++node) {
    for (int i = 0; i < options_.workers_per_node; ++i) {
      Worker worker;
      worker.node = node;
      worker.client = kFirstClient + static_cast<ClientId>(i);
      workers_.push_back(worker);
    }
  }
  rank_taken_.resize(workers_.size());
  for (size_t i = 0; i < workers_.size(); ++i) {
    tiers_.time().after(Duration(tiers_.random().below(20'000'000)), [this, i] { begin(i); });
  }
}

Result<> StartUp::run() {
  // The time for all steps of a worker, with one step per level of the tree, and for the grace period of a proxy's
  // link.
  const TimePoint deadline = tiers_.time().now() + (options_.step_timeout * (6 + levels()) + 2 * options_.tiers.grace);
  const auto alive = [this](const Worker& worker) { return !tiers_.crashed(worker.node); };
  while (true) {
    // The loop does not wait for the workers of a crashed node.
    for (int steps = 0; steps < 10'000 && ended_ < workers(); ++steps) tiers_.time().step();
    if (!broken_.empty()) return fail(ErrorCode::kMismatch, broken_);
    const bool over = std::all_of(workers_.begin(), workers_.end(),
                                  [&](const Worker& worker) { return worker.step == Step::kDone || !alive(worker); });
    if (over) break;
    if (tiers_.time().now() > deadline) {
      return fail(ErrorCode::kTimeout, fmt::format("{} of {} workers hang", workers() - ended_, workers()));
    }
  }
  took_ = tiers_.time().now() - TimePoint{};
  return {};
}

// ---- what a worker does

Key StartUp::address_key(int rank) const { return fmt::format("address/{}", rank); }
Bytes StartUp::address_of(int rank) const { return to_bytes(fmt::format("10.0.0.{}:{}", rank / 8, rank)); }

std::vector<int> StartUp::peers_of(int rank) const {
  std::vector<int> peers;
  for (int distance = 1; distance < workers(); distance *= 2) peers.push_back((rank + distance) % workers());
  return peers;
}

// Level 0 is the workers themselves. A leader of level l represents tree_fanout^l workers.
bool StartUp::leads(int rank, int level) const {
  for (; level > 0; --level) {
    if (rank % options_.tree_fanout != 0) return false;
    rank /= options_.tree_fanout;
  }
  return true;
}

int StartUp::levels() const {
  int levels = 0;
  for (int64_t covered = 1; covered < std::ssize(workers_); covered *= options_.tree_fanout) ++levels;
  return levels;
}

void StartUp::begin(size_t index) { ask(index, {StoreOperation::kAdd, 0, {"joined"}, {}, 1}); }

void StartUp::ask(size_t index, Request request) {
  Worker& worker = workers_[index];
  const RequestId id = request.id = ++worker.request;
  tiers_.time().after(options_.step_timeout, [this, index, id] {
    Worker& late = workers_[index];
    if (late.request != id || late.step == Step::kDone || tiers_.crashed(late.node)) return;
    tiers_.submit(late.node, late.client, {StoreOperation::kCancel, id});
    end(late, fail(ErrorCode::kTimeout,
                   fmt::format("worker {}'s {} had no answer", index, kSteps[static_cast<size_t>(late.step)])));
  });
  tiers_.submit(worker.node, worker.client, std::move(request));
}

void StartUp::on_reply(int node, const Reply& reply) {
  const int first_node = options_.tiers.nodes > 1 ? 1 : 0;
  const auto index =
      static_cast<size_t>((node - first_node) * options_.workers_per_node) + (reply.client - kFirstClient);
  Worker& worker = workers_[index];
  if (worker.step == Step::kDone) return;  // the worker gave up
  if (reply.id != worker.request) return broke(fmt::format("worker {} was answered twice", index));
  if (!reply.status) return end(worker, reply.status);
  advance(index, reply);
}

void StartUp::advance(size_t index, const Reply& reply) {
  Worker& worker = workers_[index];
  switch (worker.step) {
    case Step::kRegister:
      worker.rank = static_cast<int>(reply.number) - 1;
      if (worker.rank < 0 || worker.rank >= workers() || rank_taken_[static_cast<size_t>(worker.rank)]) {
        return broke(fmt::format("worker {} got the sum {}, as another did", index, reply.number));
      }
      rank_taken_[static_cast<size_t>(worker.rank)] = true;
      worker.step = Step::kPublish;
      return ask(index, {StoreOperation::kSet, 0, {address_key(worker.rank)}, {address_of(worker.rank)}});
    case Step::kPublish: {
      worker.step = Step::kPeers;
      Request request{StoreOperation::kMultiGet};
      for (const int peer : peers_of(worker.rank)) request.keys.push_back(address_key(peer));
      return ask(index, std::move(request));
    }
    case Step::kPeers: {
      const auto peers = peers_of(worker.rank);
      for (size_t i = 0; i < peers.size(); ++i) {
        if (reply.values.at(i) != address_of(peers[i])) return broke("an address is not what was published");
      }
      worker.step = Step::kGather;
      return gather(index, reply);
    }
    case Step::kGather:
      return gather(index, reply);
    case Step::kTable:
      if (reply.values.at(0) != to_bytes(std::to_string(workers()))) return broke("the all-gather lost a worker");
      worker.step = Step::kBarrier;
      ++at_barrier_;
      return ask(index, {StoreOperation::kBarrier, 0, {"ready"}, {}, workers()});
    case Step::kBarrier:
      if (at_barrier_ < workers()) return broke("the barrier released a worker before it was full");
      return end(worker, {});
    case Step::kDone:
      return;
  }
}

// A leader waits for the counts of its children and writes their sum. A worker that leads no further level goes on to
// read the table. The values are short, because only the order of the messages is tested.
void StartUp::gather(size_t index, const Reply& reply) {
  Worker& worker = workers_[index];
  if (leads(worker.rank, worker.level + 1) && worker.level < levels()) {
    if (!worker.wrote) {
      worker.wrote = true;
      return ask(index, gather_request(worker));
    }
    worker.wrote = false;
    ++worker.level;
    int64_t count = worker.level == 1 ? std::ssize(reply.values) : 0;
    for (const Bytes& value : reply.values) count += worker.level == 1 ? 0 : number_in(value);
    const Key key = worker.level == levels() ? "table" : fmt::format("tree/{}/{}", int{worker.level}, worker.rank);
    return ask(index, {StoreOperation::kSet, 0, {key}, {to_bytes(std::to_string(count))}});
  }
  worker.step = Step::kTable;
  ask(index, {StoreOperation::kGet, 0, {"table"}});
}

Request StartUp::gather_request(const Worker& worker) const {
  Request request{StoreOperation::kMultiGet};
  int64_t stride = 1;
  for (int i = 0; i < worker.level; ++i) stride *= options_.tree_fanout;
  for (int i = 0; i < options_.tree_fanout; ++i) {
    const int64_t child = worker.rank + i * stride;
    if (child >= workers()) break;
    request.keys.push_back(worker.level == 0 ? address_key(static_cast<int>(child))
                                             : fmt::format("tree/{}/{}", int{worker.level}, child));
  }
  return request;
}

void StartUp::end(Worker& worker, const Result<>& how) {
  worker.step = Step::kDone;
  ++ended_;
  succeeded_ += how.has_value();
  if (how) return;
  auto& [count, message] = failures_[how.error().code];
  ++count;
  message = how.error().message;
}

void StartUp::broke(const std::string& what) {
  if (broken_.empty()) broken_ = what;
}

}  // namespace muster
