#include "muster/launch/agent/status_file.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "muster/io/host_identity.h"
#include "muster/launch/private_directories.h"

namespace muster {

void remove_dead_status_files(const Environment& environment) {
  const auto directory = user_directory(environment, /*create=*/false);
  if (!directory) return;
  std::error_code ignored;
  for (std::filesystem::directory_iterator it(*directory, ignored), end; it != end; it.increment(ignored))
    if (it->path().filename().string().starts_with("job-")) remove_abandoned_file(it->path());
  remove_user_directory(*directory);
}

StatusFile::StatusFile(const Environment& environment, std::string run_id) : run_id_(std::move(run_id)) {
  remove_dead_status_files(environment);
  constexpr int kMaxTries = 10;  // another process may remove the directory while it is empty
  for (int tries = 0; tries < kMaxTries && !file_; ++tries) {
    const auto directory = user_directory(environment);
    if (!directory) return;
    path_ = *directory + "/job-" + std::to_string(::getpid()) + ".json";
    file_ = make_locked_file(path_);
    if (!file_ && errno != ENOENT) return;
  }
  write("", {});
}

StatusFile::~StatusFile() {
  if (!file_) return;
  ::unlink(path_.c_str());
  remove_user_directory(std::filesystem::path(path_).parent_path());
}

void StatusFile::write(const std::string& url, ByteView secret) {
  if (!file_) return;
  const nlohmann::json value = {{"run_id", run_id_},
                                {"pid", ::getpid()},
                                {"process_domain", process_domain()},
                                {"store", url},
                                {"secret", to_hex(secret)}};
  const std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  // A reader may see half of the text. It is not valid JSON then, and the reader tries again later.
  if (::ftruncate(file_.get(), 0) != 0 || ::pwrite(file_.get(), text.data(), text.size(), 0) < 0) file_.reset();
}

}  // namespace muster
