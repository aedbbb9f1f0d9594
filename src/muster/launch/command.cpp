#include "muster/launch/command.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

#include "muster/io/fd.h"

namespace muster {
namespace {

constexpr size_t kMaxStdin = 256 << 20;

// --run-path works as in torchrun: the script's arguments are sys.argv.
constexpr const char* kRunPath = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";
// A saved standard input runs as `python -` would run it, but tracebacks show its lines.
constexpr const char* kRunSaved =
    "import sys; file = open(sys.argv[1], 'rb'); code = compile(file.read(), file.name, 'exec'); file.close(); "
    "sys.argv[:2] = ['-']; del sys, file; exec(code)";

tl::unexpected<Error> cannot_start(const std::string& path, const std::string& why,
                                   ErrorCode code = ErrorCode::kInvalidArgument) {
  return fail(code, "cannot start '" + path + "': " + why);
}

// Call it after stat() has failed.
tl::unexpected<Error> cannot_inspect(const std::string& path) {
  if (errno == ENOENT || errno == ENOTDIR) return cannot_start(path, "no such file", ErrorCode::kNotFound);
  if (errno == EACCES) return cannot_start(path, "this user may not enter a directory that leads to it (chmod +x)");
  return cannot_start(path, std::generic_category().message(errno));
}

bool is_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_program(const std::string& path) { return is_file(path) && ::access(path.c_str(), X_OK) == 0; }

std::optional<std::string> search_path(const std::string& name, const Environment& environment) {
  const std::string path = value_of(environment, "PATH");
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string directory = path.substr(begin, end - begin);
    std::string candidate = (directory.empty() ? "." : directory) + "/" + name;
    if (is_program(candidate)) return candidate;
    begin = end + 1;
  }
  return std::nullopt;
}

bool is_machine_code(const std::string& path) {
  std::string head(4, 0);
  return std::ifstream(path, std::ios::binary).read(head.data(), 4) && head == "\177ELF";
}

Result<> check_script(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return cannot_inspect(path);
  if (::access(path.c_str(), R_OK) != 0) return cannot_start(path, "it is not readable (chmod +r)");
  if (S_ISDIR(info.st_mode) && !is_file(path + "/__main__.py"))
    return cannot_start(path, "it is a directory without a __main__.py");
  if (is_machine_code(path)) return cannot_start(path, "it is not a Python script; give --no-python");
  return {};
}

}  // namespace

Result<std::string> find_program(const std::string& word, const Environment& environment) {
  if (word.find('/') == std::string::npos) {
    if (auto found = search_path(word, environment)) return *found;
    const std::string hint = is_file(word) ? "; './" + word + "' is in this directory" : "";
    return cannot_start(word, "there is no such program on PATH" + hint, ErrorCode::kNotFound);
  }
  struct stat info {};
  if (::stat(word.c_str(), &info) != 0) return cannot_inspect(word);
  if (S_ISDIR(info.st_mode)) return cannot_start(word, "it is a directory");
  if (::access(word.c_str(), X_OK) != 0) return cannot_start(word, "it is not executable (chmod +x)");
  return word;
}

std::string program_path(const std::string& own_path, const Environment& environment) {
  std::string called = own_path;
  if (called.find('/') == std::string::npos) called = search_path(called, environment).value_or("");
  std::error_code ignored;
  if (called.empty()) called = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
  return std::filesystem::absolute(called, ignored).lexically_normal().string();
}

Result<std::string> find_python(const std::string& own_path, const Environment& environment) {
  for (const std::string variable : {"MUSTER_PYTHON", "PYTHON_EXEC"}) {  // the second is torchrun's
    const std::string named = value_of(environment, variable);
    if (named.empty()) continue;
    auto found = find_program(named, environment);
    if (!found) return fail(found.error().code, variable + ": " + found.error().message);
    return found;
  }
  // The path as called has priority: a link to this program in a virtual environment means that environment's Python.
  std::error_code ignored;
  for (const std::filesystem::path& own : {std::filesystem::path(program_path(own_path, environment)),
                                           std::filesystem::read_symlink("/proc/self/exe", ignored)}) {
    const std::string beside = std::filesystem::absolute(own.parent_path() / "python3", ignored).string();
    struct stat info {};
    // Not the Python on PATH if this one cannot be used: it would lack this environment's packages.
    if (own.has_parent_path() && ::lstat(beside.c_str(), &info) == 0) return find_program(beside, environment);
  }
  if (auto found = search_path("python3", environment)) return *found;
  return fail(ErrorCode::kNotFound, "there is no python3 next to muster or on PATH; set MUSTER_PYTHON");
}

Result<std::string> save_stdin(const std::string& directory) {
  const std::string path = directory + "/stdin";
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700));
  if (!file) return fail_errno(errno, "cannot create " + path);
  std::string chunk(1 << 16, '\0');
  size_t total = 0;
  while (true) {
    const ssize_t got = ::read(STDIN_FILENO, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "cannot read the program from standard input");
    if (got == 0) return path;
    total += static_cast<size_t>(got);
    if (total > kMaxStdin) return fail(ErrorCode::kResourceExhausted, "the program on standard input exceeds 256 MiB");
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = ::write(file.get(), chunk.data() + done, static_cast<size_t>(got - done));
      if (put < 0 && errno != EINTR) return fail_errno(errno, "cannot write " + path);
      if (put > 0) done += put;
    }
  }
}

Result<std::vector<std::string>> worker_command(const RunOptions& options, const std::string& own_path,
                                                const Environment& environment) {
  using Target = RunOptions::Target;
  const Target target = options.target;
  std::vector<std::string> words = {options.program};
  if (target == Target::kProgram) {
    if (options.program != "-") {  // a dry run does not save standard input
      MUSTER_ASSIGN(words.front(), find_program(options.program, environment));
    }
  } else {
    if ((target == Target::kScript && !options.from_stdin) || target == Target::kRunPath)
      MUSTER_TRY(check_script(options.program));
    MUSTER_ASSIGN(const std::string python, find_python(own_path, environment));
    words = {python, "-u"};
    if (target == Target::kModule) words.emplace_back("-m");
    if (target == Target::kCode) words.emplace_back("-c");
    if (target == Target::kRunPath) words.insert(words.end(), {"-c", kRunPath});
    if (options.from_stdin) words.insert(words.end(), {"-c", kRunSaved});
    words.push_back(options.program);
  }
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  return words;
}

}  // namespace muster
