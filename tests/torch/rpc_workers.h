#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "muster/rpc/endpoint.h"
#include "muster/torch/rpc/worker.h"

namespace muster::rpc {

/// Three workers in one process: "a", "b" and "c".
class RpcWorkers : public testing::Test {
 protected:
  static std::unique_ptr<Worker> start(const std::shared_ptr<Store>& store, const std::string& name) {
    EndpointOptions options;
    options.name = name;
    options.interface = "127.0.0.1";
#ifdef __SANITIZE_THREAD__
    // Both ends of a link map its memory. ThreadSanitizer does not see that a write through one mapping comes before a
    // read through the other.
    options.transports = "unix,tcp";
#endif
    return Worker::start(store, options);
  }
  void TearDown() override {
    for (const Worker* worker : {&a_, &b_, &c_}) {
      const Result<> ended = worker->agent().shutdown(Deadline::after(10s));
      EXPECT_TRUE(ended) << (ended ? "" : ended.error().to_string());
    }
  }

  const std::shared_ptr<Store> store_ = memory_store();
  const std::unique_ptr<Worker> workers_[3] = {start(store_, "a"), start(store_, "b"), start(store_, "c")};
  Worker &a_ = *workers_[0], &b_ = *workers_[1], &c_ = *workers_[2];
};

}  // namespace muster::rpc
