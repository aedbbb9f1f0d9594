// Some clients misbehave while other clients work. The results and the order of the other clients must not change.
// Other tests run without resources: with a full disk, or without a free descriptor.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <thread>

#include "store/expect.h"
#include "store/raw_client.h"
#include "store/test_server.h"
#include "store/torch_client.h"

namespace muster {
namespace {

Deadline soon() { return test_deadline(); }

Bytes encoded(Request request) {
  request.immediate = true;
  return *torch_request(request);
}

// Clients that do, at the same time, everything that a client can do wrong without being closed immediately.
class BadClients {
 public:
  explicit BadClients(const TestServer& server) {
    const Bytes set = encoded({StoreOperation::kSet, 1, {"half"}, {Bytes(100, 1)}});
    const Bytes get = encoded({StoreOperation::kGet, 1, {"big"}});
    Bytes many;
    for (int i = 0; i < 1000; ++i) many.insert(many.end(), get.begin(), get.end());
    for (int i = 0; i < 8; ++i) {
      add(server.torch_address(), torch_hello());
      clients_.back().send(ByteView(set).first(10 + static_cast<size_t>(i) * 8));  // never sends the rest
      add(server.torch_address(), torch_hello());
      clients_.back().send(many);                                                                  // reads no reply
      add(server.server->muster_addresses()[0], Bytes{'m'});                                       // half a handshake
      add(server.torch_address(), {});                                                             // sends nothing
      add(server.torch_address(), *from_hex("00cef7853c0102000000000000002f6b0000000001000000"));  // announces 4 GiB
    }
  }

 private:
  void add(const Address& address, ByteView words) {
    clients_.emplace_back(address);
    if (!words.empty()) clients_.back().send(words);
  }
  std::vector<RawClient> clients_;
};

TEST(MisbehavingClients, DelayNoOtherClient) {
  StoreServerOptions options;
  options.threads = 4;
  options.few_clients = 1;
  options.tiered = true;
  options.max_reply_queue = 1 << 20;
  const TestServer root("", options);
  const TestServer proxy(root.tcp_url(), options);
  EXPECT_OK(open_or_fail(root.tcp_url())->set("big", Bytes(1 << 16), soon()));
  const BadClients to_root(root), to_proxy(proxy);
  constexpr int kWorkers = 6, kRounds = 50;
  std::vector<std::thread> workers;
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&, i] {
      const auto store = open_or_fail(i % 2 == 0 ? root.tcp_url() : proxy.unix_url());
      for (int round = 0; round < kRounds; ++round) {
        const Key mine = std::to_string(i) + "/" + std::to_string(round);
        EXPECT_OK(store->set(mine, to_bytes(mine), soon()));
        const Key next = std::to_string((i + 1) % kWorkers) + "/" + std::to_string(round);
        EXPECT_EQ(store->get(next, soon()), to_bytes(next));
        EXPECT_OK(store->add("sum", 1, soon()));
      }
      EXPECT_OK(store->barrier("end", kWorkers, soon()));
      EXPECT_EQ(store->add("sum", 0, soon()), kWorkers * kRounds);
    });
  }
  for (auto& worker : workers) worker.join();
  EXPECT_EQ(open_or_fail(root.tcp_url())->check({"half"}, soon()), false) << "half a request has no effect";
}

TEST(MisbehavingClients, GetRepliesInOrderIfTheyPipelineRequests) {
  StoreServerOptions options;
  options.tiered = true;
  const TestServer root;
  const TestServer proxy(root.tcp_url(), options);
  const auto store = open_or_fail(proxy.unix_url());
  for (int round = 0; round < 20; ++round) {
    const Key near = "near" + std::to_string(round), far = "far" + std::to_string(round);
    EXPECT_OK(store->multi_set({near, far}, {to_bytes("1"), to_bytes("2")}, soon()));
    EXPECT_EQ(store->get(near, soon()), to_bytes("1")) << "now the proxy has it";
    RawClient client = torch_client(proxy.torch_address());
    Bytes words = encoded({StoreOperation::kGet, 1, {far}});
    const Bytes second = encoded({StoreOperation::kGet, 2, {near}});
    words.insert(words.end(), second.begin(), second.end());
    client.send(words);
    EXPECT_EQ(client.receive(9).back(), '2');
    EXPECT_EQ(client.receive(9).back(), '1');
  }
}

// Runs `body` in a child process, so that it may lower its limits. Returns true if `body` returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body() ? 0 : 1);
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool limit(int resource, rlim_t most) {
  const rlimit limits{most, most};
  return setrlimit(static_cast<__rlimit_resource_t>(resource), &limits) == 0;
}

bool has_error(const Result<>& result, ErrorCode code, const std::string& words) {
  const bool as_expected =
      !result && result.error().code == code && result.error().message.find(words) != std::string::npos;
  if (!as_expected) fprintf(stderr, "%s\n", result ? "no error" : result.error().to_string().c_str());
  return as_expected;
}

TEST(ResourceLimits, FileStoreReportsAFullDiskAndKeepsItsData) {
  std::string folder = testing::TempDir() + "/muster-full-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/store";
  EXPECT_TRUE(in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const auto store = *file_store(path);
    if (!store->set("kept", as_bytes("v"), soon()) || !limit(RLIMIT_FSIZE, 10000)) return false;
    return has_error(store->set("k", Bytes(20000), soon()), ErrorCode::kResourceExhausted, path) &&
           store->set("small", as_bytes("fits"), soon()).has_value() && store->get("kept", soon()) == to_bytes("v");
  }));
  const auto after = *file_store(path);
  EXPECT_EQ(after->list_keys("", soon()), (std::vector<Key>{"kept", "small"}));
  EXPECT_OK(after->set("k", Bytes(20000), soon()));
  EXPECT_EQ((*file_store(path))->get("k", soon())->size(), 20000U);
  std::filesystem::remove_all(folder);
}

TEST(ResourceLimits, ClientAndServerReportMissingDescriptors) {
  const TestServer server;
  EXPECT_TRUE(in_child([&] {
    const int next = dup(0);
    close(next);
    if (!limit(RLIMIT_NOFILE, static_cast<rlim_t>(next))) return false;
    const auto error_of = [](auto result) -> Result<> {
      MUSTER_TRY(std::move(result));
      return {};
    };
    StoreServerOptions options;
    options.muster_listen = {*Address::parse("127.0.0.1:0")};
    const std::string why = "Too many open files";
    return has_error(error_of(open_store(server.tcp_url(), test_secret(), Deadline::after(2s))),
                     ErrorCode::kResourceExhausted, why) &&
           has_error(error_of(StoreServer::start(options, Deadline::after(2s))), ErrorCode::kResourceExhausted, why) &&
           has_error(error_of(file_store("/dev/null")), ErrorCode::kResourceExhausted, why);
  }));
}

}  // namespace
}  // namespace muster
