#pragma once

#include <string>

#include "muster/base/bytes.h"
#include "muster/store/session.h"
#include "muster/store/store.h"

namespace muster {

/// The message that the monitor sends to the root after its agent was killed, so that the root does not have to wait
/// for missing heartbeats. The message is in memory that both processes share: construct this object before the fork.
/// Only one thread of the agent changes it.
class DeathNotice {
 public:
  struct Message {
    std::string upstream;  ///< the server above this node's proxy; empty: nothing is sent
    SessionId session{};   ///< the proxy's session at `upstream`
    std::string root_url;
    Key inbox;    ///< the queue of the root's store
    Bytes event;  ///< a NodeEvent for that queue
  };
  DeathNotice();
  ~DeathNotice();
  DeathNotice(const DeathNotice&) = delete;
  DeathNotice& operator=(const DeathNotice&) = delete;

  void prepare(const Message& message);
  /// Takes at most a few seconds. Sends nothing if nothing was prepared. Logs a failure.
  void send(const Bytes& secret) const;

 private:
  struct Page;
  Page* page_;  // null: no memory was available, so nothing is sent
};

}  // namespace muster
