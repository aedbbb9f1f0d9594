// The messages about references between workers. The input is a row of calls: a byte that chooses the function, a byte
// that chooses the caller, the length of the arguments, and the arguments.
#include <algorithm>
#include <map>

#include "muster/base/check.h"
#include "muster/rpc/ref_service.h"

namespace muster::rpc {
namespace {

constexpr size_t kMaxCalls = 64;

/// Keeps the functions of one worker. The service calls no other worker, because this one holds no references of
/// others.
class LonelyAgent final : public Agent {
 public:
  const WorkerInfo& self() const override { return self_; }
  Result<> add_function(const std::string& name, Handler handler, FunctionOptions) override {
    functions_[name] = std::move(handler);
    return {};
  }
  /// Runs a function, which must reply at once.
  void run(size_t function, Request request) {
    struct Answer final : Responder::Sink {
      void finish(CallResult) override { ended = true; }
      bool ended = false;
    };
    const auto answer = std::make_shared<Answer>();
    std::next(functions_.begin(), static_cast<long>(function % functions_.size()))
        ->second(std::move(request), Responder(answer));
    MUSTER_CHECK(answer->ended, "a call about a reference has no answer");
  }

  Result<> add_fallback(Handler, FunctionOptions) override { return unused(); }
  Future call(const std::string&, const std::string&, Message, const CallOptions&) override {
    MUSTER_CHECK(false, "a call of another worker");
  }
  void post(std::function<void()>) override {}
  Result<std::vector<WorkerInfo>> workers(const Deadline&) override { return tl::unexpected(unused().error()); }
  Result<> barrier(const std::string&, int, const Deadline&) override { return unused(); }
  void wait_until(const std::function<bool()>&, const Deadline&) override {}
  Result<> wait_for_calls(const Deadline&) override { return unused(); }
  Result<> shutdown(const Deadline&) override { return unused(); }
  void wait(CallState&, const Deadline&) override {}
  void cancel(CallState&) override {}

 private:
  static Result<> unused() { return fail(ErrorCode::kInternal, "not used here"); }

  const WorkerInfo self_{"w0", 0};
  std::map<std::string, Handler> functions_;
};

struct Nothing final : RefValue {};

/// No message may end a reference that this worker holds itself.
void run(ByteView bytes) {
  const auto agent = std::make_shared<LonelyAgent>();
  const auto service = RefService::start(agent, {.lease = std::chrono::hours(1)}).value();
  const RefPtr own = service->create("w0");
  service->set_value(own->id(), std::make_shared<Nothing>());
  for (size_t count = 0; count < kMaxCalls && bytes.size() >= 3; ++count) {
    const size_t length = std::min<size_t>(bytes[2], bytes.size() - 3);
    const ByteView arguments = bytes.subspan(3, length);
    const int from = 1 + bytes[1] % 3;  // names are unique, so none is "w0"
    agent->run(bytes[0], Request{{"w" + std::to_string(from), from},
                                 "muster.ref",
                                 Message{Bytes(arguments.begin(), arguments.end()), {}},
                                 Deadline::never(),
                                 {}});
    bytes = bytes.subspan(3 + length);
  }
  const auto value = service->value(own->id());
  MUSTER_CHECK(value && *value, "a message has ended a reference that is held");
  service->stop();
}

}  // namespace
}  // namespace muster::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::rpc::run({data, size});
  return 0;
}
