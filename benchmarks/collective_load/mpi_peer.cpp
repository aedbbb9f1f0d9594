// Compiled by the wrapper of each MPI that is installed; errors end the job (MPI_ERRORS_ARE_FATAL is MPI's default).
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include "peer.h"

namespace muster::load {
namespace {

class MpiPeer final : public Peer {
 public:
  MpiPeer(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  ~MpiPeer() override { MPI_Finalize(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(float* data, size_t count) override {
    MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  void broadcast(float* data, size_t count) override {
    MPI_Bcast(data, static_cast<int>(count), MPI_FLOAT, 0, MPI_COMM_WORLD);
  }
  void all_gather(const float* input, float* output, size_t block) override {
    const int count = static_cast<int>(block);
    MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
  }
  void reduce_scatter(const float* input, float* output, size_t block) override {
    MPI_Reduce_scatter_block(input, output, static_cast<int>(block), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  void all_to_all(const float* input, float* output, size_t block) override {
    const int count = static_cast<int>(block);
    MPI_Alltoall(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
  }
  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }

 private:
  int rank_ = 0, size_ = 1;
};

}  // namespace

std::unique_ptr<Peer> join(int argc, char** argv) { return std::make_unique<MpiPeer>(argc, argv); }

}  // namespace muster::load
