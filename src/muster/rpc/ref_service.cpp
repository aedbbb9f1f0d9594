// The functions that workers call at each other for references. Numbers are little-endian.
//
//   muster.ref.grant    ref:ref holder:string                     counts a grant; to the owner itself for a reply
//   muster.ref.release  ref:ref grants:u64 number:u64 oldest:u64  of the caller; releases.h explains the numbers
//   muster.ref.renew    count:u32 { ref:ref grants:u64 }[count]   what the caller holds
//   ref    := creator:i32 number:u64                              string := length:u32 byte[length]
#include "muster/rpc/ref_service.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

namespace muster::rpc {
namespace {

constexpr const char* kGrant = "muster.ref.grant";
constexpr const char* kRelease = "muster.ref.release";
constexpr const char* kRenew = "muster.ref.renew";
/// The renewals in one lease.
constexpr int kRenewals = 4;
/// References in one message of renewals.
constexpr size_t kMaxRenewed = 1000;
/// References that are dropped within this time are released together. Waking the thread for each of them would take
/// the core from the calls that pass them. A reference that arrives again in this time saves a release.
constexpr Duration kReleasePause = 1ms;

/// Runs `body` on the arguments of a call, and replies with nothing or with its error.
Handler handler(std::function<Result<>(const Request&, Reader&)> body) {
  return [body = std::move(body)](Request request, Responder responder) {
    Reader in(request.arguments.head);
    Result<> done = body(request, in);
    if (done) return responder.reply({});
    responder.fail(CallError{std::move(done.error()), {}, {}});
  };
}

}  // namespace

void put_ref_id(Writer& out, const RefId& id) { out.put<int32_t>(id.creator).put(id.number); }

Result<RefId> get_ref_id(Reader& in) {
  RefId id;
  MUSTER_ASSIGN(id.creator, in.get<int32_t>());
  MUSTER_ASSIGN(id.number, in.get<uint64_t>());
  return id;
}

Ref::~Ref() { service_->drop(owner_, id_); }

bool Ref::is_owner() const { return owner_ == service_->self().name; }

std::string Ref::to_string() const {
  return fmt::format("reference {}.{} at worker \"{}\"", id_.creator, id_.number, owner_);
}

RefService::RefService(std::shared_ptr<Agent> agent, Options options)
    : agent_(std::move(agent)), options_(options), pid_(getpid()), owned_(agent_->self().name, options.lease) {}

RefService::~RefService() { stop(); }

Result<std::shared_ptr<RefService>> RefService::start(std::shared_ptr<Agent> agent, Options options) {
  const std::shared_ptr<RefService> service(new RefService(std::move(agent), options));
  MUSTER_TRY(service->add_functions());
  service->background_ = std::thread([weak = std::weak_ptr(service), wake = service->wake_,
                                      interval = options.lease / kRenewals] { run_thread(weak, *wake, interval); });
  return service;
}

void RefService::run_thread(const std::weak_ptr<RefService>& weak, Wake& wake, Duration interval) {
  TimePoint next = steady_clock().now() + interval;
  for (bool stop = false; !stop;) {
    std::vector<RefPtr> dropped;  // without the lock
    {
      std::unique_lock lock(wake.mutex);
      const Duration pause = std::max(next - steady_clock().now(), Duration::zero());
      if (wake.changed.wait_for(lock, pause, [&] { return wake.stop || !wake.dropped.empty(); })) {
        wake.changed.wait_for(lock, kReleasePause, [&] { return wake.stop; });
      }
      std::swap(dropped, wake.dropped);
      stop = wake.stop;
    }
    dropped.clear();
    if (stop || steady_clock().now() < next) continue;
    if (const auto alive = weak.lock()) alive->keep_leases();
    next = steady_clock().now() + interval;
  }
}

/// Once the thread has ended, a reference that is dropped makes no call.
void RefService::drop_later(RefPtr ref) {
  if (getpid() != ref->service()->pid_) return;  // a forked child has no such thread
  Wake& wake = *ref->service()->wake_;
  const std::lock_guard lock(wake.mutex);
  if (wake.stop) return;
  wake.dropped.push_back(std::move(ref));
  if (wake.dropped.size() == 1) wake.changed.notify_all();
}

Result<> RefService::add_functions() {
  const auto guarded = [weak = weak_from_this()](auto body) {
    return handler([weak, body](const Request& request, Reader& in) -> Result<> {
      if (const auto alive = weak.lock()) return body(*alive, request, in);
      return fail(ErrorCode::kAborted, "this worker has ended its references");
    });
  };
  const auto grant = [](RefService& self, const Request& request, Reader& in) -> Result<> {
    MUSTER_ASSIGN(const RefId id, get_ref_id(in));
    MUSTER_ASSIGN(const std::string holder, in.get_string());
    MUSTER_TRY(in.finish());
    const std::lock_guard lock(self.mutex_);
    const bool by_creator = id.creator == request.from.id;
    return self.owned_.grant(id, holder, request.from.name, by_creator, steady_clock().now());
  };
  const auto release = [](RefService& self, const Request& request, Reader& in) -> Result<> {
    MUSTER_ASSIGN(const RefId id, get_ref_id(in));
    MUSTER_ASSIGN(const auto grants, in.get<uint64_t>());
    ReleaseNumber release;
    MUSTER_ASSIGN(release.number, in.get<uint64_t>());
    MUSTER_ASSIGN(release.oldest, in.get<uint64_t>());
    MUSTER_TRY(in.finish());
    std::shared_ptr<RefValue> value;  // destroyed without the lock
    const std::lock_guard lock(self.mutex_);
    if (!self.counted_.insert(request.from.id, release)) return {};
    value = self.owned_.release(id, request.from.name, grants, steady_clock().now());
    return {};
  };
  const auto renew = [](RefService& self, const Request& request, Reader& in) -> Result<> {
    MUSTER_ASSIGN(const auto count, in.get<uint32_t>());
    for (uint32_t i = 0; i < count; ++i) {
      MUSTER_ASSIGN(const RefId id, get_ref_id(in));
      MUSTER_ASSIGN(const auto grants, in.get<uint64_t>());
      const std::lock_guard lock(self.mutex_);
      self.owned_.renew(id, request.from.name, grants, steady_clock().now());
    }
    return in.finish();
  };
  MUSTER_TRY(agent_->add_function(kGrant, guarded(grant), {}));
  MUSTER_TRY(agent_->add_function(kRelease, guarded(release), {.idempotent = true}));
  return agent_->add_function(kRenew, guarded(renew), {.idempotent = true});
}

// ---- the owner

void RefService::accept(const RefId& id, const WorkerInfo& creator) {
  const std::lock_guard lock(mutex_);
  owned_.create(id, creator.name, steady_clock().now());
}

void RefService::set_value(const RefId& id, std::shared_ptr<RefValue> value) {
  std::vector<Waiter> waiters;
  {
    const std::lock_guard lock(mutex_);
    owned_.set_value(id, value);
    if (const auto found = waiting_.find(id); found != waiting_.end()) {
      waiters = std::move(found->second);
      waiting_.erase(found);
    }
  }
  for (const Waiter& waiter : waiters) waiter.callback(value);
}

Error RefService::not_found(const RefId& id) const {
  return Error{
      ErrorCode::kNotFound,
      fmt::format("worker \"{}\" has no reference {}.{}: nobody held it any more, or the worker was started again",
                  self().name, id.creator, id.number)};
}

Result<std::shared_ptr<RefValue>> RefService::value(const RefId& id) {
  const std::lock_guard lock(mutex_);
  if (!owned_.contains(id)) return tl::unexpected(not_found(id));
  return owned_.value(id);
}

Result<> RefService::when_ready(const RefId& id, Callback callback, std::function<bool()> given_up) {
  std::shared_ptr<RefValue> ready;
  {
    const std::lock_guard lock(mutex_);
    if (!owned_.contains(id)) return tl::unexpected(not_found(id));
    ready = owned_.value(id);
    if (!ready) {
      waiting_[id].push_back({std::move(callback), std::move(given_up)});
      return {};
    }
  }
  callback(std::move(ready));
  return {};
}

// ---- references

RefPtr RefService::create(const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const RefId id{self().id, ++created_};
  if (owner == self().name) {
    owned_.create(id, owner, steady_clock().now());
  } else {
    held_.receive(owner, id);
  }
  return RefPtr(new Ref(shared_from_this(), owner, id));
}

Result<RefPtr> RefService::receive(const std::string& owner, const RefId& id, int sender) {
  const std::lock_guard lock(mutex_);
  if (owner != self().name) {
    held_.receive(owner, id);
  } else if (sender == kReplied) {
    if (!owned_.claim(id, steady_clock().now())) return tl::unexpected(not_found(id));
  } else if (sender == id.creator || owned_.contains(id)) {
    owned_.create(id, owner, steady_clock().now());  // the call that creates it may be overtaken
  } else {
    return tl::unexpected(not_found(id));
  }
  return RefPtr(new Ref(shared_from_this(), owner, id));
}

std::vector<Future> RefService::grant(const std::vector<RefPtr>& refs, const std::string& receiver, Carrier carrier,
                                      Duration timeout) {
  std::vector<Future> calls;
  for (const RefPtr& ref : refs) {
    if (ref->owner() == receiver && carrier == Carrier::kCall) continue;  // it counts the reference itself
    if (ref->is_owner()) {
      const std::lock_guard lock(mutex_);
      (void)owned_.grant(ref->id(), receiver, self().name, false, steady_clock().now());  // `ref` holds it
      continue;
    }
    Writer out;
    put_ref_id(out, ref->id());
    out.put_string(receiver);
    calls.push_back(agent_->call(ref->owner(), kGrant, Message{out.take(), {}}, {.timeout = timeout}));
  }
  return calls;
}

void RefService::drop(const std::string& owner, const RefId& id) {
  if (getpid() != pid_) return;
  std::shared_ptr<RefValue> value;  // destroyed without the lock
  std::unique_lock lock(mutex_);
  if (stopped_) return;
  if (owner == self().name) {
    value = owned_.release(id, owner, 1, steady_clock().now());
    return lock.unlock();
  }
  const uint64_t grants = held_.drop_handle(owner, id);
  lock.unlock();
  if (grants > 0) send_release(owner, id, grants);
}

/// If it does not arrive within the lease, the lease ends what it should have ended.
void RefService::send_release(const std::string& owner, const RefId& id, uint64_t grants) {
  ReleaseNumber release;
  {
    const std::lock_guard lock(releases_->mutex);
    release = releases_->sent.begin(owner);
  }
  Writer out;
  put_ref_id(out, id);
  out.put(grants).put(release.number).put(release.oldest);
  const CallOptions options{.timeout = options_.lease, .idempotent = true, .waits_for_successor = false};
  agent_->call(owner, kRelease, Message{out.take(), {}}, options)
      .then([releases = releases_, owner, number = release.number](const CallResult&) {
        const std::lock_guard lock(releases->mutex);
        releases->sent.end(owner, number);
      });
}

// ---- leases

void RefService::keep_leases() {
  std::vector<std::shared_ptr<RefValue>> dropped;  // destroyed without the lock, as the callbacks
  std::vector<Waiter> unused;
  {
    const std::lock_guard lock(mutex_);
    dropped = owned_.expire(steady_clock().now());
    for (auto& [id, waiters] : waiting_) {
      const bool held = owned_.contains(id);
      for (Waiter& waiter : waiters) {
        if (!held || waiter.given_up()) unused.push_back(std::exchange(waiter, {}));
      }
      std::erase_if(waiters, [](const Waiter& waiter) { return !waiter.callback; });
    }
    std::erase_if(waiting_, [](const auto& entry) { return entry.second.empty(); });
  }
  renew_all();
}

void RefService::renew_all() {
  std::map<std::string, std::vector<HeldRefs::Held>> owners;
  {
    const std::lock_guard lock(mutex_);
    for (auto& held : held_.list()) owners[held.owner].push_back(std::move(held));
  }
  for (const auto& [owner, refs] : owners) {
    for (size_t begin = 0; begin < refs.size(); begin += kMaxRenewed) {
      const size_t end = std::min(refs.size(), begin + kMaxRenewed);
      Writer out;
      out.put(static_cast<uint32_t>(end - begin));
      for (size_t i = begin; i < end; ++i) {
        put_ref_id(out, refs[i].id);
        out.put(refs[i].grants);
      }
      const Duration timeout = options_.lease / kRenewals;
      (void)agent_->call(owner, kRenew, Message{out.take(), {}},
                         {.timeout = timeout, .idempotent = true, .waits_for_successor = false});
    }
  }
}

void RefService::stop() {
  if (getpid() != pid_) {
    if (background_.joinable()) background_.detach();
    return;
  }
  OwnedRefs values({}, {});  // destroyed without the lock, as the callbacks
  Waiters unused;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    std::swap(owned_, values);
    std::swap(waiting_, unused);
  }
  {
    const std::lock_guard lock(wake_->mutex);
    wake_->stop = true;
  }
  wake_->changed.notify_all();
  std::thread background;
  {
    const std::lock_guard lock(mutex_);
    background.swap(background_);  // two threads may call stop()
  }
  if (!background.joinable()) return;
  if (background.get_id() == std::this_thread::get_id())
    return background.detach();  // tidy: allow(detach) it ends itself
  background.join();
}

std::pair<size_t, size_t> RefService::counts() const {
  const std::lock_guard lock(mutex_);
  return {owned_.size(), held_.size()};
}

}  // namespace muster::rpc
