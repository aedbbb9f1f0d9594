#include "muster/launch/rendezvous/rendezvous_client.h"

namespace muster {
Result<std::unique_ptr<RendezvousClient>> RendezvousClient::start(std::unique_ptr<Store> store, Options options,
                                                                  Events events) {
  std::unique_ptr<RendezvousClient> made(new RendezvousClient(std::move(store), std::move(options), std::move(events)));
  // Events that were published before the join are not for this node.
  MUSTER_ASSIGN(const int64_t told,
                made->store_->add(made->keys_.event_count(), 0, Deadline::after(made->options_.heartbeat_timeout)));
  made->first_event_ = told + 1;
  made->sender_ = std::thread([self = made.get()] { self->send_all(); });
  made->heartbeats_ = std::thread([self = made.get()] { self->send_heartbeats(); });
  made->receiver_ = std::thread([self = made.get()] { self->receive(); });
  return made;
}

RendezvousClient::RendezvousClient(std::unique_ptr<Store> store, Options options, Events events)
    : store_(std::move(store)), options_(std::move(options)), events_(std::move(events)), keys_(options_.run_id) {}

RendezvousClient::~RendezvousClient() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (sender_.joinable()) sender_.join();
  if (heartbeats_.joinable()) heartbeats_.join();
  if (receiver_.joinable()) receiver_.join();
}

void RendezvousClient::send(NodeEvent event) {
  event.id = options_.node_id;
  enqueue([this, bytes = encode(event)](Store& store, const Deadline& deadline) {
    return store.queue_push(keys_.inbox(), bytes, deadline);
  });
}

void RendezvousClient::join(NodeInfo node) {
  node.id = options_.node_id;
  send({.kind = NodeEvent::Kind::kJoin, .node = std::move(node)});
}

void RendezvousClient::publish(Key key, Bytes value) {
  enqueue([key = std::move(key), value = std::move(value)](Store& store, const Deadline& deadline) {
    return store.set(key, value, deadline);
  });
}

void RendezvousClient::enqueue(Task task) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

bool RendezvousClient::flush(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return lost_ || (tasks_.empty() && !sending_); };
  while (!idle() && !deadline.passed()) changed_.wait_for(lock, deadline.left());
  return idle() && !lost_;
}

void RendezvousClient::send_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || lost_ || !tasks_.empty(); });
    if (ending_ || lost_) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    sending_ = true;
    lock.unlock();
    const auto sent = task(*store_, Deadline::after(options_.heartbeat_timeout));
    lock.lock();
    sending_ = false;
    changed_.notify_all();
    if (sent) continue;
    lock.unlock();
    return on_lost(sent.error());
  }
}

// Runs on a separate thread, because publishing a value may take as long as the heartbeat timeout.
void RendezvousClient::send_heartbeats() {
  const Bytes alive = encode(NodeEvent{NodeEvent::Kind::kAlive, options_.node_id});
  std::unique_lock lock(mutex_);
  while (true) {
    const Deadline next = Deadline::after(options_.heartbeat_timeout / 5);
    while (!ending_ && !lost_ && !next.passed()) changed_.wait_for(lock, next.left());
    if (ending_ || lost_) return;
    lock.unlock();
    const auto sent = store_->queue_push(keys_.inbox(), alive, Deadline::after(options_.heartbeat_timeout));
    if (!sent) return on_lost(sent.error());
    lock.lock();
  }
}

void RendezvousClient::receive() {
  for (int64_t number = first_event_;; ++number) {
    const auto more = receive_one(number);
    if (!more) return on_lost(more.error());
    if (!*more) return;
  }
}

// Returns false after the last event.
Result<bool> RendezvousClient::receive_one(int64_t number) {
  MUSTER_ASSIGN(const Bytes bytes, store_->get(keys_.event(number), Deadline::never()));
  MUSTER_ASSIGN(const JobEvent event, parse_job_event(bytes));
  const bool for_me = event.id.empty() || event.id == options_.node_id;
  if (!for_me) return true;
  std::optional<Assignment> assignment;
  if (event.kind == JobEvent::Kind::kStart) {
    const Deadline deadline = Deadline::after(options_.heartbeat_timeout);
    const Key key = keys_.assignment(event.generation, options_.node_id);
    MUSTER_ASSIGN(const bool assigned, store_->check({key}, deadline));
    if (assigned) {
      MUSTER_ASSIGN(const Bytes value, store_->get(key, deadline));
      MUSTER_ASSIGN(assignment, parse_assignment(value));
    }
  }
  events_.job_event(event, assignment);
  return event.kind != JobEvent::Kind::kOutcome && event.kind != JobEvent::Kind::kRefused;
}

void RendezvousClient::on_lost(const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(lost_, true)) return;
    tasks_.clear();
    changed_.notify_all();
  }
  events_.lost(why);
}

}  // namespace muster
