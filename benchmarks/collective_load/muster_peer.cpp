// RANK RANKS STORE behind the control socket's path: who meets where.
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "muster/group/group.h"
#include "muster/shm/arena.h"
#include "peer.h"

namespace muster::load {
namespace {

template <class T>
T must(Result<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "muster: %s\n", result.error().to_string().c_str());
  std::exit(1);
}

void must(const Work& work) {
  if (const Result<> result = work.wait(); !result) {
    std::fprintf(stderr, "muster: %s\n", result.error().to_string().c_str());
    std::exit(1);
  }
}

BufferView view(const float* data, size_t count) {
  return {const_cast<float*>(data), count, Dtype::kFloat32};  // an input is only read
}

int number(std::string_view text) {
  int value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;  // a wrong one is refused where the group forms
}

class MusterPeer final : public Peer {
 public:
  MusterPeer(std::unique_ptr<Store> store, const GroupSpec& membership)
      : store_(std::move(store)),
        group_(must(Group::form(*store_, membership, must(group_options_from_environment())))) {}

  int rank() const override { return group_->membership().rank; }
  int size() const override { return group_->membership().size; }

  float* allocate(size_t count) override {
    if (!group_->arena()) return nullptr;
    own_.push_back(must(group_->arena()->allocate(count * sizeof(float))));
    return static_cast<float*>(own_.back());
  }
  void release() override {
    for (void* block : own_) group_->arena()->free(block);
    own_.clear();
  }

  void all_reduce(float* data, size_t count) override { must(group_->all_reduce(view(data, count), ReduceOp::kSum)); }
  void broadcast(float* data, size_t count) override { must(group_->broadcast(view(data, count), 0)); }
  void all_gather(const float* input, float* output, size_t block) override {
    must(group_->all_gather(view(input, block), view(output, block * size())));
  }
  void reduce_scatter(const float* input, float* output, size_t block) override {
    must(group_->reduce_scatter(view(input, block * size()), view(output, block), ReduceOp::kSum));
  }
  void all_to_all(const float* input, float* output, size_t block) override {
    must(group_->all_to_all(view(input, block * size()), view(output, block * size())));
  }
  void barrier() override { must(group_->barrier()); }

 private:
  std::unique_ptr<Store> store_;
  std::unique_ptr<Group> group_;
  std::vector<void*> own_;  ///< blocks of the arena
};

}  // namespace

std::unique_ptr<Peer> join(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: muster-collective-load CONTROL RANK RANKS STORE\n");
    std::exit(2);
  }
  GroupSpec membership;
  membership.rank = number(argv[2]);
  membership.size = number(argv[3]);
  const Deadline deadline = Deadline::after(std::chrono::minutes(1));
  return std::make_unique<MusterPeer>(must(open_store(argv[4], {}, deadline)), membership);
}

}  // namespace muster::load
