#include "muster/group/recorders.h"

#include <utility>

namespace muster {

GroupRecorders::GroupRecorders(GroupSpec membership, std::string transport, uint64_t id)
    : membership_(std::move(membership)), transport_(std::move(transport)), id_(id), collectives_(create()) {}

std::shared_ptr<Recorder> GroupRecorders::create() const {
  std::shared_ptr<Recorder> recorder = Recorder::create(membership_, Recorder::entries_from_environment());
  if (recorder) recorder->set_group(transport_, id_);
  return recorder;
}

Recorder* GroupRecorders::messages() {
  std::call_once(first_message_, [this] {
    if (collectives_) messages_ = create();
  });
  return messages_.get();
}

Recorder::Ticket GroupRecorders::sending(const BufferView& data, Rank to, uint32_t tag) {
  Recorder* const recorder = messages();
  return recorder != nullptr ? recorder->sending(data, to, tag, current_call_site()) : 0;
}

Recorder::Ticket GroupRecorders::receiving(const BufferView& data, Rank from, uint32_t tag) {
  Recorder* const recorder = messages();
  return recorder != nullptr ? recorder->receiving(data, from, tag, current_call_site()) : 0;
}

Work GroupRecorders::record_end(Work message, Recorder::Ticket ticket) const {
  if (!messages_) return message;
  if (message.done()) {
    messages_->ended(ticket, message.result());
  } else {
    message.on_done([recorder = messages_, ticket](const Result<>& result) { recorder->ended(ticket, result); });
  }
  return message;
}

}  // namespace muster
