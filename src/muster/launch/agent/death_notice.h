#pragma once

#include <string>

#include "muster/base/bytes.h"
#include "muster/store/session.h"
#include "muster/store/store.h"

namespace muster {

/// What the monitor tells the root when its agent was killed, so that the root need not wait for missing heartbeats. It
/// is in memory that both processes share: construct it before the fork. One thread of the agent changes it.
class DeathNotice {
 public:
  struct Message {
    std::string upstream;  ///< the server above this node's proxy; empty: no other node must be told
    SessionId session{};   ///< the proxy's session there
    std::string root_url;
    Key inbox;    ///< the queue of the root's store
    Bytes event;  ///< a NodeEvent for that queue
  };
  DeathNotice();
  ~DeathNotice();
  DeathNotice(const DeathNotice&) = delete;
  DeathNotice& operator=(const DeathNotice&) = delete;

  void prepare(const Message& message);
  /// Takes at most a few seconds. Sends nothing if nothing was prepared; a failure is logged.
  void send(const Bytes& secret) const;

 private:
  struct Page;
  Page* page_;  // null: no memory was available, and nothing is sent
};

}  // namespace muster
