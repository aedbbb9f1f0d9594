#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echo.h"
#include "fleet.h"
#include "server_process.h"

namespace muster::load {

/// What a case is asked for. Which fields count depends on the case.
struct Setting {
  Address server;
  pid_t pid = 0;      ///< the server's process
  bool echo = false;  ///< the server is the floor: its answers are as long as they should be, and zeros
  size_t connections = 1;
  size_t keys = 1;
  size_t value_bytes = 32;
  size_t rounds = 1;
  Duration duration = std::chrono::seconds(1);  ///< of a closed loop
  std::string prefix;                           ///< of every key: two measurements of one server share none
  Deadline deadline = Deadline::after(std::chrono::minutes(5));
};

/// Figures by name. Times are in seconds.
using Figures = nlohmann::json;

struct Case {
  const char* name;
  const char* what;
  Result<Figures> (*measure)(const Setting&);
  EchoPlan (*floor)(const Setting&);  ///< what the floor's server does in its place; null: there is no floor
};

/// One operation after the other at each connection: set, get, add, multi_get.
std::vector<Case> closed_loops();
/// All connections at one thing together: release, barrier, killed.
std::vector<Case> crowds();
/// What connections themselves cost: connect, idle.
std::vector<Case> arrivals();

/// A fleet with the setting's connections.
Result<Fleet> connect_all(const Setting& setting);
/// A value, every byte of it the same.
Bytes value_of(const Setting& setting);
double seconds_since(TimePoint begin);
/// The middle of sorted or unsorted values, or any other quantile.
double quantile(std::vector<double> values, double share);

}  // namespace muster::load
