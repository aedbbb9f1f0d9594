#include <cstdlib>
#include <utility>

#include "muster/group/group.h"
#include "muster/group/hold_store.h"
#include "muster/store/job_store.h"

namespace muster {

Result<std::shared_ptr<Group>> Group::join_job() {
  GroupSpec self;
  MUSTER_ASSIGN(self.rank, job_number("RANK"));
  MUSTER_ASSIGN(self.size, job_number("WORLD_SIZE"));
  if (std::getenv("MUSTER_GENERATION") != nullptr) {
    MUSTER_ASSIGN(const int generation, job_number("MUSTER_GENERATION"));
    self.generation = static_cast<uint64_t>(generation);
  }
  MUSTER_ASSIGN(const GroupOptions options, group_options_from_environment());
  MUSTER_ASSIGN(JobStore opened, open_job_store(options.credentials, self.rank == 0, Deadline::after(options.timeout)));
  const auto job = std::make_shared<JobStore>(std::move(opened));
  MUSTER_ASSIGN(auto group, form(*job->store, self, options));
  return hold_store({job, job->store.get()}, std::move(group));
}

Result<std::unique_ptr<Store>> Group::job_store() {
  MUSTER_ASSIGN(const GroupOptions options, group_options_from_environment());
  MUSTER_ASSIGN(JobStore job, open_job_store(options.credentials, /*serve=*/false, Deadline::after(options.timeout)));
  return std::move(job.store);
}

}  // namespace muster
