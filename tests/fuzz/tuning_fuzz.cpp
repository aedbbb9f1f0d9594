// The tuning record of a machine, from a user's file or from rank 0. A record that is accepted must give the same
// record after it is written and parsed again, and must lead to a choice of an algorithm.
#include <string_view>

#include "muster/base/check.h"
#include "muster/collective/cost/tuning.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto tuning = muster::Tuning::decode(text);
  if (!tuning) return 0;
  const auto again = muster::Tuning::decode(tuning->encode());
  MUSTER_CHECK(again && again->machine == tuning->machine && again->wanted == tuning->wanted,
               "a record changes when repeated");
  muster::CollectiveSpec problem;
  problem.collective = muster::Collective::kAllReduce;
  problem.size = 5;
  problem.count = 1000;
  tuning->apply(problem, "tcp", 2);
  MUSTER_CHECK(muster::plan(problem).has_value(), "a record forbids every algorithm");
  return 0;
}
