// Integrates 4 / (1 + x^2) from 0 to 1, each rank over its share of the intervals. Uses muster::core, without libtorch.
//
//   muster run --nproc-per-node 4 --no-python ./pi

#include <muster/group/group.h>
#include <muster/store/store.h>

#include <cstdio>
#include <cstdlib>

// What `muster run` tells each worker in its environment.
muster::GroupSpec this_worker() {
  const auto number = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoi(value) : -1;
  };
  muster::GroupSpec self{.rank = number("RANK"), .size = number("WORLD_SIZE")};
  self.generation = static_cast<uint64_t>(number("MUSTER_GENERATION"));
  return self;
}

double integrate(int rank, int size) {
  constexpr int kIntervals = 10'000'000;
  double sum = 0;
  for (int i = rank; i < kIntervals; i += size) {
    const double x = (i + 0.5) / kIntervals;
    sum += 4 / (1 + x * x) / kIntervals;
  }
  return sum;
}

// A function that can fail returns a Result: a value or an Error. MUSTER_ASSIGN returns the error to the caller.
muster::Result<> run() {
  const muster::GroupSpec self = this_worker();
  if (self.rank < 0) return muster::fail(muster::ErrorCode::kInvalidArgument, "start this with `muster run`");
  MUSTER_ASSIGN(const auto options, muster::group_options_from_environment());
  MUSTER_ASSIGN(const auto store, muster::store_from_environment(muster::Deadline::after(options.timeout)));
  MUSTER_ASSIGN(const auto group, muster::Group::form(*store, self, options));

  double sum = integrate(self.rank, self.size);
  MUSTER_TRY(group->all_reduce({&sum, 1, muster::Dtype::kFloat64}, muster::ReduceOp::kSum).wait());
  std::printf("rank %d of %d: pi is %.6f\n", self.rank, self.size, sum);
  return {};
}

int main() {
  const auto result = run();
  if (!result) std::fprintf(stderr, "pi: %s\n", result.error().to_string().c_str());
  return result ? 0 : 1;
}
