#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace muster::bench {

/// A folder with the files by which the processes find each other.
class Folder {
 public:
  Folder() {
    char path[] = "/tmp/muster-rpc-load-XXXXXX";
    if (mkdtemp(path) == nullptr) {
      std::perror("muster-rpc-load: cannot make a folder in /tmp");
      std::_Exit(1);
    }
    path_ = path;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace muster::bench
