#pragma once

#include <string>

#include "muster/base/clock.h"
#include "muster/base/random.h"
#include "muster/store/state/state.h"

namespace muster {

/// Random requests of one client of a history, determined by a seed. They use few keys, so that clients compete. A key
/// begins with the seed and a slash. Then follows a letter for its kind, such as q for queues and b for barriers.
class RandomRequests {
 public:
  /// If `wide` is set, some requests count or list all keys. A history with such requests is expensive to check.
  RandomRequests(uint64_t seed, int client, bool barriers, bool wide = false);

  Request next();
  /// The timeout of a wait that may never end.
  Duration wait_timeout() { return Duration(random_.below(8'000'000)); }
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

/// True if the request may wait for another client.
bool may_wait(const Request& request);

}  // namespace muster
