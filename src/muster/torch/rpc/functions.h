#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "muster/rpc/agent.h"
#include "muster/torch/rpc/codec.h"
#include "muster/torch/rpc/remote_error.h"

/// Remote calls with C++ types. codec.h lists the types that can travel. A worker joins with join_job()
/// (muster/rpc/endpoint.h).
namespace muster::rpc {

namespace detail {

/// The parameters of a callable as std::function knows them.
template <class F>
struct Signature : Signature<decltype(std::function(std::declval<F>()))> {};
template <class R, class... Args>
struct Signature<std::function<R(Args...)>> {
  using Return = R;
  using Arguments = std::tuple<std::remove_cvref_t<Args>...>;
};

template <class... Args>
Message encode_arguments(const Args&... arguments) {
  ValueWriter out;
  out.begin_list(2);
  out.begin_tuple(sizeof...(Args));
  (write(out, arguments), ...);
  out.begin_dict(0);
  return out.take();
}

template <class Arguments>
Arguments decode_arguments(const Message& message) {
  ValueReader in(message);
  in.expect(Tag::kList);
  if (in.count() != 2) throw_error(Error{ErrorCode::kProtocol, "arguments are a list of two values"});
  auto arguments = read<Arguments>(in);
  in.expect(Tag::kDict);
  if (in.count() != 0) {
    throw_error(Error{ErrorCode::kInvalidArgument, "a C++ function takes no arguments by name"});
  }
  in.finish();
  return arguments;
}

template <class T>
T decode_result(const CallResult& result) {
  if (!result) throw_call_error(result.error());
  if constexpr (!std::is_void_v<T>) {
    ValueReader in(*result);
    auto value = read<std::remove_cvref_t<T>>(in);
    in.finish();
    return value;
  }
}

}  // namespace detail

/// Makes a function callable by name, from C++ and from Python: `add_function(*agent, "add", [](at::Tensor a, double b)
/// { return a + b; })`. Calls may run at the same time. An exception travels to the caller. Throws ErrorException with
/// kAlreadyExists if there is a function with this name.
template <class F>
requires(!std::is_convertible_v<F, Handler>) void add_function(Agent& agent, const std::string& name, F function,
                                                               FunctionOptions options = {}) {
  using Signature = detail::Signature<F>;
  const auto handler = [function = std::move(function)](Request request, Responder responder) {
    try {
      auto arguments = detail::decode_arguments<typename Signature::Arguments>(request.arguments);
      ValueWriter out;
      if constexpr (std::is_void_v<typename Signature::Return>) {
        std::apply(function, std::move(arguments));
        out.put_none();
      } else {
        write(out, std::apply(function, std::move(arguments)));
      }
      responder.reply(out.take());
    } catch (...) {
      responder.fail(current_call_error());
    }
  };
  value_or_throw(agent.add_function(name, handler, options));
}

/// The result of a call, now or later. Any result fits T = void. Thread-safe; copies refer to the same call.
template <class T>
class TypedFuture {
 public:
  explicit TypedFuture(Future future) : future_(std::move(future)) {}

  bool done() const { return future_.done(); }
  /// Waits, and returns the result. Throws RemoteException if the function threw, ArgumentException if the result is no
  /// T, and ErrorException for other failures. May be called several times.
  T wait() const { return detail::decode_result<T>(future_.wait()); }
  /// Calls back once the call has ended, as Future::then() does. The argument is a function that does what wait() does:
  /// `future.then([](auto result) { use(result()); })`.
  template <class F>
  void then(F callback) const {
    future_.then([callback = std::move(callback)](const CallResult& result) mutable {
      callback([&result] { return detail::decode_result<T>(result); });
    });
  }
  void cancel() const { future_.cancel(); }

 private:
  Future future_;
};

/// Calls a function of the worker `to`. Does not wait. `T` is the type of the result.
template <class T, class... Args>
TypedFuture<T> rpc_async(Agent& agent, const std::string& to, const std::string& function, const CallOptions& options,
                         const Args&... arguments) {
  return TypedFuture<T>(agent.call(to, function, detail::encode_arguments(arguments...), options));
}
/// Calls a function of the worker `to`, and waits for its result. Throws as TypedFuture::wait() does.
template <class T, class... Args>
T rpc_sync(Agent& agent, const std::string& to, const std::string& function, const CallOptions& options,
           const Args&... arguments) {
  return rpc_async<T>(agent, to, function, options, arguments...).wait();
}

}  // namespace muster::rpc
