#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/folding.h"
#include "muster/collective/schedule/schedule_builder.h"

namespace muster {
namespace {

/// Both partners combine the lower rank's data first, so that they get the same bits.
class Doubling {
 public:
  explicit Doubling(const CollectiveSpec& spec)
      : rank_(spec.rank), fold_(spec), bytes_(tensor_bytes(spec)), received_(builder_.scratch(bytes_)) {}

  Schedule build() {
    if (fold_.folds_away()) {
      const uint32_t sent = builder_.send(fold_.partner(), current_);
      builder_.receive(fold_.partner(), output(0, bytes_), {sent});
      return builder_.take();
    }
    if (fold_.paired()) combine(fold_.partner(), builder_.receive(fold_.partner(), received_), Step::kNone);
    for (int distance = 1; distance < fold_.core(); distance *= 2) exchange(fold_.across(distance));
    if (fold_.paired()) builder_.send(fold_.partner(), current_, {combined_});
    return builder_.take();
  }

 private:
  void exchange(Rank partner) {
    const uint32_t sent = builder_.send(partner, current_, {combined_});
    combine(partner, builder_.receive(partner, received_, {combined_}), sent);
  }

  // Writes the output, so it depends on the send from there.
  void combine(Rank partner, uint32_t received, uint32_t sent) {
    combined_ = builder_.reduce(received_, current_, output(0, bytes_), partner < rank_, {received, sent});
    current_ = output(0, bytes_);
  }

  ScheduleBuilder builder_;
  Rank rank_;
  Folding fold_;
  size_t bytes_;
  Range received_;
  Range current_ = input(0, bytes_);
  uint32_t combined_ = Step::kNone;  // the step that made current_
};

}  // namespace

Schedule recursive_doubling_all_reduce(const CollectiveSpec& spec) {
  check_spec(spec);
  return spec.size == 1 ? copy_input(tensor_bytes(spec)) : Doubling(spec).build();
}

}  // namespace muster
