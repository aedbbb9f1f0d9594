#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "muster/rpc/relay.h"

namespace muster::rpc {

/// Carries the connections between workers by send and receive of a c10d group, over its backend for CPU tensors: Gloo,
/// MPI, muster or any other one. So calls work wherever that backend does. It is slower than muster's own links: each
/// message passes two Unix sockets and is copied four times more.
///
/// Every rank of the group is one worker, and starts a relay. Two threads wait for each other rank, and one more drives
/// the sockets. The group may be used for other messages, too, but not with kRelayTag, and must not be destroyed before
/// the worker. With c10d's MPI backend it must not run collectives while calls are made: a collective holds the lock of
/// all operations until all ranks have called it. A rank that is lost is noticed as the backend notices it, at its
/// timeout at the latest.
/// kInvalidArgument for a group without a backend for CPU tensors.
inline constexpr int kRelayTag = 28021;
Result<std::shared_ptr<Relay>> relay_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace muster::rpc
