#pragma once

// The files of PyTorch's distributed checkpoints (torch.distributed.checkpoint), without tensors. A checkpoint is a
// directory: `.metadata` is a pickle, and lists for each name its chunks. A chunk is an archive of torch.save() within
// a file "__RANK_NUMBER.distcp". The archive's record data.pkl is a pickle, and names the record with the elements.

#include <map>
#include <string>
#include <vector>

#include "muster/base/bytes.h"

namespace muster::dcp {

using Shape = std::vector<int64_t>;

/// A box of a tensor, and its archive. All numbers are 0 to kMaxNumber, so sums of two do not overflow.
struct Chunk {
  Shape offsets, sizes;
  std::string file;  ///< a name without folders
  int64_t position = 0, length = 0;

  friend bool operator==(const Chunk&, const Chunk&) = default;
};
inline constexpr int64_t kMaxNumber = int64_t{1} << 60;

/// A tensor. Without a dtype: another value, pickled, in one chunk without a shape.
struct Entry {
  std::string dtype;  ///< "float32"
  Shape sizes;
  std::vector<Chunk> chunks;  ///< each has as many dimensions as `sizes`

  friend bool operator==(const Entry&, const Entry&) = default;
};

using Metadata = std::map<std::string, Entry>;

/// Reads `.metadata`. kProtocol if it is malformed, kUnsupported for chunks of extensions and for unknown classes.
Result<Metadata> decode_metadata(ByteView bytes);
Bytes encode_metadata(const Metadata& metadata);

/// How elements lie in an archive.
struct StoredTensor {
  std::string dtype;
  std::string record = "0";  ///< the elements are in the record "data/" + record
  int64_t offset = 0;        ///< of the first element, in elements
  Shape sizes, strides;      ///< as many sizes as strides

  /// The number of elements that the record must have. All elements lie before it.
  int64_t end() const;
  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

/// Reads data.pkl of a tensor's archive.
Result<StoredTensor> decode_tensor(ByteView bytes);
/// `bytes`: the length of the record.
Bytes encode_tensor(const StoredTensor& tensor, int64_t bytes);

/// Reads data.pkl of a number's archive.
Result<int64_t> decode_integer(ByteView bytes);
Bytes encode_integer(int64_t number);

}  // namespace muster::dcp
