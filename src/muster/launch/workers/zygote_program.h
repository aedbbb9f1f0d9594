#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The zygote is written in Python (python/muster/_zygote); its text is part of this program.
const std::string& zygote_text();

/// How to start a Python that runs the zygote.
struct ZygoteStart {
  std::string python;
  std::vector<std::string> args;  ///< what it does: see boot.py
  Environment environment;
  int socket = -1;        ///< becomes descriptor 4
  int output = 2;         ///< its standard output and error
  bool detached = false;  ///< in a session of its own, and alive after this process dies
};
/// Starts it as a child with its own process group.
Result<pid_t> start_zygote(const ZygoteStart& start);

/// A file in memory, for data that may be too long for a message.
Result<Fd> memory_file(const std::string& bytes);

/// Sends one message with descriptors over a SOCK_SEQPACKET socket. kUnavailable if this would block.
Result<> send_message(int socket, const std::string& text, const std::vector<int>& fds = {});
/// Receives one message without descriptors. kUnavailable if there is none, kPeerLost at the end.
Result<std::string> receive_message(int socket);

}  // namespace muster
