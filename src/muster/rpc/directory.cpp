// The keys of a group of workers, with the prefix "rpc/<group>/":
//
//   ids           counter of ids
//   id/<id>       the name of the worker with this id
//   name/<name>   the record of the worker that has this name now
//   secret        the group's secret, if the job has none
//   barrier/...   barriers
//
//   record := version:u8=1 id:i32 name:string host:string pid:i32 process_domain:string memory_domain:string
//             local_address:string tcp_address:string                           string := length:u32 bytes
#include "muster/rpc/directory.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <algorithm>

#include "muster/io/connect/handshake.h"
#include "muster/io/loop.h"
#include "muster/io/socket.h"

namespace muster::rpc {
namespace {

constexpr uint8_t kVersion = 1;
/// A worker whose name is taken waits so long for an answer of the worker that has it.
constexpr Duration kAnswerTime = 3s;

std::string name_key(const std::string& name) { return "name/" + name; }

/// True if a process accepts connections at the record's address. A process that was stopped counts as present.
Result<bool> answers(const WorkerRecord& record) {
  const bool local = record.memory_domain == shared_memory_domain() && !record.local_address.empty();
  MUSTER_ASSIGN(const Address address, Address::parse(local ? record.local_address : record.tcp_address));
  MUSTER_ASSIGN(const auto loop, Loop::create());
  const auto attempt = start_connect(address);
  if (!attempt) return false;
  bool ended = false;
  MUSTER_TRY(loop->watch(attempt->get(), EPOLLOUT, [&](uint32_t) { ended = true; }));
  const Result<> waited = loop->run_until([&] { return ended; }, Deadline::after(kAnswerTime));
  loop->unwatch(attempt->get());
  return waited && finish_connect(attempt->get(), address);
}

}  // namespace

std::string WorkerRecord::to_string() const {
  return fmt::format("worker \"{}\" (id {}, host {}, pid {})", worker.name, worker.id, host, process.pid);
}

Bytes encode(const WorkerRecord& record) {
  Writer out;
  out.put(kVersion).put<int32_t>(record.worker.id).put_string(record.worker.name).put_string(record.host);
  out.put<int32_t>(record.process.pid).put_string(record.process.domain).put_string(record.memory_domain);
  out.put_string(record.local_address).put_string(record.tcp_address);
  return out.take();
}

Result<WorkerRecord> parse_worker_record(ByteView bytes) {
  Reader in(bytes);
  MUSTER_ASSIGN(const auto version, in.get<uint8_t>());
  if (version != kVersion) {
    return fail(ErrorCode::kMismatch,
                fmt::format("a worker runs another version of muster (record {}, here {})", version, kVersion));
  }
  WorkerRecord record;
  MUSTER_ASSIGN(record.worker.id, in.get<int32_t>());
  if (record.worker.id < 0) return fail(ErrorCode::kProtocol, "a worker's record has a negative id");
  MUSTER_ASSIGN(record.worker.name, in.get_string());
  MUSTER_ASSIGN(record.host, in.get_string());
  MUSTER_ASSIGN(record.process.pid, in.get<int32_t>());
  MUSTER_ASSIGN(record.process.domain, in.get_string());
  MUSTER_ASSIGN(record.memory_domain, in.get_string());
  MUSTER_ASSIGN(record.local_address, in.get_string());
  MUSTER_ASSIGN(record.tcp_address, in.get_string());
  MUSTER_TRY(in.finish());
  return record;
}

Directory::Directory(std::shared_ptr<Store> store, const std::string& group)
    : base_(std::move(store)), store_(prefix_store("rpc/" + group, *base_)) {}

Result<Bytes> Directory::agree_on_secret(const Bytes& own, const Deadline& deadline) {
  if (!own.empty()) return own;
  return store_->compare_set("secret", {}, generate_secret(), deadline);
}

Result<int> Directory::new_id(const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t count, store_->add("ids", 1, deadline));
  return static_cast<int>(count - 1);
}

Result<> Directory::join(const WorkerRecord& self, const Deadline& deadline) {
  const std::string& name = self.worker.name;
  const Bytes record = encode(self);
  MUSTER_TRY(store_->set(fmt::format("id/{}", self.worker.id), as_bytes(name), deadline));
  Bytes expected;  // what the key should have now; empty: nothing
  while (true) {
    MUSTER_ASSIGN(const Bytes present, store_->compare_set(name_key(name), expected, record, deadline));
    if (present == record) return {};
    if (present == expected) {  // the worker that had the name has left meanwhile
      expected.clear();
      continue;
    }
    MUSTER_ASSIGN(const WorkerRecord other, parse_worker_record(present));
    MUSTER_ASSIGN(const bool alive, answers(other));
    if (alive) {
      return fail(
          ErrorCode::kAlreadyExists,
          fmt::format("the name \"{}\" belongs to {}: each worker needs a name of its own", name, other.to_string()));
    }
    expected = present;
  }
}

Result<> Directory::leave(const WorkerRecord& self, const Deadline& deadline) {
  MUSTER_ASSIGN(const auto record, find(self.worker.name, deadline));
  if (!record || record->worker.id != self.worker.id) return {};
  MUSTER_TRY(store_->delete_key(name_key(self.worker.name), deadline));
  return {};
}

Result<std::optional<WorkerRecord>> Directory::find(const std::string& name, const Deadline& deadline) {
  MUSTER_ASSIGN(const auto bytes, read(name_key(name), deadline));
  if (!bytes) return std::nullopt;
  MUSTER_ASSIGN(WorkerRecord record, parse_worker_record(*bytes));
  if (record.worker.name == name) return record;
  return fail(ErrorCode::kProtocol, fmt::format("the record of worker \"{}\" is that of {}", name, record.to_string()));
}

Result<std::vector<WorkerRecord>> Directory::list(const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t count, store_->add("ids", 0, deadline));
  std::vector<WorkerRecord> records;
  for (int64_t id = 0; id < count; ++id) {
    MUSTER_ASSIGN(const auto name, read(fmt::format("id/{}", id), deadline));
    if (!name) continue;
    MUSTER_ASSIGN(const auto record, find(to_string(*name), deadline));
    if (record && record->worker.id == id) records.push_back(*record);
  }
  return records;
}

Result<std::optional<Bytes>> Directory::read(const std::string& key, const Deadline& deadline) {
  // get() waits until the key exists, and a worker may leave at any time. This returns `other` for an absent key.
  const ByteView other = as_bytes("no value of a directory");
  MUSTER_ASSIGN(Bytes value, store_->compare_set(key, other, other, deadline));
  if (std::ranges::equal(value, other)) return std::nullopt;
  return value;
}

Result<> Directory::barrier(const std::string& name, int count, const Deadline& deadline) {
  return store_->barrier("barrier/" + name, count, deadline);
}

}  // namespace muster::rpc
