#pragma once

#include <string>
#include <vector>

#include "muster/base/bytes.h"

namespace muster::load {

/// What one client sends, and the bytes that answer it. The grammar heads store/protocol/protocol_torch.cpp.
struct Step {
  Bytes request;
  size_t reply_bytes = 0;
  Bytes reply;  ///< what the answer must be; empty: only its length is known
};

/// How a client of torch 2.13 begins: VALIDATE and PING, of which the latter is answered.
Step greet();
/// Followed by a PING, for a SET alone has no answer.
Step set(const std::string& key, ByteView value);
Step get(const std::string& key, ByteView value);
Step add(const std::string& key, int64_t amount);
Step wait(const std::vector<std::string>& keys);
Step multi_get(const std::vector<std::string>& keys, ByteView value_of_each);
/// Followed by a PING, as above.
Step multi_set(const std::vector<std::string>& keys, ByteView value_of_each);
Step barrier(const std::string& key, int64_t count);
Step ping();
/// Requests that nothing answers, to be sent before another one: torch's clients do not wait after these.
Bytes silent_set(const std::string& key, ByteView value);
Bytes silent_multi_set(const std::vector<std::string>& keys, ByteView value_of_each);
Step after(ByteView silent, Step step);

}  // namespace muster::load
