#pragma once

#include <coroutine>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "muster/torch/rpc/autograd.h"

namespace muster::rpc {

namespace detail {

struct TaskPromise {
  std::weak_ptr<void> owner;      ///< of the coroutine: whoever will resume it keeps it alive
  std::function<void()> on_done;  ///< called once
  std::exception_ptr thrown;

  std::suspend_always initial_suspend() noexcept { return {}; }
  void unhandled_exception() { thrown = std::current_exception(); }
  auto final_suspend() noexcept {
    struct Done {
      bool await_ready() noexcept { return false; }
      void await_suspend(std::coroutine_handle<> /*self*/) noexcept {
        const auto call = std::move(promise.on_done);  // it may destroy the coroutine, and so the promise
        call();
      }
      void await_resume() noexcept {}
      TaskPromise& promise;
    };
    return Done{*this};
  }
};

template <class T>
struct TaskResult : TaskPromise {
  std::optional<T> value;
  void return_value(T given) { value.emplace(std::move(given)); }
};
template <>
struct TaskResult<void> : TaskPromise {
  std::optional<std::monostate> value;
  void return_void() { value.emplace(); }
};

}  // namespace detail

/// The result of a coroutine that handles a call. While it waits for other calls, it holds no thread:
///
///     worker.add_function("f", [&](at::Tensor x) -> rpc::Task<at::Tensor> {
///       const auto y = co_await worker.rpc_async<at::Tensor>("other", "g", {}, x);
///       co_return y * 2;
///     });
///
/// It runs on the agent's threads, on one at a time. What a lambda captures by reference must outlive its calls. Tasks
/// can wait for tasks. A task starts when it is awaited. If its worker leaves before it has ended, it is destroyed.
template <class T>
class [[nodiscard]] Task {
 public:
  struct promise_type : detail::TaskResult<T> {
    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
  };
  using Result = typename decltype(promise_type::value)::value_type;

  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }

  /// Runs the coroutine until it waits or ends. `owner` owns this object.
  void start(const std::shared_ptr<void>& owner, std::function<void()> on_done) {
    handle_.promise().owner = owner;
    handle_.promise().on_done = std::move(on_done);
    handle_.resume();
  }
  /// Once it is done: the result, or what was thrown.
  Result take() {
    if (handle_.promise().thrown) std::rethrow_exception(handle_.promise().thrown);
    return std::move(*handle_.promise().value);
  }

  auto operator co_await() && { return Awaiter{std::move(*this)}; }

 private:
  struct Awaiter {
    bool await_ready() { return false; }
    template <class Promise>
    void await_suspend(std::coroutine_handle<Promise> waiting) {
      task.start(waiting.promise().owner.lock(), [waiting] { waiting.resume(); });
    }
    T await_resume() {
      if constexpr (std::is_void_v<T>) {
        (void)task.take();
      } else {
        return task.take();
      }
    }
    Task task;
  };

  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

namespace detail {

template <class T>
struct IsTask : std::false_type {};
template <class T>
struct IsTask<Task<T>> : std::true_type {};

/// A coroutine with what it may refer to.
template <class F, class Arguments>
struct RunningTask {
  F function;
  Arguments arguments;
  std::optional<decltype(std::apply(std::declval<F&>(), std::declval<Arguments&>()))> task;
};

/// Calls a function that returns a Task. `done` gets a function that returns the result, or throws.
template <class F, class Arguments, class Done>
void run_task(const F& function, Arguments arguments, Done done) {
  const auto running =
      std::make_shared<RunningTask<F, Arguments>>(RunningTask<F, Arguments>{function, std::move(arguments), {}});
  running->task.emplace(std::apply(running->function, running->arguments));
  running->task->start(running,
                       [&task = *running->task, done = std::move(done)] { done([&task] { return task.take(); }); });
}

/// Waits for a future in a coroutine. The rest of the coroutine runs as a task of the agent, in the same context.
template <class Future>
struct FutureAwaiter {
  bool await_ready() { return future.done(); }
  template <class Promise>
  void await_suspend(std::coroutine_handle<Promise> waiting) {
    const auto resume = [waiting, context = CurrentContext::current()] {
      const CurrentContext current(context);
      waiting.resume();
    };
    future.post_when_done([resume, owner = waiting.promise().owner.lock()] { resume(); });
  }
  auto await_resume() { return future.wait(); }
  Future future;
};

}  // namespace detail
}  // namespace muster::rpc
