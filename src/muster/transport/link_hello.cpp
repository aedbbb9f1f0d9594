// The hello of a link, inside of the handshake's proof:
//
//   hello := "LNK" version:u8=3 wire:u8 rank:i32 size:i32 generation:u64 pid:i32 group:string host:string
//            subflow:u8 subflows:u8
//
//   string := length:u32 bytes[length], at most 1 KiB. Little-endian. wire: 1 socket, 2 shared memory.
#include "muster/transport/link_hello.h"

#include <fmt/format.h>
#include <unistd.h>

#include "muster/base/host_name.h"

namespace muster {
namespace {

constexpr std::string_view kHelloMagic = "LNK";
constexpr uint8_t kVersion = 3;
constexpr size_t kMaxNameBytes = 1024;

const char* name(LinkHello::Wire wire) { return wire == LinkHello::Wire::kShm ? "shared memory" : "sockets"; }

Result<std::string> get_name(Reader& reader) {
  MUSTER_ASSIGN(std::string text, reader.get_string());
  if (text.size() > kMaxNameBytes) return fail(ErrorCode::kProtocol, "a link's hello holds a name that is too long");
  return text;
}

}  // namespace

Result<LinkHello> make_hello(const LinkIdentity& self, LinkHello::Wire wire) {
  if (self.size < 1 || self.rank < 0 || self.rank >= self.size) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} cannot have links: ranks go from 0 to size - 1", self.rank, self.size));
  }
  if (self.group.size() > kMaxNameBytes) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("a group's name has at most {} bytes", kMaxNameBytes));
  }
  if (self.subflow.count < 1 || self.subflow.count > kMaxSubflows) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a link has 1 to {} subflows, not {}", kMaxSubflows, self.subflow.count));
  }
  return LinkHello{{self.rank, host_name(), getpid(), self.size, self.subflow}, wire, self.generation, self.group};
}

Bytes encode(const LinkHello& hello) {
  Writer writer;
  writer.put_raw(as_bytes(kHelloMagic)).put(kVersion).put(hello.wire).put(int32_t{hello.rank}).put(int32_t{hello.size});
  writer.put(hello.generation).put(int32_t{hello.pid}).put_string(hello.group).put_string(hello.host);
  writer.put(static_cast<uint8_t>(hello.subflow.index)).put(static_cast<uint8_t>(hello.subflow.count));
  return writer.take();
}

Result<LinkHello> parse_hello(ByteView bytes) {
  Reader reader(bytes);
  MUSTER_ASSIGN(const ByteView magic, reader.get_raw(kHelloMagic.size()));
  if (to_string(magic) != kHelloMagic) return fail(ErrorCode::kProtocol, "the peer speaks muster, but not as a link");
  MUSTER_ASSIGN(const auto version, reader.get<uint8_t>());
  if (version != kVersion) {
    return fail(
        ErrorCode::kProtocol,
        fmt::format("the peer's links speak version {}, ours {}; install one muster everywhere", version, kVersion));
  }
  LinkHello hello;
  MUSTER_ASSIGN(hello.wire, reader.get<LinkHello::Wire>());
  MUSTER_ASSIGN(hello.rank, reader.get<int32_t>());
  MUSTER_ASSIGN(hello.size, reader.get<int32_t>());
  MUSTER_ASSIGN(hello.generation, reader.get<uint64_t>());
  MUSTER_ASSIGN(hello.pid, reader.get<int32_t>());
  MUSTER_ASSIGN(hello.group, get_name(reader));
  MUSTER_ASSIGN(hello.host, get_name(reader));
  MUSTER_ASSIGN(hello.subflow.index, reader.get<uint8_t>());
  MUSTER_ASSIGN(hello.subflow.count, reader.get<uint8_t>());
  MUSTER_TRY(reader.finish());
  return hello;
}

Result<> check_hello(const LinkHello& self, const LinkHello& peer, Rank expected) {
  const auto refuse = [&](const std::string& what) {
    return fail(ErrorCode::kMismatch, fmt::format("{} {}", peer.to_string(), what), peer.rank);
  };
  if (peer.wire != self.wire) {
    return refuse(fmt::format("links over {}, rank {} over {}", name(peer.wire), self.rank, name(self.wire)));
  }
  if (peer.group != self.group) {
    return refuse(fmt::format("is of group \"{}\", rank {} of group \"{}\"", peer.group, self.rank, self.group));
  }
  if (peer.generation != self.generation) {
    return refuse(fmt::format("is of generation {} of group \"{}\", rank {} of generation {}", peer.generation,
                              self.group, self.rank, self.generation));
  }
  if (peer.size != self.size) {
    return refuse(fmt::format("has world size {}, rank {} has {}; start all processes with the same world size",
                              peer.size, self.rank, self.size));
  }
  if (peer.subflow.count != self.subflow.count || peer.subflow.index >= self.subflow.count) {
    return refuse(
        fmt::format("makes a link of {} connections, rank {} of {}; set MUSTER_TCP_STREAMS alike at all ranks",
                    peer.subflow.count, self.rank, self.subflow.count));
  }
  if (peer.rank < 0 || peer.rank >= self.size || peer.rank == self.rank) {
    return refuse(fmt::format("links to rank {} of {}: two processes with one rank?", self.rank, self.size));
  }
  if (expected != kNoRank && peer.rank != expected) {
    return refuse(fmt::format("answered where rank {} dialed rank {}", self.rank, expected));
  }
  return {};
}

}  // namespace muster
