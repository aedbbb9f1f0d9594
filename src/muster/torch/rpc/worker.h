#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>

#include "muster/rpc/endpoint.h"
#include "muster/rpc/ref_service.h"
#include "muster/torch/rpc/alias.h"
#include "muster/torch/rpc/autograd.h"
#include "muster/torch/rpc/codec.h"
#include "muster/torch/rpc/references.h"
#include "muster/torch/rpc/remote_error.h"
#include "muster/torch/rpc/rref.h"
#include "muster/torch/rpc/task.h"

/// Remote calls with C++ types. codec.h lists the types that can travel.
namespace muster::rpc {

namespace detail {

inline constexpr const char* kCannotTravel = "the result of this function cannot travel: use remote()";

/// The parameters of a callable as std::function knows them.
template <class F>
struct Signature : Signature<decltype(std::function(std::declval<F>()))> {};
template <class R, class... Args>
struct Signature<std::function<R(Args...)>> {
  using Arguments = std::tuple<std::remove_cvref_t<Args>...>;
};

/// Writes the arguments of a call: those by position, and none by name.
template <class... Args>
void write_arguments(ValueWriter& out, const Args&... arguments) {
  out.begin_tuple(sizeof...(Args));
  (write(out, arguments), ...);
  out.begin_dict(0);
}
template <class Arguments>
Arguments read_arguments(ValueReader& in) {
  auto arguments = read<Arguments>(in);
  in.expect(Tag::kDict);
  if (in.count() != 0) {
    throw_error(Error{ErrorCode::kInvalidArgument, "a C++ function takes no arguments by name"});
  }
  return arguments;
}

/// Calls a function. The result of one that returns void is std::monostate.
template <class F, class Arguments>
auto apply(const F& function, Arguments arguments) {
  if constexpr (std::is_void_v<decltype(std::apply(function, std::move(arguments)))>) {
    std::apply(function, std::move(arguments));
    return std::monostate();
  } else {
    return std::apply(function, std::move(arguments));
  }
}

}  // namespace detail

/// The result of a call, now or later. Any result fits T = void. Thread-safe; copies refer to the same call.
template <class T>
class TypedFuture {
 public:
  TypedFuture(Future future, std::shared_ptr<RefService> refs, ContextPtr context)
      : future_(std::move(future)), refs_(std::move(refs)), context_(std::move(context)) {}

  bool done() const { return future_.done(); }
  /// Waits, and returns the result. Throws RemoteException if the function threw, ArgumentException if the result is no
  /// T, and ErrorException for other failures. May be called several times, but only once if T has references.
  T wait() const { return result_of(future_.wait(), *refs_, context_); }
  /// Calls back once the call has ended, as Future::then() does. The argument is a function that does what wait() does:
  /// `future.then([](auto result) { use(result()); })`. Calls that it makes belong to the context that is current now.
  template <class F>
  void then(F callback) const {
    future_.then([callback = std::move(callback), refs = refs_, context = context_,
                  current = CurrentContext::current()](const CallResult& result) mutable {
      const CurrentContext scope(current);
      callback([&] { return result_of(result, *refs, context); });
    });
  }
  void cancel() const { future_.cancel(); }
  /// Waits in a coroutine (Task). Returns and throws what wait() does.
  auto operator co_await() const { return detail::FutureAwaiter<TypedFuture>{*this}; }
  /// Runs a function on a thread of the agent, as it runs handlers, once the call has ended.
  void post_when_done(std::function<void()> function) const {
    future_.then([function = std::move(function), refs = refs_](const CallResult&) { refs->agent().post(function); });
  }

 private:
  static T result_of(const CallResult& result, RefService& refs, const ContextPtr& context) {
    if (!result) throw_call_error(result.error());
    if constexpr (!std::is_void_v<T>) return read_message<T>(*result, refs, context);
  }

  Future future_;
  std::shared_ptr<RefService> refs_;
  ContextPtr context_;  ///< that was current when the call was made, or null
};

/// A process that takes part in remote calls, for C++ types: its functions, its calls, and its references. Thread-safe.
/// When it is destroyed, its agent leaves unless others share it (Agent).
class Worker {
 public:
  /// Adds functions before others can find the worker. They may keep the reference.
  using Setup = std::function<void(Worker&)>;
  /// As start_endpoint() and rpc::join_job(). `setup` takes the place of the option with this name. Throw.
  static std::unique_ptr<Worker> start(std::shared_ptr<Store> store, EndpointOptions options, const Setup& setup = {});
  static std::unique_ptr<Worker> join_job(EndpointOptions options, const Setup& setup = {});
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker();

  Agent& agent() const { return *agent_; }
  const std::shared_ptr<RefService>& refs() const { return refs_; }
  const std::shared_ptr<Autograd>& autograd() const { return autograd_; }

  /// Makes a function callable by name, from C++ and from Python: `worker.add_function("add", [](at::Tensor a, double
  /// b) { return a + b; })`. Calls may run at the same time. It may be a coroutine (Task). An exception travels to the
  /// caller. A function whose result cannot travel can only be called by remote(). Throws ErrorException with
  /// kAlreadyExists for a name that is taken.
  template <class F>
  void add_function(const std::string& name, F function, FunctionOptions options = {});

  /// Calls a function of the worker `to`. Does not wait. T is the type of the result.
  template <class T, class... Args>
  TypedFuture<T> rpc_async(const std::string& to, const std::string& function, const CallOptions& options,
                           const Args&... arguments) const {
    ValueWriter out(CurrentContext::current());
    out.begin_list(2);
    detail::write_arguments(out, arguments...);
    return {call_with_refs(*refs_, to, function, std::move(out), options), refs_, CurrentContext::current()};
  }
  /// The same, but waits. Throws as TypedFuture::wait() does.
  template <class T, class... Args>
  T rpc_sync(const std::string& to, const std::string& function, const CallOptions& options,
             const Args&... arguments) const {
    CallOptions waiting = options;
    waiting.waits = true;
    return rpc_async<T>(to, function, waiting, arguments...).wait();
  }
  /// Calls a function of the worker `to`, and returns a reference to its result at once. T is the type of the result.
  template <class T, class... Args>
  RRef<T> remote(const std::string& to, const std::string& function, const CallOptions& options,
                 const Args&... arguments) const {
    const RefPtr ref = refs_->create(to);
    ValueWriter out(CurrentContext::current());
    begin_create(out, *ref, function);
    detail::write_arguments(out, arguments...);
    out.begin_dict(0);
    const Future creation = call_with_refs(*refs_, to, creation_of(function), std::move(out), options);
    creation.then([ref](const CallResult&) {});  // it must outlive the call that creates it
    return RRef<T>(ref, creation);
  }
  /// A tensor of empty_shared(), to be passed by reference (alias.h).
  Alias alias(at::Tensor tensor) const { return {*refs_, std::move(tensor)}; }
  /// A reference to a value of this worker.
  template <class T>
  RRef<T> own(T value) const {
    const RefPtr ref = refs_->create(agent_->self().name);
    refs_->set_value(ref->id(), std::make_shared<TypedValue<T>>(std::move(value)));
    return RRef<T>(ref, std::nullopt);
  }

 private:
  using Start = std::function<Result<std::shared_ptr<Agent>>(EndpointOptions)>;
  static std::unique_ptr<Worker> start(const Start& start, EndpointOptions options, const Setup& setup);
  explicit Worker(std::shared_ptr<Agent> agent);

  /// Makes the value of a reference, now or later. `done` gets a function that returns it, or throws.
  using MakeValue = std::function<std::shared_ptr<RefValue>()>;
  using Maker = std::function<void(ValueReader&, std::function<void(const MakeValue&)> done)>;
  struct Makers {
    std::mutex mutex;
    std::unordered_map<std::string, Maker> by_function;
    Maker find(const std::string& function);
  };
  using Body = std::function<void(ValueReader&, ValueWriter&)>;
  /// `answer` gets a function that writes the result, or throws.
  using Answer = std::function<void(const std::function<void(ValueWriter&)>&)>;
  using LateBody = std::function<void(ValueReader&, Answer answer)>;
  static Answer late_answer(const std::shared_ptr<RefService>& refs, std::shared_ptr<Responder> responder,
                            std::string caller);
  void add_handler(const std::string& name, const std::variant<Body, LateBody>& body, Maker maker,
                   FunctionOptions options);

  std::shared_ptr<Agent> agent_;
  std::shared_ptr<RefService> refs_;
  std::shared_ptr<Autograd> autograd_;
  std::shared_ptr<Makers> makers_ = std::make_shared<Makers>();
};

template <class F>
void Worker::add_function(const std::string& name, F function, FunctionOptions options) {
  using Arguments = typename detail::Signature<F>::Arguments;
  if constexpr (detail::IsTask<decltype(std::apply(function, std::declval<Arguments&>()))>::value) {
    const auto body = [function](ValueReader& in, Answer answer) {
      auto arguments = detail::read_arguments<Arguments>(in);
      in.finish();
      detail::run_task(function, std::move(arguments), [answer = std::move(answer)](const auto& take) {
        answer([&take](ValueWriter& out) { write_or_refuse(out, take(), detail::kCannotTravel); });
      });
    };
    const auto maker = [function](ValueReader& in, std::function<void(const MakeValue&)> done) {
      detail::run_task(function, detail::read_arguments<Arguments>(in), [done = std::move(done)](const auto& take) {
        done([&take] { return std::make_shared<TypedValue<decltype(take())>>(take()); });
      });
    };
    add_handler(name, LateBody(body), maker, options);
  } else {
    const auto body = [function](ValueReader& in, ValueWriter& out) {
      auto arguments = detail::read_arguments<Arguments>(in);
      in.finish();
      write_or_refuse(out, detail::apply(function, std::move(arguments)), detail::kCannotTravel);
    };
    const auto maker = [function](ValueReader& in, const std::function<void(const MakeValue&)>& done) {
      auto arguments = detail::read_arguments<Arguments>(in);
      done([&] {
        auto value = detail::apply(function, std::move(arguments));
        return std::make_shared<TypedValue<decltype(value)>>(std::move(value));
      });
    };
    add_handler(name, Body(body), maker, options);
  }
}

}  // namespace muster::rpc
