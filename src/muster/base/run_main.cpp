#include "muster/base/run_main.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace muster {
namespace {

/// The file of torch's @record, which `muster run` and torchrun read. The stack may be empty.
void write_error_file(const char* path, const std::string& message, std::string_view stack) {
  const nlohmann::json json = {
      {"message",
       {{"message", message},
        {"errorCode", 1},
        {"extraInfo", {{"py_callstack", std::string(stack)}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
  std::ofstream(path) << json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

int report(std::string_view what) {
  // In the message of a c10::Error, the stack follows this.
  const size_t end = what.find("\nException raised from ");
  const char* rank = std::getenv("RANK");
  const std::string message =
      fmt::format("error: {}{}", rank == nullptr ? "" : fmt::format("rank {}: ", rank), what.substr(0, end));
  std::fflush(stdout);
  std::fputs((message + "\n").c_str(), stderr);  // tidy: allow(print) the program's own message
  const char* file = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (file != nullptr) write_error_file(file, message, end == std::string_view::npos ? "" : what);
  return 1;
}

}  // namespace

int run_main(const std::function<Result<>()>& body) {
  try {
    const Result<> result = body();
    return result ? 0 : report(result.error().to_string());
  } catch (const std::exception& error) {
    return report(error.what());
  } catch (...) {
    return report("an exception that is not a std::exception");
  }
}

}  // namespace muster
