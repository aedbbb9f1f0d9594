#pragma once

#include <functional>
#include <vector>

namespace muster {

/// Runs `agent` in a child process. Returns its exit status, or 128 + signal if a signal ended it.
///
/// The two processes monitor each other, so that no process is left after a SIGKILL of either. This process, the
/// monitor, passes the signals of `pass_on` to the agent, and kills all descendants when the agent has died. The agent
/// gets SIGTERM when the monitor dies (monitor_is_gone() is true then), and ends its workers. The monitor calls
/// `killed` after a signal has ended the agent and all descendants are gone. Call run_monitored() before there are
/// threads.
int run_monitored(const std::function<int()>& agent, const std::vector<int>& pass_on,
                  const std::function<void()>& killed);

/// In the agent: true if the process that called run_monitored() has died.
bool monitor_is_gone();

}  // namespace muster
