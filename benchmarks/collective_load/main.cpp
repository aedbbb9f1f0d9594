// muster-collective-load CONTROL ...: one rank of a job whose collectives are measured. It says its rank on the Unix
// socket CONTROL and then answers requests (cases.h), a line each, until the socket ends; between requests it sleeps
// there, so that several jobs can be measured in turn on the same cores. One source for all libraries: what differs is
// in *_peer.cpp. `muster bench mpi` starts it.

#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>

#include "cases.h"

namespace muster::load {
namespace {

/// A stream to the driver; null, with a message, where it is not there.
std::FILE* connect_to(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    std::perror(path.c_str());
    return nullptr;
  }
  return fdopen(socket_fd, "r+");
}

void say(std::FILE* control, const std::string& line) {
  std::fseek(control, 0, SEEK_CUR);  // between reading and writing, as ISO C asks
  std::fprintf(control, "%s\n", line.c_str());
  std::fflush(control);
}

/// A core for each rank, where there are enough: the same for every library, none of which is bound by its launcher. A
/// library that was told before could take the one core that it then sees for all there are.
void keep_to_a_core(int rank, int size) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) < size) return;
  int core = 0;
  for (int passed = 0; passed < rank || !CPU_ISSET(core, &usable); ++core) passed += CPU_ISSET(core, &usable) ? 1 : 0;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) std::perror("sched_setaffinity");
}

int serve(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: muster-collective-load CONTROL [RANK RANKS STORE]\n");
    return 2;
  }
  std::unique_ptr<Peer> peer = join(argc, argv);
  keep_to_a_core(peer->rank(), peer->size());
  std::FILE* const control = connect_to(argv[1]);
  if (control == nullptr) return 1;
  say(control, std::to_string(peer->rank()));
  Cases cases(*peer);
  char line[256];
  while (std::fgets(line, sizeof line, control) != nullptr) {
    Request request;
    std::istringstream words(line);
    words >> request.verb >> request.operation >> request.bytes >> request.repeats >> request.slots >> request.memory;
    if (!words || request.slots == 0) return 2;
    say(control, cases.answer(request));
  }
  std::fclose(control);
  return 0;
}

}  // namespace
}  // namespace muster::load

int main(int argc, char** argv) { return muster::load::serve(argc, argv); }
