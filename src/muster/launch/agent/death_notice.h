#pragma once

#include <string>

#include "muster/base/bytes.h"
#include "muster/store/session.h"
#include "muster/store/store.h"

namespace muster {

/// What the guard tells the others when its agent was killed, so that they need not wait for signs of life. It lies in
/// memory that both processes share: make it before the fork. The agent, on one thread, changes it.
class DeathNotice {
 public:
  struct Text {
    std::string upstream;  ///< the server above this node's proxy; empty: there is nobody to tell
    SessionId session{};   ///< of that proxy
    std::string root_url;
    Key inbox;   ///< the root's queue
    Bytes call;  ///< for it
  };
  DeathNotice();
  ~DeathNotice();
  DeathNotice(const DeathNotice&) = delete;
  DeathNotice& operator=(const DeathNotice&) = delete;

  void prepare(const Text& text);
  /// Within a few seconds. Nothing if none was prepared; that nobody hears it is logged.
  void say(const Bytes& secret) const;

 private:
  struct Page;
  Page* page_;  // null: there is no memory, and nothing is said
};

}  // namespace muster
