#pragma once

#include <string>

#include "muster/io/fd.h"

namespace muster {

/// TMPDIR where that is a folder, else /tmp; absolute.
std::string temporary_folder();

/// A temporary folder for the workers' error files. Whoever is left of guard and agent removes it; where both were
/// killed, the next one that this user makes does: a lock in it, which both hold, says whether anybody is left.
class ScratchFolder {
 public:
  /// path() is empty, and errno says why, if there can be none.
  ScratchFolder();
  ~ScratchFolder() { remove(); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  void remove() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Fd lock_;
};

}  // namespace muster
