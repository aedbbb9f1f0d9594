#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/io/fd.h"
#include "muster/store/state/state.h"

namespace muster {

/// A file to which several processes append requests; see file_log.cpp for the grammar. A process that applies all
/// requests in order gets the same StoreState as every other process. Writers exclude each other with flock(); readers
/// need no lock. No function blocks on the lock. Not thread-safe.
class FileLog {
 public:
  /// Creates the file if it does not exist.
  static Result<std::unique_ptr<FileLog>> open(const std::string& path);

  using Apply = std::function<void(Request request, ClientId client)>;
  /// Reads the requests that were appended since the last call, in order. kProtocol if the file is not a log.
  Result<> catch_up(const Apply& apply);

  enum class Outcome { kAppended, kBusy, kNotWanted };
  /// Takes the lock (kBusy if another writer holds it), catches up and calls `wanted` (kNotWanted if it returns false).
  /// Then appends the request and applies it. After an error the file is unchanged.
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
  uint64_t end_ = 0;  // the end of the last whole record that was read
};

}  // namespace muster
