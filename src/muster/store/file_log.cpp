// The file of a file store. Numbers are little-endian:
//
//   file   := "MUSTLOG1" record*
//   record := checksum:u64 client:u64 frame         checksum: FNV-1a of the rest of the record
//   frame  := a request, as in messages.cpp
//
// Only the holder of the lock appends. A record that is too short or does not match its checksum is still being
// written, or its writer was killed. Readers treat such a record as the end of the file, and the next holder of the
// lock removes it. A record with a correct checksum never changes, so readers need no lock.

#include "muster/store/file_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

#include "muster/base/hash.h"
#include "muster/store/protocol/messages.h"

namespace muster {
namespace {

constexpr std::string_view kLogMagic = "MUSTLOG1";
constexpr size_t kRecordHeaderBytes = 2 * sizeof(uint64_t) + kFrameHeaderBytes;

struct Unlock {
  int fd;
  ~Unlock() { flock(fd, LOCK_UN); }
};

}  // namespace

Result<std::unique_ptr<FileLog>> FileLog::open(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) return fail_errno(errno, "cannot open the file store " + path);
  return std::unique_ptr<FileLog>(new FileLog(path, std::move(fd)));
}

tl::unexpected<Error> FileLog::failed(const char* action) const {
  return fail_errno(errno, std::string("cannot ") + action + " the file store " + path_);
}

Result<uint64_t> FileLog::size() const {
  struct stat status {};
  if (fstat(fd_.get(), &status) != 0) return failed("stat");
  return static_cast<uint64_t>(status.st_size);
}

// False if the file ends before `into` is full.
Result<bool> FileLog::read_at(uint64_t offset, MutableByteView into) const {
  while (!into.empty()) {
    const ssize_t n = pread(fd_.get(), into.data(), into.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("read");
    if (n == 0) return false;
    offset += static_cast<size_t>(n);
    into = into.subspan(static_cast<size_t>(n));
  }
  return true;
}

// False if the rest of the file is not a whole record.
Result<bool> FileLog::read_record(uint64_t size, const Apply& apply) {
  if (size - end_ < kRecordHeaderBytes) return false;
  Bytes record(kRecordHeaderBytes);
  MUSTER_ASSIGN(bool whole, read_at(end_, record));
  const auto header = decode_frame_header(ByteView(record).last(kFrameHeaderBytes), kMaxMessageBytes);
  if (!whole || !header || size - end_ - kRecordHeaderBytes < header->length) return false;
  record.resize(kRecordHeaderBytes + header->length);
  MUSTER_ASSIGN(whole, read_at(end_ + kRecordHeaderBytes, MutableByteView(record).subspan(kRecordHeaderBytes)));
  Reader in(record);
  MUSTER_ASSIGN(const auto checksum, in.get<uint64_t>());
  if (!whole || checksum != fnv1a(ByteView(record).subspan(sizeof checksum))) return false;
  MUSTER_ASSIGN(const auto client, in.get<ClientId>());
  MUSTER_ASSIGN(Request request, decode_request(*header, ByteView(record).subspan(kRecordHeaderBytes)));
  end_ += record.size();
  apply(std::move(request), client);
  return true;
}

Result<> FileLog::catch_up(const Apply& apply) {
  MUSTER_ASSIGN(const uint64_t size, this->size());
  if (size < end_) return fail(ErrorCode::kProtocol, "the file store " + path_ + " was truncated by another program");
  if (end_ == 0) {
    if (size < kLogMagic.size()) return {};  // a new file, or its first writer was killed
    Bytes magic(kLogMagic.size());
    MUSTER_ASSIGN(const bool whole, read_at(0, magic));
    if (!whole || to_string(magic) != kLogMagic) {
      return fail(ErrorCode::kProtocol, path_ + " is not a muster file store; use another path");
    }
    end_ = kLogMagic.size();
  }
  bool more = true;
  while (more && end_ < size) {
    MUSTER_ASSIGN(more, read_record(size, apply));
  }
  return {};
}

Result<> FileLog::write_end(ByteView bytes) {
  uint64_t offset = end_;
  while (!bytes.empty()) {
    const ssize_t n = pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const auto error = failed("append to");
      // Readers ignore the incomplete record. Truncating only frees its space, so a failure to truncate does no harm.
      if (ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) return error;
      return error;
    }
    offset += static_cast<size_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  end_ = offset;
  return {};
}

Result<FileLog::Outcome> FileLog::append(const Request& request, ClientId client, const Apply& apply,
                                         const std::function<bool()>& wanted) {
  MUSTER_ASSIGN(const Bytes frame, encode_request(request));
  const Bytes body = Writer().put(client).put_raw(frame).take();
  const Bytes record = Writer().put(fnv1a(body)).put_raw(body).take();
  if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK || errno == EINTR) return Outcome::kBusy;
    return failed("lock");
  }
  const Unlock unlock{fd_.get()};
  MUSTER_TRY(catch_up(apply));
  if (!wanted()) return Outcome::kNotWanted;
  MUSTER_ASSIGN(const uint64_t size, this->size());
  if (size > end_ && ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) return failed("repair");
  if (end_ == 0) MUSTER_TRY(write_end(as_bytes(kLogMagic)));
  MUSTER_TRY(write_end(record));
  apply(request, client);
  return Outcome::kAppended;
}

}  // namespace muster
