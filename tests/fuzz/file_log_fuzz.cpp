// The file of a file store. The first byte says whether the rest is the file itself, or records without checksums. No
// mutation would guess a checksum, so the fuzzer inserts them. For any content, all readers must read to the same end,
// and the next reader must find a record that is appended.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "muster/base/check.h"
#include "muster/store/file_log.h"
#include "muster/store/protocol/messages.h"

namespace muster {
namespace {

uint64_t fnv1a(ByteView bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

Bytes with_checksums(ByteView records) {
  constexpr size_t kBefore = sizeof(uint64_t) + kFrameHeaderBytes;
  Writer file;
  file.put_raw(as_bytes("MUSTLOG1"));
  while (records.size() >= kBefore) {
    const auto header = decode_frame_header(records.subspan(sizeof(uint64_t), kFrameHeaderBytes), kMaxMessageBytes);
    const size_t length = header ? header->length : 0;
    const ByteView record = records.first(std::min(records.size(), kBefore + length));
    file.put(fnv1a(record)).put_raw(record);
    records = records.subspan(record.size());
  }
  return file.take();
}

struct Parsed {
  Bytes requests;  // the parsed requests, encoded again
  bool good = false;
  friend bool operator==(const Parsed&, const Parsed&) = default;
};

void read_file(ByteView content) {
  static const int fd = memfd_create("muster-file-log-fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  MUSTER_CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, content.data(), content.size(), 0) == ssize_t(content.size()),
               "the file cannot be written");
  Parsed first, second;
  const auto record_in = [](Parsed& parsed) {
    return [&parsed](const Request& request, ClientId) {
      const Bytes again = encode_request(request).value();
      parsed.requests.insert(parsed.requests.end(), again.begin(), again.end());
    };
  };
  const auto log = std::move(FileLog::open(path).value());
  first.good = log->catch_up(record_in(first)).has_value();
  MUSTER_CHECK(first.requests.size() <= content.size(), "more was read than was there");
  const Request request{StoreOperation::kSet, 1, {"key"}, {to_bytes("value")}};
  const auto appended = log->append(request, 1, record_in(first), [] { return true; });
  MUSTER_CHECK(appended.has_value() == first.good, "a bad file was appended to, or a good one was not");
  const auto again = std::move(FileLog::open(path).value());
  second.good = again->catch_up(record_in(second)).has_value();
  MUSTER_CHECK(first == second, "another reader of the file finds something else");
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const muster::ByteView rest(data + 1, size - 1);
  muster::read_file(data[0] % 2 == 0 ? muster::Bytes(rest.begin(), rest.end()) : muster::with_checksums(rest));
  return 0;
}
