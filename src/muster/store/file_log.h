#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/io/fd.h"
#include "muster/store/state/state.h"

namespace muster {

/// A file that several processes append requests to; the grammar heads file_log.cpp. Whoever applies them from the
/// start reaches the same StoreState. Writers, in one process or several, are kept apart by flock(); readers need no
/// lock. Nothing here waits. Not thread-safe.
class FileLog {
 public:
  /// Creates the file when it is missing.
  static Result<std::unique_ptr<FileLog>> open(const std::string& path);

  using Apply = std::function<void(Request request, ClientId client)>;
  /// Reads what was appended since the last call, in order. kProtocol when the file holds something else.
  Result<> catch_up(const Apply& apply);

  enum class Outcome { kAppended, kBusy, kNotWanted };
  /// Unless another writer is at it (kBusy): catches up, asks `wanted`, then appends the request and applies it; nobody
  /// else can append in between. On an error the file is as it was.
  Result<Outcome> append(const Request& request, ClientId client, const Apply& apply,
                         const std::function<bool()>& wanted);

 private:
  FileLog(std::string path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  Result<uint64_t> size() const;
  Result<bool> read_record(uint64_t size, const Apply& apply);
  Result<bool> read_at(uint64_t offset, MutableByteView into) const;
  Result<> write_end(ByteView bytes);
  tl::unexpected<Error> failed(const char* action) const;

  std::string path_;
  Fd fd_;
  uint64_t end_ = 0;  // up to where this object has read: the header and whole records
};

}  // namespace muster
