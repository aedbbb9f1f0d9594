// The record of a rank in the store, under "member/<rank>". Numbers are little-endian:
//
//   record := version:u8 rank:i32 size:i32 pid:i32 host:string domain:string local_address:string
//             process_domain:string shares_memory:u8 instance:u64 tuning:string
//             secret:bytes
#include "muster/collective/rank_info.h"

#include <fmt/format.h>

namespace muster {
namespace {

constexpr uint8_t kVersion = 3;

}  // namespace

std::string RankInfo::to_string() const { return fmt::format("rank {} (host {}, pid {})", rank, host, pid); }

bool RankInfo::shares_processes_with(const RankInfo& other) const {
  return !process_domain.empty() && process_domain == other.process_domain;
}

Bytes encode(const RankInfo& member) {
  Writer out;
  out.put(kVersion).put<int32_t>(member.rank).put<int32_t>(member.size).put<int32_t>(member.pid);
  out.put_string(member.host).put_string(member.domain).put_string(member.local_address);
  out.put_string(member.process_domain).put<uint8_t>(member.shares_memory).put(member.instance);
  out.put_string(member.tuning).put_bytes(member.secret);
  return out.take();
}

Result<RankInfo> parse_rank_info(ByteView record) {
  Reader in(record);
  MUSTER_ASSIGN(const auto version, in.get<uint8_t>());
  if (version != kVersion) {
    return fail(ErrorCode::kMismatch,
                fmt::format("a rank runs another version of muster (record {}, here {})", version, kVersion));
  }
  RankInfo member;
  MUSTER_ASSIGN(member.rank, in.get<int32_t>());
  MUSTER_ASSIGN(member.size, in.get<int32_t>());
  MUSTER_ASSIGN(member.pid, in.get<int32_t>());
  MUSTER_ASSIGN(member.host, in.get_string());
  MUSTER_ASSIGN(member.domain, in.get_string());
  MUSTER_ASSIGN(member.local_address, in.get_string());
  MUSTER_ASSIGN(member.process_domain, in.get_string());
  MUSTER_ASSIGN(const auto shares_memory, in.get<uint8_t>());
  if (shares_memory > 1) return fail(ErrorCode::kProtocol, "a rank's record has an invalid shares_memory byte");
  member.shares_memory = shares_memory != 0;
  MUSTER_ASSIGN(member.instance, in.get<uint64_t>());
  MUSTER_ASSIGN(member.tuning, in.get_string());
  MUSTER_ASSIGN(const auto secret, in.get_bytes());
  member.secret.assign(secret.begin(), secret.end());
  MUSTER_TRY(in.finish());
  return member;
}

}  // namespace muster
