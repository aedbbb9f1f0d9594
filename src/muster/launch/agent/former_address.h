#pragma once

#include <memory>
#include <string>

#include "muster/launch/options/options.h"

namespace muster {

/// Watches the address where a job's first root was. A `muster run` that starts there knows no other root, and would
/// begin a second job. So it is told to move to this job. As long as this object exists, it tries to connect once a
/// second.
class FormerAddress {
 public:
  /// `root_url`: where the job's root is now.
  FormerAddress(const RunOptions& options, const Bytes& secret, const std::string& root_url);
  ~FormerAddress();
  FormerAddress(const FormerAddress&) = delete;

 private:
  struct Watch;
  const std::shared_ptr<Watch> watch_;
};

}  // namespace muster
