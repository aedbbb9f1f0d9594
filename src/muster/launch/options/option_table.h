#pragma once

#include <span>
#include <string>

namespace muster {

/// The options of `muster run` as text, before they are parsed. The values here are the defaults.
struct RawOptions {
  std::string nnodes = "1", nproc = "1", node_rank, role = "default", hosts, hostfile, ssh = "ssh -o BatchMode=yes";
  std::string master_addr, master_port, local_addr, rdzv_backend = "static", rdzv_endpoint, rdzv_id, rdzv_conf,
                                                    secret_file, timeout, store_fanout = "auto";
  std::string max_restarts = "0", restart_delay = "30", monitor_interval = "0.1", shutdown_timeout,
              signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::string start_method, preload, numa_binding, replace;
  std::string log_dir, redirects = "0", tee = "0", local_ranks_filter, stdout_filters, stderr_filters, logs_specs,
                       event_log = "null", prefix_template;
  bool standalone = false, tiered = false, no_warm = false, virtual_local_rank = false, reachable_master_addr = false;
  bool module = false, code = false, no_python = false, run_path = false;
  bool dry_run = false, help = false, until_stdin_ends = false;
};

/// One option, for the parser, the help and the shell completion.
struct OptionRow {
  const char* group;        ///< heading in the help; empty: not shown
  const char* names;        ///< "-r,--redirects"; errors use the first long name
  const char* takes;        ///< its value in the help; lower-case words are literal; null: no value
  const char* description;  ///< one line
  std::string RawOptions::*text = nullptr;
  bool RawOptions::*flag = nullptr;  ///< set instead of `text`: no value, or =true and =false

  /// "--redirects".
  std::string name() const;
};
std::span<const OptionRow> option_table();

}  // namespace muster
