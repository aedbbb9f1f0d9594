#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The zygote is written in Python (python/muster/_zygote). Its text is compiled into this program.
const std::string& zygote_text();

/// How to start a Python that runs the zygote.
struct ZygoteStart {
  std::string python;
  std::vector<std::string> args;  ///< arguments that select what it does; see boot.py
  Environment environment;
  int socket = -1;        ///< becomes descriptor 4
  int output = 2;         ///< its standard output and error
  bool detached = false;  ///< runs in its own session, and stays alive after this process dies
};
/// Starts the zygote as a child with its own process group.
Result<pid_t> start_zygote(const ZygoteStart& start);

/// Makes a file in memory, for data that may be too long for a message.
Result<Fd> memory_file(const std::string& bytes);

/// Sends one message with descriptors over a SOCK_SEQPACKET socket. kUnavailable if this would block.
Result<> send_message(int socket, const std::string& text, const std::vector<int>& fds = {});
/// Receives one message without descriptors. kUnavailable if there is no message, kPeerLost at the end of the stream.
Result<std::string> receive_message(int socket);

}  // namespace muster
