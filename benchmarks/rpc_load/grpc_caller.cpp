// gRPC without generated code: bytes in, bytes out, over a Unix socket, one completion queue and one thread at each
// end.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <vector>

#include "caller.h"

namespace muster::bench {
namespace {

using grpc::ByteBuffer;

constexpr int kNoLimit = -1;

ByteBuffer buffer_of(size_t bytes) {
  const std::string text(bytes, 'x');
  const grpc::Slice slice(text);
  return {&slice, 1};
}

/// A call at the server: its completions come in the order of its phases.
class ServedCall {
 public:
  ServedCall(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue& queue)
      : service_(service), queue_(queue) {
    service_.RequestCall(&context_, &stream_, &queue_, &queue_, this);
  }

  void proceed(bool ok) {
    switch (phase_) {
      case Phase::kAccepted:
        if (!ok) return delete this;
        new ServedCall(service_, queue_);  // deletes itself
        phase_ = Phase::kRead;
        return stream_.Read(&message_, this);
      case Phase::kRead:
        phase_ = Phase::kAnswered;
        return stream_.WriteAndFinish(message_, {}, grpc::Status::OK, this);
      case Phase::kAnswered:
        delete this;
    }
  }

 private:
  enum class Phase { kAccepted, kRead, kAnswered };

  grpc::AsyncGenericService& service_;
  grpc::ServerCompletionQueue& queue_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  ByteBuffer message_;
  Phase phase_ = Phase::kAccepted;
};

class GrpcCaller final : public Caller {
 public:
  explicit GrpcCaller(const std::string& path) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kNoLimit);
    arguments.SetMaxSendMessageSize(kNoLimit);
    channel_ = grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments);
    stub_ = std::make_unique<grpc::GenericStub>(channel_);
    if (!channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10))) {
      fail_benchmark("no connection to gRPC's server");
    }
  }

  void prepare(size_t bytes, int count) override {
    messages_.clear();
    for (int i = 0; i < count; ++i) messages_.push_back(buffer_of(bytes));
  }
  void echo(int index) override {
    begin(index);
    finish_one();
  }
  void echo_many(size_t in_flight, int calls, std::vector<double>* times) override {
    const auto finish = [&] {
      const TimePoint begun = finish_one();
      if (times != nullptr) times->push_back(microseconds_since(begun));
    };
    const int first = static_cast<int>(std::min<size_t>(in_flight, calls));
    for (int i = 0; i < first; ++i) begin(0);
    for (int i = first; i < calls; ++i) {
      finish();
      begin(0);
    }
    for (int i = 0; i < first; ++i) finish();
  }

 private:
  struct Call {
    const TimePoint begun = steady_clock().now();
    grpc::ClientContext context;
    ByteBuffer reply;
    grpc::Status status;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
  };

  void begin(int index) {
    auto call = std::make_unique<Call>();
    call->reader = stub_->PrepareUnaryCall(&call->context, "/echo/Echo", messages_[index % messages_.size()], &queue_);
    call->reader->StartCall();
    Call* const tag = call.release();  // finish_one() takes it
    tag->reader->Finish(&tag->reply, &tag->status, tag);
  }
  /// Returns when the call began.
  TimePoint finish_one() {
    void* tag = nullptr;
    bool ok = false;
    if (!queue_.Next(&tag, &ok)) fail_benchmark("gRPC's queue has ended");
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    if (!ok || !call->status.ok()) fail_benchmark("gRPC: " + call->status.error_message());
    return call->begun;
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
  std::vector<ByteBuffer> messages_;
};

}  // namespace

void serve_grpc(const std::string& path) {
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kNoLimit);
  builder.SetMaxSendMessageSize(kNoLimit);
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
  builder.RegisterAsyncGenericService(&service);
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  if (!server) fail_benchmark("gRPC's server cannot listen at " + path);
  new ServedCall(service, *queue);  // deletes itself
  void* tag = nullptr;
  bool ok = false;
  while (queue->Next(&tag, &ok)) static_cast<ServedCall*>(tag)->proceed(ok);
  fail_benchmark("gRPC's server has ended");
}

std::unique_ptr<Caller> connect_grpc(const std::string& path) { return std::make_unique<GrpcCaller>(path); }

}  // namespace muster::bench
