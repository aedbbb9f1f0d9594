#include "muster/cli/commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "muster/group/explain.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"

namespace muster {

int explain_command(const std::string& own_path, const std::vector<std::string>& args) {
  if (!args.empty() && args.front() == "graph") {
    return run_module("muster.graph._plan.explain", own_path, {args.begin() + 1, args.end()});
  }
  if (!args.empty() && args.front() == "--devices") {
    return run_module("muster.devices", own_path, {args.begin() + 1, args.end()});
  }
  Question question;
  std::string collective;
  bool all = false, table = false, picture = false;
  CLI::App app(
      "Shows how a collective runs: its form in shared memory or its algorithm over links, with predicted times.\n"
      "`muster explain graph PLAN` shows the step of a compiled graph before and after its plan.\n"
      "`muster explain --devices` shows the GPUs and network adapters of this machine, and how they are linked.",
      "muster explain");
  app.add_option("COLLECTIVE", collective, "all_reduce, broadcast, ...")->type_name("")->required();
  app.add_option("--bytes", question.bytes,
                 "size of the tensor, or of the blocks of all ranks together: 4096, 64Ki, 1Mi")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false).description(""))
      ->type_name("SIZE")
      ->default_str("1Mi");
  app.add_option("--ranks,-n", question.ranks, "number of ranks")->type_name("N")->capture_default_str();
  app.add_option("--nodes,-N", question.nodes, "number of nodes of these ranks")->type_name("N")->capture_default_str();
  app.add_option("--rank", question.rank, "the rank whose steps over links are shown")
      ->type_name("RANK")
      ->capture_default_str();
  app.add_option("--root", question.root, "root of the collective, if it has one")
      ->type_name("RANK")
      ->capture_default_str();
  app.add_option("--links", question.kind, "links between nodes (tcp); on one node: use links instead of shared memory")
      ->type_name("tcp|unix|shm");
  app.add_flag("--all", all, "show all steps");
  auto* as_table = app.add_flag("--table", table, "show what each rank holds after each round of messages over links");
  app.add_flag("--picture", picture, "show the messages over links as an SVG picture")->excludes(as_table);
  if (const auto end = parse_command_line(app, args)) return *end;
  if (all) question.max_steps = SIZE_MAX;
  const auto answer = [&]() -> Result<std::string> {
    MUSTER_ASSIGN(question.collective, collective_named(collective));
    MUSTER_ASSIGN(const Tuning tuning, load_tuning());
    return table     ? explain_table(question, tuning)
           : picture ? explain_picture(question, tuning)
                     : explain(question, tuning);
  }();
  if (answer) return std::fputs(answer->c_str(), stdout) < 0;
  return print_error("explain", answer.error().message, 2);
}

}  // namespace muster
