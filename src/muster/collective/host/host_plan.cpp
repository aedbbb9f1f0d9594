#include "muster/collective/host/host_plan.h"

#include <fmt/format.h>

#include <cmath>

#include "muster/base/bytes.h"
#include "muster/shm/host_comm_memory.h"

namespace muster {
namespace {

/// Builds one plan.
class Planner {
 public:
  explicit Planner(const HostPlanInputs& question)
      : question_(question),
        shape_(host_comm_shape(question.ranks, question.cores)),
        ranks_(static_cast<double>(question.ranks)),
        bytes_(static_cast<double>(question.bytes)) {
    plan_.awaited = question.ranks - 1;
    plan_.tensors = bytes_;
  }

  HostPlan plan() {
    switch (question_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        reduction();
        break;
      case Collective::kBarrier:
        plan_.form = "one word per rank";
        say("every rank publishes an empty step, and waits for all the others'");
        break;
      case Collective::kBroadcast:
      case Collective::kScatter:
        from_root();
        break;
      case Collective::kAllGather:
      case Collective::kGather:
        gathering();
        break;
      default:
        pieces();
    }
    return plan_;
  }

  HostPlan direct() {
    plan_.form = "direct";
    plan_.waits = 2;
    plan_.chunk = question_.bytes;
    switch (question_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        direct_reduction();
        break;
      case Collective::kBroadcast:
        plan_.copied = bytes_;
        say("the others copy {} from the root's tensor into theirs", size(bytes_));
        break;
      case Collective::kScatter:
        plan_.copied = bytes_;
        say("every rank copies its block, {}, from the root's tensor", size(bytes_));
        break;
      case Collective::kReduceScatter:
        of_blocks(ranks_, 0);
        say("every rank combines its block, {}, of all tensors into its output", size(bytes_));
        break;
      default:
        of_blocks(question_.in_place ? ranks_ - 1 : ranks_, 0);
        say("{} copies {} from the others' tensors",
            question_.collective == Collective::kGather ? "the root" : "every rank", size((ranks_ - 1) * bytes_));
    }
    plan_.steps =
        "first every rank publishes where its tensor is; a last wait tells that no rank reads or writes any more\n" +
        plan_.steps;
    return plan_;
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> line, Args&&... args) {
    plan_.steps += fmt::format(line, std::forward<Args>(args)...) + '\n';
  }
  static std::string size(double bytes) { return format_bytes(static_cast<uint64_t>(std::ceil(bytes))); }
  bool all() const { return question_.collective == Collective::kAllReduce; }

  /// Sets the chunks for blocks of up to `largest` bytes. They are in slots, or, if all bytes of a step fit, in the
  /// cache line that announces the step.
  void cut(size_t largest, size_t chunk, double of_each = 1) {
    plan_.chunk = std::max<size_t>(1, std::min(largest, chunk));
    plan_.chunks = plan_.waits = chunk_count(largest, plan_.chunk);
    in_line_ = plan_.chunks == 1 && static_cast<double>(largest) * of_each <= kStepPayload;
  }
  const char* location() const { return in_line_ ? "the line that announces its step" : "its slot"; }
  const char* locations() const { return in_line_ ? "lines" : "slots"; }
  const char* form(const char* otherwise) const { return in_line_ ? "inline payload" : otherwise; }
  double chunk() const { return static_cast<double>(plan_.chunk); }
  void of_blocks(double copied, double combined) {
    plan_.copied = copied * bytes_;
    plan_.combined = combined * bytes_;
    plan_.tensors = (ranks_ + 1) * bytes_;
  }

  void reduction() {
    const ReduceForm form = reduce_form(question_.collective, question_.bytes, question_.ranks, shape_.has_leader);
    if (form == ReduceForm::kTwoShots) return two_shots();
    cut(question_.bytes, host_chunk(shape_.slot_bytes, question_.element));
    plan_.copied = ranks_ * bytes_;
    plan_.combined = (ranks_ - 1) * bytes_;
    say("every rank writes its {} to {}", plan_.chunks > 1 ? "next chunk" : "tensor", location());
    if (form == ReduceForm::kOneShot) {
      plan_.form = this->form("one shot");
      say("and {} {} ranks' into its tensor when the others have arrived", all() ? "combines all" : "the root combines",
          question_.ranks);
      return;
    }
    plan_.form = "through the leader";
    plan_.waits = 2;
    plan_.copied += 2 * bytes_;
    say("rank 0 waits for all, combines them, and writes the result to {}", location());
    say("the others wait for rank 0 alone, and copy the result from there");
  }

  void two_shots() {
    plan_.form = "two shots";
    cut(question_.bytes, two_shot_chunk(shape_.slot_bytes, question_.ranks, question_.element));
    ++plan_.waits;
    plan_.copied = (all() ? 3 : 2) * (ranks_ - 1) / ranks_ * bytes_;
    if (!all()) plan_.copied += bytes_ / ranks_;
    plan_.combined = (ranks_ - 1) / ranks_ * bytes_;
    const double part = chunk() / ranks_;
    say("of each chunk every rank writes what the others combine, {}, to its slot", size(chunk() - part));
    say("combines its own part, {}, of all slots into its slot{}", size(part), all() ? " and its tensor" : "");
    say("and {} the others' results from theirs", all() ? "copies" : "the root copies");
    say("a step carries the input of one chunk and the results of the one before: a wait for each, and one more");
  }

  void from_root() {
    const bool scatters = question_.collective == Collective::kScatter;
    plan_.awaited = 1;
    if (scatters) {
      cut(question_.bytes, piece_room(shape_.slot_bytes, question_.ranks, question_.element), ranks_);
      of_blocks(ranks_, 0);
    } else {
      cut(question_.bytes, host_chunk(shape_.slot_bytes, question_.element));
      plan_.copied = bytes_;
    }
    plan_.copied += chunk();  // until the first chunk can be read
    plan_.form = form("chunks from the root");
    say("the root writes {} to {}, up to {} steps ahead", scatters ? "a piece for each other rank" : "its tensor",
        location(), in_line_ ? kStepRecords : kHostCommSlots);
    say("the others wait for the root alone, and copy {} into their tensors", scatters ? "theirs" : "it");
  }

  void gathering() {
    const bool all_of_them = question_.collective == Collective::kAllGather;
    cut(question_.bytes, host_chunk(shape_.slot_bytes, question_.element));
    // The copies: from each other rank; of the own block to its slot, except at the root of a gather; and of the own
    // block to the output, if it is not in place.
    of_blocks(ranks_ - 1 + (all_of_them ? 1 : 0) + (question_.in_place ? 0 : 1), 0);
    plan_.form = form("chunks from every rank");
    say("every rank writes its block to {}, a chunk ahead of the one that is read", location());
    say("{} waits for all, and copies their chunks to where they belong", all_of_them ? "every rank" : "the root");
  }

  /// reduce_scatter and all_to_all.
  void pieces() {
    const bool reduces = question_.collective == Collective::kReduceScatter;
    const size_t header = question_.to_root ? uneven_header(question_.ranks) : 0;
    const size_t largest = header == 0 ? question_.bytes : SIZE_MAX;
    cut(question_.bytes, piece_of(largest, shape_.slot_bytes, question_.ranks, question_.element, header), ranks_);
    in_line_ = in_line_ && header == 0;
    const double others = ranks_ - 1;
    if (question_.to_root) {
      of_blocks(ranks_, 0);
      plan_.copied += chunk();
    } else {
      of_blocks(2 * others + (reduces ? 0 : 1), reduces ? others : 0);
    }
    plan_.form = form("pieces for every rank");
    say("every rank writes a piece for {} to {}", question_.to_root ? "the root" : "each other", location());
    say("{} waits for all, and {} those for itself from their {}", question_.to_root ? "the root" : "every rank",
        reduces ? "combines" : "copies", locations());
  }

  /// One pass combines the data of the other ranks' tensors into its place, so this costs no more than a copy.
  void direct_reduction() {
    const double part = bytes_ / ranks_;
    plan_.copied = (ranks_ - 1) * part * (all() ? 2 : 1);
    say("every rank combines its part, {}, of all tensors into {}", size(part),
        all() ? "its own, and copies it into all others" : "the root's");
  }

  const HostPlanInputs& question_;
  const HostCommShape shape_;
  const double ranks_, bytes_;
  HostPlan plan_;
  bool in_line_ = false;
};

/// Interpolates between the speed of cached data and the speed of memory, by the size of the tensors.
double copy_speed(const MemoryCosts& costs, double tensors) {
  const double span = std::log(kUncachedTensors / kCachedTensors);
  const double way = std::clamp(std::log(std::max(1.0, tensors) / kCachedTensors) / span, 0.0, 1.0);
  return costs.cached_bytes_per_second * std::pow(costs.bytes_per_second / costs.cached_bytes_per_second, way);
}

}  // namespace

bool goes_direct(const HostPlanInputs& question) {
  if (question.collective == Collective::kBarrier || host_comm_shape(question.ranks, question.cores).has_leader)
    return false;
  return question.bytes * (has_input_blocks(question.collective) ? question.ranks : 1) >= kMinSharedTensorBytes;
}

HostPlan plan_on_host(const HostPlanInputs& question) {
  Planner planner(question);
  return question.direct ? planner.direct() : planner.plan();
}

double predict(const HostPlan& plan, const HostPlanInputs& question, const MachineCosts& machine) {
  const MemoryCosts& costs = machine.memory;
  const double load = static_cast<double>(question.ranks) / std::max(1, question.cores);
  const double wait = load > 1 ? load * costs.turn : static_cast<double>(plan.awaited) * costs.wait;
  return static_cast<double>(plan.waits) * wait +
         std::max(1.0, load) *
             (plan.copied / copy_speed(costs, plan.tensors) + plan.combined / machine.reduce_bytes_per_second);
}

}  // namespace muster
