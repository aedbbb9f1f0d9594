#include "muster/group/form/rank_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "muster/base/log.h"

namespace muster {
namespace {

Key key(const std::string& topic, Rank rank) { return fmt::format("{}/{}", topic, rank); }
Key list(const std::string& topic) { return topic + "/all"; }

std::vector<Key> keys(const std::string& topic, int size) {
  std::vector<Key> all;
  for (Rank rank = 0; rank < size; ++rank) all.push_back(key(topic, rank));
  return all;
}

std::unique_ptr<Store> keys_of(const GroupSpec& membership, Store& store) {
  return prefix_store(fmt::format("muster/group/{}/{}", membership.name, membership.generation), store);
}

/// Above it, n ranks that read n records each are more than one more round trip.
constexpr int kMostReaders = 16;

/// In place of a list: rank 0 gave up.
constexpr std::string_view kNoList = "none";

/// Long enough to ask a store that just timed out which keys it has.
constexpr Duration kLastQuestion = std::chrono::seconds(2);

/// After it, a rank that waits for a further group says whom it found in the first one.
constexpr Duration kQuietWait = std::chrono::seconds(10);

}  // namespace

Rendezvous::Rendezvous(Store& store, GroupSpec membership)
    : base_(store),
      membership_(std::move(membership)),
      name_(membership_.name),
      first_(keys_of(membership_, store)),
      store_(keys_of(membership_, store)) {}

bool Rendezvous::large() const { return membership_.size > kMostReaders; }

Result<bool> Rendezvous::announce(const RankInfo& self, const Deadline& deadline) {
  const Bytes record = encode(self);
  MUSTER_ASSIGN(const auto stored, store_->compare_set(key("member", self.rank), {}, record, deadline));
  if (stored == record) return true;
  const auto other = parse_rank_info(stored);
  if (other) {
    MUSTER_ASSIGN(const bool over, is_over(*other, deadline));
    if (over && number_ == 1 && !other->gave_up()) holder_ = other->to_string();
    if (over) return false;
  }
  return fail(ErrorCode::kAlreadyExists,
              fmt::format("rank {} is taken by {}; give every process its own rank", self.rank,
                          other ? other->to_string() : "a process that can't be read"),
              self.rank);
}

/// For whoever comes now; `holder` is one of its ranks.
Result<bool> Rendezvous::is_over(const RankInfo& holder, const Deadline& deadline) {
  if (holder.gave_up()) return true;
  if (holder.size <= 0) return fail(ErrorCode::kProtocol, "a rank's record has no size");
  return store_->check(holder.size > kMostReaders ? std::vector<Key>{list("member")} : keys("member", holder.size),
                       deadline);
}

Result<> Rendezvous::go_on(const Deadline& deadline) {
  uint64_t latest = 0;
  MUSTER_ASSIGN(const bool known, first_->check({"latest"}, deadline));
  if (known) {
    MUSTER_ASSIGN(const Bytes value, first_->get("latest", deadline));
    const std::string text = to_string(ByteView(value));
    const auto read = std::from_chars(text.data(), text.data() + text.size(), latest);
    if (read.ec != std::errc()) return fail(ErrorCode::kProtocol, "the number of the latest group is no number");
  }
  number_ = std::max(number_, latest) + 1;
  membership_.name = fmt::format("{}#{}", name_, number_);
  store_ = keys_of(membership_, base_);
  return {};
}

void Rendezvous::give_up(const RankInfo& self) {
  RankInfo gone = self;
  gone.instance = RankInfo::kGaveUp;
  const Deadline deadline = Deadline::after(kLastQuestion);
  // The store may be what failed.
  (void)store_->compare_set(key("member", self.rank), encode(self), encode(gone), deadline);
  // The others wait for the list, which nobody else makes.
  if (large() && self.rank == 0) (void)store_->compare_set(list("member"), {}, as_bytes(kNoList), deadline);
}

/// Until the keys are there. In the first group of a name that costs nothing: reading them waits, too.
Result<> Rendezvous::await(const std::vector<Key>& keys, const Deadline& deadline) {
  if (holder_.empty() || warned_) return {};
  warned_ = true;
  const auto there = store_->wait(keys, deadline.or_sooner(Deadline::after(kQuietWait).when()));
  if (there || there.error().code != ErrorCode::kTimeout) return there;
  log(LogLevel::kWarning,
      fmt::format("rank {} waits for another group \"{}\" to form, for the first one has a rank {}: {}. If there is to "
                  "be only one, give every process its own rank",
                  membership_.rank, name_, membership_.rank, holder_));
  return {};
}

Result<RankInfo> Rendezvous::leader(const Deadline& deadline) {
  MUSTER_TRY(await({key("member", 0)}, deadline));
  const auto record = store_->get(key("member", 0), deadline);
  if (!record) return tl::unexpected(missing("member", record.error()));
  return parse_rank_info(*record);
}

Result<std::optional<std::vector<RankInfo>>> Rendezvous::members(const Deadline& deadline) {
  // Rank 0 first: a rank that expects more ranks than there are learns it at once, not at the deadline.
  MUSTER_ASSIGN(const auto first, leader(deadline));
  const auto check = [this](const RankInfo& member) -> Result<> {
    if (member.size == membership_.size) return {};
    return fail(ErrorCode::kMismatch,
                fmt::format("{} says that the world size is {}, rank {} says {}; start all with the same",
                            member.to_string(), member.size, membership_.rank, membership_.size),
                member.rank);
  };
  if (first.size <= membership_.rank) {  // a smaller group's, in which there is no such rank
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
      return fail(ErrorCode::kProtocol, fmt::format("the record of rank {} is another's", members.size()));
    }
    over = over || member.gave_up();
    members.push_back(std::move(member));
  }
  if (over) return std::nullopt;
  if (number_ > 1 && membership_.rank == 0) {
    MUSTER_TRY(first_->set("latest", as_bytes(std::to_string(number_)), deadline));
  }
  return members;
}

Result<std::vector<std::string>> Rendezvous::exchange(const std::string& topic, const std::string& mine,
                                                      const Deadline& deadline) {
  MUSTER_TRY(store_->set(key(topic, membership_.rank), as_bytes(mine), deadline));
  MUSTER_ASSIGN(const auto values, collect(topic, deadline));
  std::vector<std::string> texts;
  for (const Bytes& value : values) texts.push_back(to_string(ByteView(value)));
  return texts;
}

Result<std::vector<Bytes>> Rendezvous::collect(const std::string& topic, const Deadline& deadline) {
  if (!large()) return read_each(topic, deadline);
  if (membership_.rank == 0) {
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
  for (Rank rank = 0; rank < membership_.size; ++rank) {
    MUSTER_ASSIGN(const auto value, in.get_bytes());
    values.emplace_back(value.begin(), value.end());
  }
  MUSTER_TRY(in.finish());
  return values;
}

Result<std::vector<Bytes>> Rendezvous::read_each(const std::string& topic, const Deadline& deadline) {
  const auto all = keys(topic, membership_.size);
  MUSTER_TRY(await(all, deadline));
  auto values = store_->multi_get(all, deadline);
  if (!values) return tl::unexpected(missing(topic, values.error()));
  if (values->size() != all.size()) return fail(ErrorCode::kProtocol, "the store gave too few values");
  return values;
}

Error Rendezvous::missing(const std::string& topic, const Error& cause) {
  if (cause.code != ErrorCode::kTimeout) return cause;
  std::string names;
  int count = 0;
  Rank first = kNoRank;
  for (Rank rank = 0; rank < membership_.size; ++rank) {
    if (rank == membership_.rank) continue;
    const auto there = store_->check({key(topic, rank)}, Deadline::after(kLastQuestion));
    if (!there) return cause;
    if (*there) continue;
    if (first == kNoRank) first = rank;
    if (++count <= 16) names += fmt::format("{}{}", names.empty() ? "" : ", ", rank);
  }
  if (count == 0) return cause;
  return Error{ErrorCode::kTimeout,
               fmt::format("{} of {} ranks came to group \"{}\"; missing: {}{}{}", membership_.size - count,
                           membership_.size, membership_.name, names, count > 16 ? ", ..." : "",
                           holder_.empty() ? ""
                                           : fmt::format("; in the first group of this name rank {} is taken by {}",
                                                         membership_.rank, holder_)),
               first, "forming the group"};
}

}  // namespace muster
