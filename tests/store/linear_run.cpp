#include "store/linear_run.h"

#include <cstdlib>
#include <set>
#include <thread>

#include "store/random_requests.h"

namespace muster {
namespace {

constexpr Duration kDefaultTimeout = 60s;  // the timeout of requests that need not wait

// Makes one call and records the result. False if the client is lost.
bool record(RecordedClient& client, Call call, Duration timeout, History& history) {
  call.request = client.adapt(std::move(call.request));
  const Deadline deadline = Deadline::after(may_wait(call.request) ? timeout : kDefaultTimeout);
  call.invoked = steady_clock().now();
  CallOutcome learned = client.call(call.request, deadline);
  call.returned = steady_clock().now();
  if (learned.what == CallOutcome::What::kAnswer) call.reply = std::move(learned.reply);
  if (learned.what != CallOutcome::What::kNothing) history.push_back(std::move(call));
  return !learned.lost;
}

void play(const LinearRun& run, int number, History& history) {
  RandomRequests requests(run.seed, number, run.barriers, run.wide);
  std::unique_ptr<RecordedClient> client;
  for (int i = 0; i < run.calls; ++i) {
    if (!client) client = run.open(number);
    if (!client) return;
    Call call{number, requests.next()};
    if (run.die && requests.random().chance(0.02)) {
      call.invoked = steady_clock().now();
      run.die(call.request);
      history.push_back(std::move(call));
    } else if (!record(*client, std::move(call), requests.wait_timeout(), history)) {
      client.reset();
    }
  }
}

// Reads every key once more, and empties the queues. This shows whether calls without an answer took effect.
void read_final_state(const LinearRun& run, History& history) {
  const auto client = run.open(run.clients);
  if (!client) return;
  const auto ask = [&](StoreOperation operation, const Key& key, Duration timeout) {
    return record(*client, {run.clients, {operation, 0, {key}}}, timeout, history) && history.back().reply;
  };
  std::set<Key> keys;
  for (const Call& call : history) keys.insert(call.request.keys.begin(), call.request.keys.end());
  for (const Key& key : keys) {
    const char kind = key[key.find('/') + 1];
    if (kind == 'b') continue;
    if (kind != 'q') {
      if (ask(StoreOperation::kCheck, key, kDefaultTimeout) && history.back().reply->number == 1)
        ask(StoreOperation::kGet, key, 1s);
      continue;
    }
    while (ask(StoreOperation::kQueueLength, key, kDefaultTimeout) && history.back().reply->number > 0) {
      ask(StoreOperation::kQueuePop, key, kDefaultTimeout);
    }
  }
}

uint64_t number_from(const char* variable, uint64_t usual) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : usual;
}

}  // namespace

History run_clients(const LinearRun& run) {
  std::vector<History> parts(static_cast<size_t>(run.clients));
  std::vector<std::thread> threads;
  for (int i = 0; i < run.clients; ++i) {
    threads.emplace_back([&, i] { play(run, i, parts[static_cast<size_t>(i)]); });
  }
  for (auto& thread : threads) thread.join();
  History all;
  for (History& part : parts) all.insert(all.end(), part.begin(), part.end());
  read_final_state(run, all);
  return all;
}

uint64_t seed_or(uint64_t usual) { return number_from("MUSTER_SEED", usual); }
int rounds_or(int usual) { return static_cast<int>(number_from("MUSTER_ROUNDS", static_cast<uint64_t>(usual))); }

}  // namespace muster
