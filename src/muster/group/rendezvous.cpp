#include "muster/group/rendezvous.h"

#include <fmt/format.h>

namespace muster {
namespace {

Key key(const std::string& topic, Rank rank) { return fmt::format("{}/{}", topic, rank); }

/// Above it, n ranks that read n records each are more than one more round trip.
constexpr int kMostReaders = 16;

/// Long enough to ask a store that just timed out which keys it has.
constexpr Duration kLastQuestion = std::chrono::seconds(2);

}  // namespace

Rendezvous::Rendezvous(Store& store, const Membership& membership)
    : store_(prefix_store(fmt::format("muster/group/{}/{}", membership.name, membership.generation), store)),
      membership_(membership) {}

Result<> Rendezvous::announce(const Member& self, const Deadline& deadline) {
  const Bytes record = encode(self);
  MUSTER_ASSIGN(const auto stored, store_->compare_set(key("member", self.rank), {}, record, deadline));
  if (stored == record) return {};
  const auto other = parse_member(stored);
  return fail(ErrorCode::kAlreadyExists,
              fmt::format("rank {} is taken by {}; give every process its own rank", self.rank,
                          other ? other->to_string() : "a process that can't be read"),
              self.rank);
}

Result<Member> Rendezvous::leader(const Deadline& deadline) {
  const auto record = store_->get(key("member", 0), deadline);
  if (!record) return tl::unexpected(missing("member", record.error()));
  return parse_member(*record);
}

Result<std::vector<Member>> Rendezvous::members(const Deadline& deadline) {
  // Rank 0 first: a rank that expects more ranks than there are learns it at once, not at the deadline.
  MUSTER_ASSIGN(const auto first, leader(deadline));
  const auto check = [this](const Member& member) -> Result<> {
    if (member.size == membership_.size) return {};
    return fail(ErrorCode::kMismatch,
                fmt::format("{} says that the world size is {}, rank {} says {}; start all with the same",
                            member.to_string(), member.size, membership_.rank, membership_.size),
                member.rank);
  };
  MUSTER_TRY(check(first));
  MUSTER_ASSIGN(const auto records, collect("member", deadline));
  std::vector<Member> members;
  members.reserve(records.size());
  for (const Bytes& record : records) {
    MUSTER_ASSIGN(auto member, parse_member(record));
    MUSTER_TRY(check(member));
    if (member.rank != static_cast<Rank>(members.size())) {
      return fail(ErrorCode::kProtocol, fmt::format("the record of rank {} is another's", members.size()));
    }
    members.push_back(std::move(member));
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
  if (membership_.size <= kMostReaders) return read_each(topic, deadline);
  const Key list = topic + "/all";
  if (membership_.rank == 0) {
    MUSTER_ASSIGN(auto values, read_each(topic, deadline));
    Writer out;
    for (const Bytes& value : values) out.put_bytes(value);
    MUSTER_TRY(store_->set(list, out.bytes(), deadline));
    return values;
  }
  const auto text = store_->get(list, deadline);
  if (!text) return tl::unexpected(missing(topic, text.error()));
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
  std::vector<Key> keys;
  for (Rank rank = 0; rank < membership_.size; ++rank) keys.push_back(key(topic, rank));
  auto values = store_->multi_get(keys, deadline);
  if (!values) return tl::unexpected(missing(topic, values.error()));
  if (values->size() != keys.size()) return fail(ErrorCode::kProtocol, "the store gave too few values");
  return values;
}

Error Rendezvous::missing(const std::string& topic, const Error& cause) {
  if (cause.code != ErrorCode::kTimeout) return cause;
  std::string names;
  int count = 0;
  Rank first = kNoRank;
  for (Rank rank = 0; rank < membership_.size; ++rank) {
    const auto there = store_->check({key(topic, rank)}, Deadline::after(kLastQuestion));
    if (!there) return cause;
    if (*there) continue;
    if (first == kNoRank) first = rank;
    if (++count <= 16) names += fmt::format("{}{}", names.empty() ? "" : ", ", rank);
  }
  if (count == 0) return cause;
  return Error{ErrorCode::kTimeout,
               fmt::format("{} of {} ranks came to group \"{}\"; missing: {}{}", membership_.size - count,
                           membership_.size, membership_.name, names, count > 16 ? ", ..." : ""),
               first, "forming the group"};
}

}  // namespace muster
