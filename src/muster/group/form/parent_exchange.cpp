#include "muster/group/form/parent_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

constexpr uint64_t kMaxText = 1 << 20;  ///< bytes; a record has some hundred

/// A timeout of zero would be the parent's own.
CallOptions until(const Deadline& deadline) { return {.timeout = std::max(deadline.left(), Duration(1ms))}; }

}  // namespace

Result<Bytes> ParentExchange::share_secret(const Deadline& deadline) {
  Bytes secret = generate_secret();  // of the same length at all ranks
  MUSTER_TRY(parent_.broadcast({secret.data(), secret.size(), Dtype::kUint8}, 0, until(deadline)).wait());
  return secret;
}

Result<std::optional<std::vector<RankInfo>>> ParentExchange::exchange_members(RankInfo self, const Deadline& deadline) {
  MUSTER_ASSIGN(const auto records, exchange("member", to_string(encode(self)), deadline));
  std::vector<RankInfo> members;
  for (const std::string& record : records) {
    MUSTER_ASSIGN(RankInfo member, parse_rank_info(as_bytes(record)));
    if (member.rank != static_cast<Rank>(members.size()) || member.size != spec_.size) {
      return fail(ErrorCode::kProtocol, fmt::format("the record of rank {} belongs to another rank", members.size()));
    }
    members.push_back(std::move(member));
  }
  return members;
}

Result<std::vector<std::string>> ParentExchange::exchange(const std::string& /*topic*/, const std::string& mine,
                                                          const Deadline& deadline) {
  const auto size = static_cast<size_t>(spec_.size);
  uint64_t length = mine.size();
  std::vector<uint64_t> lengths(size);
  MUSTER_TRY(
      parent_.all_gather({&length, 1, Dtype::kUint64}, {lengths.data(), size, Dtype::kUint64}, until(deadline)).wait());
  if (std::ranges::any_of(lengths, [](uint64_t each) { return each > kMaxText; })) {
    return fail(ErrorCode::kProtocol, "the record of a rank is too long");
  }
  std::string all(std::accumulate(lengths.begin(), lengths.end(), size_t{0}), ' ');
  std::string own = mine;
  MUSTER_TRY(parent_
                 .all_gather({own.data(), own.size(), Dtype::kUint8}, {all.data(), all.size(), Dtype::kUint8},
                             until(deadline), {lengths.begin(), lengths.end()})
                 .wait());
  std::vector<std::string> texts;
  size_t begin = 0;
  for (const uint64_t each : lengths) {
    texts.push_back(all.substr(begin, each));
    begin += each;
  }
  return texts;
}

}  // namespace muster
