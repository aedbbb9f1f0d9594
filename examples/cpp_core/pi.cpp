// Integrates 4 / (1 + x^2) from 0 to 1, each rank over its share of the intervals. Uses muster::core, without libtorch.
//
//   muster run --nproc-per-node 4 --no-python ./pi

#include <muster/base/run_main.h>
#include <muster/group/group.h>

#include <cstdio>
#include <utility>

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
  MUSTER_ASSIGN(const auto group, muster::Group::join_job());
  const auto [rank, size] = std::pair{group->membership().rank, group->membership().size};

  double sum = integrate(rank, size);
  MUSTER_TRY(group->all_reduce({&sum, 1, muster::Dtype::kFloat64}, muster::ReduceOp::kSum).wait());
  std::printf("rank %d of %d: pi is %.6f\n", rank, size, sum);
  return {};
}

int main() { return muster::run_main(run); }
