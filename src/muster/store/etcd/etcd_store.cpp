#include "muster/store/etcd/etcd_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "muster/store/etcd/etcd_space.h"
#include "muster/store/external_store.h"
#include "muster/store/ttl_lock.h"
#include "muster/store/url.h"

namespace muster {
namespace {

using etcd::Json;

constexpr size_t kMaxOperations = 128;  // etcd's default limit for one transaction
constexpr Duration kWatchTime = 20s;    // the watch is then repeated, because its connection may be dead

class EtcdStore : public ExternalStore {
 public:
  EtcdStore(std::shared_ptr<EtcdClient> client, const std::string& prefix)
      : prefix_(prefix), space_(std::move(client), prefix) {}

  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<EtcdStore>(space_.client(), prefix_); }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                         const Deadline& deadline) override {
    return etcd_claim(space_, name, value, time_to_live, with_grace(deadline));
  }
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline) override {
    MUSTER_ASSIGN(const Json answer,
                  space_.range(keys_below(space_.claim(Key(prefix))), Json::object(), with_grace(deadline)));
    std::map<Key, Bytes> result;
    for (EtcdKey& found : etcd::keys_of(answer)) {
      result.emplace(found.key.substr(space_.claim("").size()), std::move(found.value));
    }
    return result;
  }

 protected:
  Result<Reply> carry_out(Request& request, const Deadline& deadline) override {
    const Deadline at_once = with_grace(deadline);
    switch (request.operation) {
      case StoreOperation::kSet:
        return run(etcd::put(space_.data(request.keys[0]), request.values[0]), at_once);
      case StoreOperation::kQueuePush:
        return run(etcd::put(space_.queue(request.keys[0]) + random_token(), request.values[0]), at_once);
      case StoreOperation::kDelete:
        return run(etcd::remove({space_.data(request.keys[0])}), at_once);
      case StoreOperation::kCompareSet:
        return do_compare_set(request, at_once);
      case StoreOperation::kAdd:
        return do_add(request, at_once);
      case StoreOperation::kAppend:
        return do_append(request, at_once);
      case StoreOperation::kMultiSet:
        return do_multi_set(request, at_once);
      case StoreOperation::kNumKeys:
        return count(space_.data(request.keys.empty() ? Key() : request.keys[0]), at_once);
      case StoreOperation::kQueueLength:
        return count(space_.queue(request.keys[0]), at_once);
      case StoreOperation::kListKeys:
        return do_list_keys(request, at_once);
      case StoreOperation::kCheck: {
        MUSTER_ASSIGN(const Look seen, look(request, 0, at_once));
        return number_reply(seen.missing == request.keys.size());
      }
      case StoreOperation::kQueuePop:
        return pop(request, deadline);
      case StoreOperation::kBarrier:
        MUSTER_TRY(etcd_barrier(space_, request.keys[0], request.number, deadline));
        return Reply{};
      case StoreOperation::kGet:
      case StoreOperation::kMultiGet:
      case StoreOperation::kWait:
        return do_wait(request, deadline);
      default:
        return fail(ErrorCode::kUnsupported, fmt::format("etcd has no {}", name(request.operation)));
    }
  }
  std::string server() const override { return space_.client()->target().name(); }

 private:
  // ---- operations that do not wait

  // Carries out one operation of etcd.
  Result<Reply> run(Json operation, const Deadline& deadline) {
    MUSTER_ASSIGN(const Json answer, space_.transact({}, {std::move(operation)}, {}, deadline));
    return number_reply(etcd::number(etcd::response(answer, 0, "response_delete_range"), "deleted"));
  }

  Result<Reply> do_compare_set(const Request& request, const Deadline& deadline) {
    const std::string key = space_.data(request.keys[0]);
    const Bytes &expected = request.values[0], &desired = request.values[1];
    for (bool absent = expected.empty(); true; absent = false) {
      const Json compare = absent ? etcd::unchanged(key, 0) : etcd::holds(key, expected);
      MUSTER_ASSIGN(const Json answer,
                    space_.transact({compare}, {etcd::put(key, desired)}, {etcd::range({key})}, deadline));
      if (etcd::succeeded(answer)) return Reply{.values = {desired}};
      const EtcdKey now = etcd::key_of(etcd::response(answer, 0, "response_range"));
      // compare_set treats an empty value as an absent key.
      if (!absent || !now.found || !now.value.empty()) return Reply{.values = {now.found ? now.value : expected}};
    }
  }

  // Writes the value that `next` returns for the current value. Repeats if another client changed the key in between.
  Result<> change(const Key& changed, const Deadline& deadline,
                  const std::function<Result<Bytes>(const Bytes&)>& next) {
    const std::string key = space_.data(changed);
    EtcdKey now;
    while (true) {
      MUSTER_ASSIGN(const Bytes value, next(now.value));
      MUSTER_ASSIGN(const Json answer, space_.transact({etcd::unchanged(key, now.changed)}, {etcd::put(key, value)},
                                                       {etcd::range({key})}, deadline));
      if (etcd::succeeded(answer)) return {};
      now = etcd::key_of(etcd::response(answer, 0, "response_range"));
      if (deadline.passed()) return fail(ErrorCode::kTimeout, "other clients changed the key at every attempt");
    }
  }

  Result<Reply> do_add(const Request& request, const Deadline& deadline) {
    int64_t sum = 0;
    MUSTER_TRY(change(request.keys[0], deadline, [&](const Bytes& now) -> Result<Bytes> {
      MUSTER_ASSIGN(sum, add_to_counter(request.keys[0], now, request.number));
      return to_bytes(std::to_string(sum));
    }));
    return number_reply(sum);
  }

  Result<Reply> do_append(const Request& request, const Deadline& deadline) {
    MUSTER_TRY(change(request.keys[0], deadline, [&](Bytes value) -> Result<Bytes> {
      value.insert(value.end(), request.values[0].begin(), request.values[0].end());
      return value;
    }));
    return Reply{};
  }

  Result<Reply> do_multi_set(const Request& request, const Deadline& deadline) {
    const auto write = [&](size_t begin, size_t end) -> Result<> {
      std::vector<Json> puts;
      for (size_t i = begin; i < end; ++i) puts.push_back(etcd::put(space_.data(request.keys[i]), request.values[i]));
      MUSTER_TRY(space_.transact({}, std::move(puts), {}, deadline));
      return {};
    };
    const size_t keys = request.keys.size();
    const Result<> whole = write(0, keys);
    if (whole) return Reply{};
    // The server allows fewer operations in one transaction. So the keys are written in parts, which is not atomic.
    if (keys <= kMaxOperations || whole.error().message.find("too many operations") == std::string::npos) {
      return tl::unexpected(whole.error());
    }
    for (size_t begin = 0; begin < keys; begin += kMaxOperations) {
      MUSTER_TRY(write(begin, std::min(begin + kMaxOperations, keys)));
    }
    return Reply{};
  }

  Result<Reply> count(std::string prefix, const Deadline& deadline) {
    MUSTER_ASSIGN(const Json answer, space_.range(keys_below(std::move(prefix)), {{"count_only", true}}, deadline));
    return number_reply(etcd::number(answer, "count"));
  }

  Result<Reply> do_list_keys(const Request& request, const Deadline& deadline) {
    MUSTER_ASSIGN(const Json answer,
                  space_.range(keys_below(space_.data(request.keys[0])), {{"keys_only", true}}, deadline));
    Reply reply;
    for (const EtcdKey& found : etcd::keys_of(answer)) reply.keys.push_back(found.key.substr(space_.data("").size()));
    return reply;
  }

  // ---- operations that may wait

  // The keys as a get or a wait sees them.
  struct Look {
    size_t missing = 0;    // index of the first missing key, or the number of keys
    int64_t revision = 0;  // of etcd's data
    std::vector<Bytes> values;
  };

  // Reads the keys from index `from` on, all at one revision, and stops at the first missing key. Reads no values if
  // only the existence of the keys matters. Splits large requests into several transactions. A part has kMaxOperations
  // / 2 keys, because a key can need two operations: its value and its queue.
  Result<Look> look(const Request& request, size_t from, const Deadline& deadline) {
    const bool sees_queues = request.operation == StoreOperation::kWait || request.operation == StoreOperation::kCheck;
    const size_t part = kMaxOperations / 2;
    Look seen{from, 0, {}};
    while (seen.missing < request.keys.size()) {
      const size_t end = std::min(seen.missing + part, request.keys.size());
      std::vector<Json> ranges;
      const std::string revision = std::to_string(seen.revision);
      for (size_t i = seen.missing; i < end; ++i) {
        ranges.push_back(
            etcd::range({space_.data(request.keys[i])}, {{"keys_only", sees_queues}, {"revision", revision}}));
        const EtcdRange queue = keys_below(space_.queue(request.keys[i]));
        if (sees_queues) ranges.push_back(etcd::range(queue, {{"count_only", true}, {"revision", revision}}));
      }
      MUSTER_ASSIGN(const Json answer, space_.transact({}, std::move(ranges), {}, deadline));
      if (seen.revision == 0) seen.revision = etcd::revision(answer);
      for (size_t i = 0; seen.missing < end; i += sees_queues ? 2 : 1, ++seen.missing) {
        EtcdKey found = etcd::key_of(etcd::response(answer, i, "response_range"));
        const bool queued = sees_queues && etcd::number(etcd::response(answer, i + 1, "response_range"), "count") > 0;
        if (!found.found && !queued) return seen;
        seen.values.push_back(std::move(found.value));
      }
    }
    return seen;
  }

  Result<> watch(const std::vector<EtcdRange>& ranges, int64_t revision, const Deadline& deadline) {
    return space_.client()->watch(ranges, revision, deadline.or_sooner(deadline.clock().now() + kWatchTime));
  }

  Result<Reply> do_wait(const Request& request, const Deadline& deadline) {
    size_t from = 0;  // the key that was missing; once no key is missing, all are read at one revision
    while (true) {
      const bool last = deadline.passed();
      MUSTER_ASSIGN(Look seen, look(request, from, with_grace(deadline)));
      if (seen.missing == request.keys.size()) {
        const bool all = std::exchange(from, 0) == 0;
        if (all && request.operation == StoreOperation::kWait) return Reply{};
        if (all) return Reply{.values = std::move(seen.values)};
        continue;
      }
      if (last) return fail(ErrorCode::kTimeout, "the deadline has passed");
      const Key& key = request.keys[seen.missing];
      std::vector<EtcdRange> awaited = {{space_.data(key)}};
      if (request.operation == StoreOperation::kWait) awaited.push_back(keys_below(space_.queue(key)));
      MUSTER_TRY(watch(awaited, seen.revision, deadline));
      from = seen.missing;
    }
  }

  Result<Reply> pop(const Request& request, const Deadline& deadline) {
    const EtcdRange queue = keys_below(space_.queue(request.keys[0]));
    while (true) {
      const bool last = deadline.passed();
      MUSTER_ASSIGN(const Json answer,
                    space_.range(queue, {{"limit", 1}, {"sort_order", "ASCEND"}, {"sort_target", "CREATE"}},
                                 with_grace(deadline)));
      EtcdKey oldest = etcd::key_of(answer);
      if (oldest.found) {
        MUSTER_ASSIGN(const Json taken, space_.transact({etcd::unchanged(oldest.key, oldest.changed)},
                                                        {etcd::remove({oldest.key})}, {}, with_grace(deadline)));
        Reply reply = number_reply(etcd::number(answer, "count"));
        reply.values.push_back(std::move(oldest.value));
        if (etcd::succeeded(taken)) return reply;
      }
      if (last) return fail(ErrorCode::kTimeout, "the deadline has passed");
      if (!oldest.found) MUSTER_TRY(watch({queue}, etcd::revision(answer), deadline));
    }
  }

  const std::string prefix_;
  EtcdSpace space_;
};

}  // namespace

Result<std::unique_ptr<Store>> etcd_store(const std::string& text, const Deadline& deadline) {
  constexpr uint16_t kPort = 2379;
  MUSTER_ASSIGN(Url url, Url::parse(text, kPort));
  EtcdTarget target{url.hosts, url.scheme == "etcds", {}, url.user, url.password};
  if (target.https) target.files = {url.take("ca", ""), url.take("cert", ""), url.take("key", "")};
  std::string prefix = url.take("prefix", url.path);
  MUSTER_TRY(url.finish(target.https ? "prefix, ca, cert and key" : "prefix; certificates go with etcds://"));
  if (target.hosts.empty())
    return fail(ErrorCode::kInvalidArgument, "an etcd:// URL must have hosts: etcd://a,b,c/job");
  while (prefix.ends_with('/')) prefix.pop_back();
  if (prefix.empty()) prefix = "muster";
  MUSTER_ASSIGN(auto client, EtcdClient::connect(std::move(target), deadline));
  return std::make_unique<EtcdStore>(std::move(client), prefix);
}

}  // namespace muster
