// A worker in C++ that tests/python/test_rpc_cpp.py calls. It ends when a caller says so.
#include <iostream>
#include <latch>

#include "muster/torch/rpc/worker.h"

namespace rpc = muster::rpc;

struct Point {
  double x = 0, y = 0;
  static constexpr auto kFields = std::tuple{rpc::field("x", &Point::x), rpc::field("y", &Point::y)};
};

int main() {
  try {
    rpc::EndpointOptions options;
    options.name = "cpp";
    std::latch ended(1);
    const auto worker = rpc::Worker::join_job(options, [&ended](rpc::Worker& self) {
      self.add_function("scale", [](const at::Tensor& tensor, double by) { return tensor.mul(by); });
      self.add_function("moved", [](Point point) { return Point{point.x + 1, point.y}; });
      self.add_function("make", [](int value) { return value; });
      self.add_function("read", [](const rpc::RRef<int>& ref) { return ref.to_here(); });
      self.add_function("call_python", [&self](const std::string& to, int value) {
        return self.rpc_sync<int>(to, "twice", {}, value);
      });
      self.add_function("make_in_python",
                        [&self](const std::string& to, int value) { return self.remote<int>(to, "twice", {}, value); });
      self.add_function("end", [&ended] { ended.count_down(); });
    });
    ended.wait();
    muster::value_or_throw(worker->agent().shutdown(muster::Deadline::after(std::chrono::seconds(30))));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
