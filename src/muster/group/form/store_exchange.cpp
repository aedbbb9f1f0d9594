#include "muster/group/form/store_exchange.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "muster/base/log.h"
#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

Key key(const std::string& topic, Rank rank) { return fmt::format("{}/{}", topic, rank); }
Key list(const std::string& topic) { return topic + "/all"; }

std::vector<Key> keys(const std::string& topic, int size) {
  std::vector<Key> all;
  for (Rank rank = 0; rank < size; ++rank) all.push_back(key(topic, rank));
  return all;
}

std::unique_ptr<Store> keys_of(const GroupSpec& spec, Store& store) {
  return prefix_store(fmt::format("muster/group/{}/{}", spec.name, spec.generation), store);
}

/// In a group larger than this, n ranks that each read n records cost more than an additional round trip.
constexpr int kMaxReaders = 16;

/// The value of the member list after rank 0 gave up.
constexpr std::string_view kNoList = "none";

/// Time limit for short store requests after forming has failed or timed out.
constexpr Duration kLastQueryTime = std::chrono::seconds(2);

/// A rank that waits longer than this for another group of the same name logs which process has its rank in the first
/// group.
constexpr Duration kQuietTime = std::chrono::seconds(10);

}  // namespace

StoreExchange::StoreExchange(Store& store, GroupSpec spec)
    : base_(store),
      spec_(std::move(spec)),
      name_(spec_.name),
      first_(keys_of(spec_, store)),
      store_(keys_of(spec_, store)) {}

Result<Bytes> StoreExchange::share_secret(const Deadline& deadline) {
  if (spec_.rank == 0) {
    secret_ = generate_secret();
    return secret_;
  }
  MUSTER_ASSIGN(const auto first, first_rank(deadline));
  if (!first.secret.empty()) return first.secret;
  return fail(ErrorCode::kAuthentication,
              fmt::format("{} has the job's secret and rank {} has none; set MUSTER_SECRET at every rank",
                          first.to_string(), spec_.rank),
              spec_.rank);
}

Result<std::optional<std::vector<RankInfo>>> StoreExchange::exchange_members(RankInfo self, const Deadline& deadline) {
  self.secret = secret_;
  MUSTER_ASSIGN(const bool announced, announce(self, deadline));
  if (announced) {
    auto met = members(deadline);
    if (!met || !*met) give_up(self);
    if (!met || *met) return met;
  }
  MUSTER_TRY(next_group(deadline));
  return std::nullopt;
}

Result<bool> StoreExchange::announce(const RankInfo& self, const Deadline& deadline) {
  const Bytes record = encode(self);
  MUSTER_ASSIGN(const auto stored, store_->compare_set(key("member", self.rank), {}, record, deadline));
  if (stored == record) return true;
  const auto other = parse_rank_info(stored);
  if (other) {
    MUSTER_ASSIGN(const bool over, is_over(*other, deadline));
    if (over && number_ == 1 && !other->gave_up()) previous_process_ = other->to_string();
    if (over) return false;
  }
  return fail(ErrorCode::kAlreadyExists,
              fmt::format("rank {} is taken by {}; give every process its own rank", self.rank,
                          other ? other->to_string() : "a process with an invalid record"),
              self.rank);
}

/// True if a rank that arrives now cannot join the group any more. `holder` is one of the group's ranks.
Result<bool> StoreExchange::is_over(const RankInfo& holder, const Deadline& deadline) {
  if (holder.gave_up()) return true;
  if (holder.size <= 0) return fail(ErrorCode::kProtocol, "a rank's record has an invalid size");
  return store_->check(holder.size > kMaxReaders ? std::vector<Key>{list("member")} : keys("member", holder.size),
                       deadline);
}

Result<> StoreExchange::next_group(const Deadline& deadline) {
  uint64_t latest = 0;
  MUSTER_ASSIGN(const bool known, first_->check({"latest"}, deadline));
  if (known) {
    MUSTER_ASSIGN(const Bytes value, first_->get("latest", deadline));
    const std::string text = to_string(ByteView(value));
    const auto read = std::from_chars(text.data(), text.data() + text.size(), latest);
    if (read.ec != std::errc())
      return fail(ErrorCode::kProtocol, "the store's number of the latest group is not a number");
  }
  number_ = std::max(number_, latest) + 1;
  spec_.name = fmt::format("{}#{}", name_, number_);
  store_ = keys_of(spec_, base_);
  return {};
}

void StoreExchange::give_up(const RankInfo& self) {
  RankInfo gone = self;
  gone.instance = RankInfo::kGaveUp;
  const Deadline deadline = Deadline::after(kLastQueryTime);
  // Errors are ignored: the store may be what failed.
  (void)store_->compare_set(key("member", self.rank), encode(self), encode(gone), deadline);
  // The other ranks wait for the list, which only rank 0 writes.
  if (spec_.size > kMaxReaders && self.rank == 0) {
    (void)store_->compare_set(list("member"), {}, as_bytes(kNoList), deadline);
  }
}

/// Waits for the keys for a short time and logs a warning if they do not arrive. Does nothing if no other process had
/// this rank in the first group of the name: then the read that follows does the waiting.
Result<> StoreExchange::wait_for(const std::vector<Key>& keys, const Deadline& deadline) {
  if (previous_process_.empty() || warned_) return {};
  warned_ = true;
  const auto there = store_->wait(keys, deadline.or_sooner(Deadline::after(kQuietTime).when()));
  if (there || there.error().code != ErrorCode::kTimeout) return there;
  log(LogLevel::kWarning,
      fmt::format("rank {} waits for another group \"{}\" to form, for the first one has a rank {}: {}. If there is to "
                  "be only one, give every process its own rank",
                  spec_.rank, name_, spec_.rank, previous_process_));
  return {};
}

Result<RankInfo> StoreExchange::first_rank(const Deadline& deadline) {
  MUSTER_TRY(wait_for({key("member", 0)}, deadline));
  const auto record = store_->get(key("member", 0), deadline);
  if (!record) return tl::unexpected(missing("member", record.error()));
  return parse_rank_info(*record);
}

Result<std::optional<std::vector<RankInfo>>> StoreExchange::members(const Deadline& deadline) {
  // Reads rank 0's record first, so that a rank with a larger world size fails at once, not at the deadline.
  MUSTER_ASSIGN(const auto first, first_rank(deadline));
  const auto check = [this](const RankInfo& member) -> Result<> {
    if (member.size == spec_.size) return {};
    return fail(
        ErrorCode::kMismatch,
        fmt::format("{} says that the world size is {}, rank {} says {}; start all processes with the same world size",
                    member.to_string(), member.size, spec_.rank, spec_.size),
        member.rank);
  };
  if (first.size <= spec_.rank) {  // the record belongs to a smaller group, which does not have this rank
    MUSTER_ASSIGN(const bool over, is_over(first, deadline));
    if (over) return std::nullopt;
  }
  MUSTER_TRY(check(first));
  if (first.gave_up()) return std::nullopt;
  MUSTER_ASSIGN(const auto records, collect("member", deadline));
  if (records.empty()) return std::nullopt;
  bool over = false;
  std::vector<RankInfo> members;
  members.reserve(records.size());
  for (const Bytes& record : records) {
    MUSTER_ASSIGN(auto member, parse_rank_info(record));
    MUSTER_TRY(check(member));
    if (member.rank != static_cast<Rank>(members.size())) {
      return fail(ErrorCode::kProtocol, fmt::format("the record of rank {} belongs to another rank", members.size()));
    }
    over = over || member.gave_up();
    members.push_back(std::move(member));
  }
  if (over) return std::nullopt;
  if (number_ > 1 && spec_.rank == 0) {
    MUSTER_TRY(first_->set("latest", as_bytes(std::to_string(number_)), deadline));
  }
  return members;
}

Result<std::vector<std::string>> StoreExchange::exchange(const std::string& topic, const std::string& mine,
                                                         const Deadline& deadline) {
  MUSTER_TRY(store_->set(key(topic, spec_.rank), as_bytes(mine), deadline));
  MUSTER_ASSIGN(const auto values, collect(topic, deadline));
  std::vector<std::string> texts;
  for (const Bytes& value : values) texts.push_back(to_string(ByteView(value)));
  return texts;
}

Result<std::vector<Bytes>> StoreExchange::collect(const std::string& topic, const Deadline& deadline) {
  if (spec_.size <= kMaxReaders) return read_each(topic, deadline);
  if (spec_.rank == 0) {
    MUSTER_ASSIGN(auto values, read_each(topic, deadline));
    Writer out;
    for (const Bytes& value : values) out.put_bytes(value);
    MUSTER_TRY(store_->set(list(topic), out.bytes(), deadline));
    return values;
  }
  const auto text = store_->get(list(topic), deadline);
  if (!text) return tl::unexpected(missing(topic, text.error()));
  if (to_string(ByteView(*text)) == kNoList) return std::vector<Bytes>{};
  Reader in(*text);
  std::vector<Bytes> values;
  for (Rank rank = 0; rank < spec_.size; ++rank) {
    MUSTER_ASSIGN(const auto value, in.get_bytes());
    values.emplace_back(value.begin(), value.end());
  }
  MUSTER_TRY(in.finish());
  return values;
}

Result<std::vector<Bytes>> StoreExchange::read_each(const std::string& topic, const Deadline& deadline) {
  const auto all = keys(topic, spec_.size);
  MUSTER_TRY(wait_for(all, deadline));
  auto values = store_->multi_get(all, deadline);
  if (!values) return tl::unexpected(missing(topic, values.error()));
  if (values->size() != all.size()) return fail(ErrorCode::kProtocol, "the store gave too few values");
  return values;
}

Error StoreExchange::missing(const std::string& topic, const Error& cause) {
  if (cause.code != ErrorCode::kTimeout) return cause;
  std::vector<Rank> absent;
  for (Rank rank = 0; rank < spec_.size; ++rank) {
    if (rank == spec_.rank) continue;
    const auto there = store_->check({key(topic, rank)}, Deadline::after(kLastQueryTime));
    if (!there) return cause;
    if (!*there) absent.push_back(rank);
  }
  if (absent.empty()) return cause;
  std::string text =
      fmt::format("{} of {} ranks came to group \"{}\"; missing: {}", spec_.size - absent.size(), spec_.size,
                  spec_.name, fmt::join(std::span(absent).first(std::min<size_t>(absent.size(), 16)), ", "));
  if (absent.size() > 16) text += ", ...";
  if (!previous_process_.empty()) {
    text += fmt::format("; in the first group of this name rank {} is taken by {}", spec_.rank, previous_process_);
  }
  return Error{ErrorCode::kTimeout, std::move(text), absent.front(), "forming the group"};
}

}  // namespace muster
