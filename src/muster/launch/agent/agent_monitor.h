#pragma once

#include <functional>
#include <vector>

namespace muster {

/// Runs `agent` in a child process and returns its exit status, 128 + signal if a signal ended it.
///
/// The two processes look after each other, so that a SIGKILL of either leaves nothing behind: this one passes
/// the signals of `pass_on` on, and kills every descendant of an agent that has died; the agent is sent SIGTERM when
/// this one dies (monitor_is_gone() then says so), and ends its workers. `killed` is called here when a signal has
/// ended the agent, and its descendants are gone. Call it before there are any threads.
int run_monitored(const std::function<int()>& agent, const std::vector<int>& pass_on,
                  const std::function<void()>& killed);

/// In the agent: whether the process that called run_monitored() has died.
bool monitor_is_gone();

}  // namespace muster
