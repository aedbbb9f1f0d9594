#pragma once

#include <string>

#include "muster/base/clock.h"
#include "muster/base/random.h"
#include "muster/store/state/state.h"

namespace muster {

/// What one client of a history asks for, at random but from a seed: all operations that concern single keys, on few
/// keys, so that clients meet. Keys begin with the seed, a slash, and q if they are queues', b if barriers'.
class Whims {
 public:
  /// `wide`: now and then it counts or lists all keys, too. That joins a history's keys, which is then hard to check.
  Whims(uint64_t seed, int client, bool barriers, bool wide = false);

  Request next();
  /// How long it waits for what may not come.
  Duration patience() { return Duration(random_.below(8'000'000)); }
  Random& random() { return random_; }

 private:
  Key key(const char* kind, uint64_t count);
  Bytes value();
  Request about_value();
  Request about_counter();
  Request about_queue();
  Request about_several();
  Request about_all();

  Random random_;
  std::string prefix_;
  int client_;
  bool barriers_, wide_;
  int serial_ = 0;
  int calls_ = 0;
  Bytes last_;
};

/// Whether the request waits for something that another client does.
bool may_wait(const Request& request);

}  // namespace muster
