#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "muster/flight/recorder.h"
#include "muster/group/group.h"

namespace muster {

/// The flight recorders of a group: one for its collectives, and one for its messages. Both are null if recording is
/// turned off. Thread-safe.
class GroupRecorders {
 public:
  /// `transport` and `id` are those of the group.
  GroupRecorders(GroupSpec membership, std::string transport, uint64_t id);

  Recorder* collectives() const { return collectives_.get(); }
  /// Created at the first call, because most groups send no messages.
  Recorder* messages();

  // For groups with a Work for each message.
  /// Call one of these before the message begins.
  Recorder::Ticket sending(const BufferView& data, Rank to, uint32_t tag);
  Recorder::Ticket receiving(const BufferView& data, Rank from, uint32_t tag);
  /// Returns `message`, whose end will be recorded.
  Work record_end(Work message, Recorder::Ticket ticket) const;

 private:
  std::shared_ptr<Recorder> create() const;

  const GroupSpec membership_;
  const std::string transport_;
  const uint64_t id_;
  const std::shared_ptr<Recorder> collectives_;
  std::once_flag first_message_;
  std::shared_ptr<Recorder> messages_;  ///< shared with messages that may end later than the group
};

}  // namespace muster
