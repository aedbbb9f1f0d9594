// Replaces libFuzzer for compilers that have none: runs LLVMFuzzerTestOneInput on every file of a corpus, then on
// mutations of the files. A seed determines the mutations.
//
//   <target> CORPUS [RUNS [SEED [SECONDS]]]     CORPUS is a folder, or one file to replay
//
// A crash writes the input to ./crash-<target> and prints the command that replays it.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace muster {
namespace {

constexpr size_t kMaxInput = 8192;

struct Options {
  std::string corpus;
  uint64_t runs = 20000;
  uint64_t seed = 1;
  int64_t seconds = 60;
};

// State for the crash handler. It is plain memory, because a signal handler must not allocate or lock.
struct {
  const uint8_t* data = nullptr;
  size_t size = 0;
  char file[256] = {};
  char advice[512] = {};
} current;

void dump_input() {
  const int fd = open(current.file, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return;
  const ssize_t written = write(fd, current.data, current.size);
  close(fd);
  if (written >= 0 && write(2, current.advice, strnlen(current.advice, sizeof current.advice)) < 0) _exit(1);
}

void on_signal(int number) {
  dump_input();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void watch_for_crashes(const std::string& program, uint64_t seed) {
  const std::string name = std::filesystem::path(program).filename();
  std::snprintf(current.file, sizeof current.file, "crash-%s", name.c_str());
  std::snprintf(current.advice, sizeof current.advice, "seed %llu; replay with: %s %s\n",
                static_cast<unsigned long long>(seed), program.c_str(), current.file);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(dump_input);
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(number, on_signal);
}

void run_one(const Bytes& input) {
  // A heap block of exactly this size, so that AddressSanitizer finds an access one byte past the end.
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[input.size()]);
  std::copy(input.begin(), input.end(), copy.get());
  current.data = copy.get();
  current.size = input.size();
  LLVMFuzzerTestOneInput(copy.get(), input.size());
}

std::vector<Bytes> read_corpus(const std::string& path) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) files.push_back(entry.path());
  } else {
    files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return corpus;
}

void mutate_once(Bytes& input, const std::vector<Bytes>& corpus, Random& random) {
  static constexpr uint8_t kInteresting[] = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
  const size_t at = random.below(input.size() + 1);
  const auto place = input.begin() + static_cast<ptrdiff_t>(at);
  const size_t length = std::min<size_t>(random.between(1, 8), input.size() - at);
  switch (random.below(7)) {
    case 0:  // flips a bit
      if (at < input.size()) *place ^= static_cast<uint8_t>(1 << random.below(8));
      break;
    case 1:  // writes a boundary value
      if (at < input.size()) *place = kInteresting[random.below(std::size(kInteresting))];
      break;
    case 2:
      input.insert(place, static_cast<uint8_t>(random.next()));
      break;
    case 3:
      input.erase(place, place + static_cast<ptrdiff_t>(length));
      break;
    case 4:
      input.resize(at);
      break;
    case 5: {  // appends a copy of a piece of the input
      const Bytes piece(place, place + static_cast<ptrdiff_t>(length));
      input.insert(input.end(), piece.begin(), piece.end());
      break;
    }
    default: {  // continues with the rest of another input
      const Bytes& other = corpus[random.below(corpus.size())];
      const size_t from = random.below(other.size() + 1);
      input.resize(at);
      input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
    }
  }
  if (input.size() > kMaxInput) input.resize(kMaxInput);
}

int fuzz(const Options& options) {
  std::vector<Bytes> corpus = read_corpus(options.corpus);
  for (const Bytes& input : corpus) run_one(input);
  if (!std::filesystem::is_directory(options.corpus)) return 0;
  corpus.emplace_back();
  Random random(options.seed);
  const Deadline deadline = Deadline::after(std::chrono::seconds(options.seconds));
  uint64_t run = 0;
  for (; run < options.runs && !deadline.passed(); ++run) {
    Bytes input = corpus[random.below(corpus.size())];
    for (uint64_t i = random.between(1, 6); i > 0; --i) mutate_once(input, corpus, random);
    run_one(input);
  }
  std::printf("%zu inputs and %llu mutations from seed %llu\n", corpus.size() - 1, static_cast<unsigned long long>(run),
              static_cast<unsigned long long>(options.seed));
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  muster::Options options;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS [RUNS [SEED [SECONDS]]]\n", argv[0]);
    return 2;
  }
  options.corpus = argv[1];
  if (!std::filesystem::exists(options.corpus)) {
    std::fprintf(stderr, "%s: no such corpus: %s\n", argv[0], argv[1]);
    return 2;
  }
  if (argc > 2) options.runs = std::strtoull(argv[2], nullptr, 10);
  if (argc > 3) options.seed = std::strtoull(argv[3], nullptr, 10);
  if (argc > 4) options.seconds = std::strtoll(argv[4], nullptr, 10);
  muster::watch_for_crashes(argv[0], options.seed);
  return muster::fuzz(options);
}
