#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The zygote is Python (python/muster/_zygote), and this program carries its text.
const std::string& zygote_text();

/// How a Python that runs the zygote is to be started.
struct ZygoteStart {
  std::string python;
  std::vector<std::string> words;  ///< what it is to be: see boot.py
  Environment environment;
  int socket = -1;     ///< it finds this as descriptor 4
  int output = 2;      ///< its standard output and error
  bool apart = false;  ///< in a session of its own, and living on when this process dies
};
/// As a child that leads a process group of its own. Returns once it was started.
Result<pid_t> start_zygote(const ZygoteStart& start);

/// A file in memory, for what may be too long for a message. It is read from its beginning.
Result<Fd> memory_file(const std::string& bytes);

/// One message with descriptors over a SOCK_SEQPACKET socket; kUnavailable where it would have to wait.
Result<> send_message(int socket, const std::string& text, const std::vector<int>& fds = {});
/// kUnavailable when none has come, kPeerLost at the end. Descriptors are not taken.
Result<std::string> receive_message(int socket);

}  // namespace muster
