#include "muster/cli/explain_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "muster/group/explain.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"

namespace muster {

int explain_command(const std::string&, const std::vector<std::string>& words) {
  Question question;
  std::string collective;
  bool all = false, table = false, picture = false;
  CLI::App app(
      "How a collective would run: its form in shared memory, or its algorithm over links, steps and predicted times.",
      "muster explain");
  app.add_option("COLLECTIVE", collective, "all_reduce, broadcast, ...")->type_name("")->required();
  app.add_option("--bytes", question.bytes, "of the tensor, or of all ranks' blocks together: 4096, 64Ki, 1Mi")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false).description(""))
      ->type_name("SIZE")
      ->default_str("1Mi");
  app.add_option("--ranks,-n", question.ranks, "how many ranks take part")->type_name("N")->capture_default_str();
  app.add_option("--nodes,-N", question.nodes, "over how many nodes they are spread")
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--rank", question.rank, "whose steps over links are shown")->type_name("RANK")->capture_default_str();
  app.add_option("--root", question.root, "of a collective that has one")->type_name("RANK")->capture_default_str();
  app.add_option("--links", question.kind, "what joins nodes (tcp); on one node: as if ranks shared no memory")
      ->type_name("tcp|unix|shm");
  app.add_flag("--all", all, "every step, however many there are");
  auto* as_table = app.add_flag("--table", table, "what each rank holds after each round of messages over links");
  app.add_flag("--picture", picture, "the messages over links as an SVG picture")->excludes(as_table);
  if (const auto end = parse_command_line(app, words)) return *end;
  if (all) question.most_steps = SIZE_MAX;
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
