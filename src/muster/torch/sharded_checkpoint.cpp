#include "muster/torch/sharded_checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "muster/io/fd.h"
#include "muster/torch/archive_exchange.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/checkpoint_file.h"
#include "muster/torch/collectives.h"
#include "muster/torch/dcp/metadata.h"
#include "muster/torch/exception.h"
#include "muster/torch/tensor.h"

namespace muster::checkpoint {
namespace {

using dcp::Shape;

constexpr size_t kMaxPickle = 1 << 20;  // of one tensor or number, without the elements

std::string metadata_path(const std::string& directory) { return directory + "/.metadata"; }

ByteView as_view(const at::Tensor& bytes) {
  return {static_cast<const uint8_t*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.nbytes())};
}

/// The name in torch: "float32".
std::string dtype_name(const at::Tensor& tensor) {
  const Dtype dtype = value_or_throw(check_sendable(tensor));
  if (dtype == Dtype::kBits8 || dtype == Dtype::kBits16) {
    throw_error({ErrorCode::kUnsupported, c10::str("tensors of type ", tensor.scalar_type(), " cannot be saved")});
  }
  return name(dtype);
}

struct Box {
  Shape offsets, sizes;

  int64_t volume() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
};

/// The common part of two boxes, if it is not empty.
std::optional<Box> intersection(const Box& a, const Box& b) {
  Box common;
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    const int64_t begin = std::max(a.offsets[i], b.offsets[i]);
    const int64_t end = std::min(a.offsets[i] + a.sizes[i], b.offsets[i] + b.sizes[i]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

Box box_of(const dcp::Chunk& chunk) { return {chunk.offsets, chunk.sizes}; }

/// Throws unless the chunks of an entry cover it and do not overlap.
void check_cover(const std::string& name, const dcp::Entry& entry) {
  int64_t missing = Box{{}, entry.sizes}.volume();
  for (size_t i = 0; i < entry.chunks.size(); ++i) {
    const Box box = box_of(entry.chunks[i]);
    missing -= box.volume();
    for (size_t j = 0; j < i; ++j) {
      if (intersection(box, box_of(entry.chunks[j]))) {
        throw std::runtime_error(c10::str("two shards of '", name, "' overlap, at ", at::IntArrayRef(box.offsets)));
      }
    }
  }
  if (missing != 0) throw std::runtime_error(c10::str("the shards of '", name, "' lack ", missing, " elements"));
}

/// The n of "__RANK_n.distcp" and of "__RANK_n.distcp.partial", which a killed save leaves.
std::optional<int64_t> number_of_file(std::string_view file) {
  constexpr std::string_view kPrefix = "__", kSuffix = ".distcp", kPartial = ".partial";
  if (file.ends_with(kPartial)) file.remove_suffix(kPartial.size());
  if (!file.starts_with(kPrefix) || !file.ends_with(kSuffix)) return std::nullopt;
  file.remove_suffix(kSuffix.size());
  file.remove_prefix(file.rfind('_') + 1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(file.data(), file.data() + file.size(), number);
  const bool parsed = error == std::errc() && end == file.data() + file.size();
  return parsed && number >= 0 && number < dcp::kMaxNumber ? std::optional(number) : std::nullopt;
}

/// The number of a save: greater than those of all files, so no file of the old checkpoint changes.
int64_t next_number(const std::string& directory) {
  int64_t next = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (const auto number = number_of_file(entry.path().filename().string())) next = std::max(next, *number + 1);
  }
  return next;
}

/// Ignores errors, because a file that stays costs only space.
void remove_other_files(const std::string& directory, int64_t number) {
  (void)error_message_of([&] {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      const auto of = number_of_file(entry.path().filename().string());
      std::error_code ignored;
      if (of && *of != number) std::filesystem::remove(entry.path(), ignored);
    }
  });
}

/// Writes an archive as torch.save() does. Returns its length.
int64_t write_archive(const ByteSink& sink, const Bytes& pickle, const at::Tensor& elements) {
  size_t written = 0;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    written += size;
    return sink(data, size);
  });
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", "little", 6);
  if (elements.defined()) archive.writeRecord("data/0", elements.const_data_ptr(), elements.nbytes());
  archive.writeEndOfFile();
  return static_cast<int64_t>(written);
}

/// Joins the entries that the ranks wrote.
dcp::Metadata merge(const std::vector<at::Tensor>& parts) {
  dcp::Metadata merged;
  for (const at::Tensor& bytes : parts) {
    for (auto& [name, entry] : value_or_throw(dcp::decode_metadata(as_view(bytes)))) {
      const auto [position, inserted] = merged.try_emplace(name, entry);
      if (inserted) continue;
      dcp::Entry& whole = position->second;
      if (whole.dtype != entry.dtype || whole.sizes != entry.sizes) {
        throw std::runtime_error(c10::str("'", name, "' is ", whole.dtype, at::IntArrayRef(whole.sizes),
                                          " at one rank, and ", entry.dtype, at::IntArrayRef(entry.sizes),
                                          " at another"));
      }
      whole.chunks.insert(whole.chunks.end(), entry.chunks.begin(), entry.chunks.end());
    }
  }
  for (const auto& [name, entry] : merged) check_cover(name, entry);
  return merged;
}

/// The archive of one chunk, within its file.
class ArchiveFile final : public caffe2::serialize::ReadAdapterInterface {
 public:
  ArchiveFile(const std::string& path, const dcp::Chunk& chunk)
      : fd_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)), position_(chunk.position), length_(chunk.length) {
    struct stat status {};
    if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw_errno(errno, "cannot read " + path);
    if (position_ + length_ > status.st_size) throw std::runtime_error(path + " is truncated");
  }

  size_t size() const override { return static_cast<size_t>(length_); }
  /// Returns how many bytes it has read: fewer than `count` at the end, or if the disk fails.
  size_t read(uint64_t from, void* to, size_t count, const char* /*what*/) const override {
    if (from >= size()) return 0;
    count = std::min(count, size() - static_cast<size_t>(from));
    size_t done = 0;
    while (done < count) {
      const ssize_t got = ::pread(fd_.get(), static_cast<char*>(to) + done, count - done,
                                  position_ + static_cast<int64_t>(from + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      done += static_cast<size_t>(got);
    }
    return done;
  }

 private:
  const Fd fd_;
  const int64_t position_, length_;
};

Bytes read_record(caffe2::serialize::PyTorchStreamReader& archive, const std::string& name) {
  const size_t size = archive.getRecordSize(name);
  if (size > kMaxPickle) throw std::runtime_error("the record " + name + " is too long");
  Bytes bytes(size);
  archive.getRecord(name, bytes.data(), bytes.size());
  return bytes;
}

}  // namespace

/// The part of save_sharded() that concerns one rank.
class ShardWriter {
 public:
  ShardWriter(const ShardedState& state, const GroupSpec& self) {
    int shared = 0;
    for (const ShardedState::Part& part : state.parts_) {
      if (part.shared) names_ += c10::str(names_.empty() ? "" : ", ", "'", part.name, "'");
      if (!part.shared || shared++ % self.size == self.rank) own_.push_back(&part);
    }
  }

  /// The names of what all ranks have.
  const std::string& names() const { return names_; }

  dcp::Metadata write(const std::string& directory, const std::string& file) const {
    dcp::Metadata written;
    write_atomically(directory + "/" + file, [&](const ByteSink& sink) {
      int64_t position = 0;
      for (const ShardedState::Part* part : own_) {
        dcp::Entry& entry = written[part->name];
        entry.sizes = part->sizes;
        const int64_t length = write_part(sink, *part, entry);
        if (length == 0) continue;
        const Shape sizes = part->number != nullptr ? Shape() : part->tensor.sizes().vec();
        entry.chunks.push_back({part->offsets, sizes, file, position, length});
        position += length;
      }
    });
    return written;
  }

 private:
  /// Returns the length of the archive, or 0 if there is nothing to write.
  static int64_t write_part(const ByteSink& sink, const ShardedState::Part& part, dcp::Entry& entry) {
    if (part.number != nullptr) return write_archive(sink, dcp::encode_integer(*part.number), {});
    entry.dtype = dtype_name(part.tensor);
    if (part.tensor.numel() == 0) return 0;
    const at::Tensor plain = part.tensor.detach().resolve_conj().resolve_neg().contiguous();
    const dcp::StoredTensor stored{entry.dtype, "0", 0, plain.sizes().vec(), plain.strides().vec()};
    return write_archive(sink, dcp::encode_tensor(stored, static_cast<int64_t>(plain.nbytes())), plain);
  }

  std::vector<const ShardedState::Part*> own_;
  std::string names_;
};

/// The part of load_sharded() that concerns one rank.
class ShardReader {
 public:
  ShardReader(std::string directory, dcp::Metadata metadata)
      : directory_(std::move(directory)), metadata_(std::move(metadata)) {}

  void read_all(ShardedState& state) const {
    for (ShardedState::Part& part : state.parts_) {
      const std::string problem = error_message_of([&] { read(part); });
      if (!problem.empty()) throw std::runtime_error("'" + part.name + "': " + problem);
    }
  }

 private:
  void read(ShardedState::Part& part) const {
    const auto found = metadata_.find(part.name);
    if (found == metadata_.end()) throw std::runtime_error("the checkpoint has none");
    const dcp::Entry& entry = found->second;
    if ((part.number != nullptr) != entry.dtype.empty()) {
      throw std::runtime_error(entry.dtype.empty() ? "the checkpoint has no tensor" : "the checkpoint has a tensor");
    }
    if (part.number != nullptr) {
      caffe2::serialize::PyTorchStreamReader archive(open(entry.chunks.front()));
      *part.number = value_or_throw(dcp::decode_integer(read_record(archive, "data.pkl")));
      return;
    }
    const std::string dtype = dtype_name(part.tensor);
    if (entry.dtype != dtype || entry.sizes != part.sizes) {
      throw std::runtime_error(
          c10::str("it is ", entry.dtype, at::IntArrayRef(entry.sizes), ", here ", dtype, at::IntArrayRef(part.sizes)));
    }
    read_tensor(part, entry);
  }

  void read_tensor(const ShardedState::Part& part, const dcp::Entry& entry) const {
    const Box own{part.offsets, part.tensor.sizes().vec()};
    int64_t missing = part.tensor.numel();
    std::vector<Box> loaded;
    for (const dcp::Chunk& chunk : entry.chunks) {
      const auto common = missing > 0 ? intersection(own, box_of(chunk)) : std::nullopt;
      if (!common) continue;
      for (const Box& box : loaded) {
        if (intersection(box, *common)) throw std::runtime_error("chunks of the checkpoint overlap");
      }
      at::Tensor target = part.tensor.detach();
      Box within{common->offsets, common->sizes};
      for (size_t i = 0; i < within.sizes.size(); ++i) {
        target = target.narrow(static_cast<int64_t>(i), common->offsets[i] - own.offsets[i], common->sizes[i]);
        within.offsets[i] -= chunk.offsets[i];
      }
      read_box(chunk, within, entry.dtype, target);
      missing -= common->volume();
      loaded.push_back(*common);
    }
    if (missing != 0) throw std::runtime_error("the chunks of the checkpoint do not cover it");
  }

  /// Reads the elements of a chunk from the first to the last one of the box, and copies the box.
  void read_box(const dcp::Chunk& chunk, const Box& box, const std::string& dtype, const at::Tensor& target) const {
    const auto file = open(chunk);
    caffe2::serialize::PyTorchStreamReader archive(file);
    const dcp::StoredTensor stored = value_or_throw(dcp::decode_tensor(read_record(archive, "data.pkl")));
    const std::string record = "data/" + stored.record;
    const auto item = static_cast<size_t>(target.element_size());
    if (stored.dtype != dtype || stored.sizes != chunk.sizes) throw std::runtime_error("its metadata differ");
    if (archive.hasRecord("byteorder") && read_record(archive, "byteorder") != to_bytes("little")) {
      throw std::runtime_error("it is not little-endian");
    }
    if (std::min(archive.getRecordSize(record), file->size()) / item < static_cast<size_t>(stored.end())) {
      throw std::runtime_error("its file is truncated");
    }
    int64_t first = stored.offset, count = 1;  // within stored.end()
    for (size_t i = 0; i < box.sizes.size(); ++i) {
      first += box.offsets[i] * stored.strides[i];
      count += (box.sizes[i] - 1) * stored.strides[i];
    }
    const at::Tensor elements = at::empty({count}, target.options());
    const size_t begin = archive.getRecordOffset(record) + static_cast<size_t>(first) * item;
    if (file->read(begin, elements.mutable_data_ptr(), elements.nbytes(), "") != elements.nbytes()) {
      throw std::runtime_error("its file is truncated or cannot be read");
    }
    target.copy_(elements.as_strided(box.sizes, stored.strides));
  }

  std::shared_ptr<ArchiveFile> open(const dcp::Chunk& chunk) const {
    return std::make_shared<ArchiveFile>(directory_ + "/" + chunk.file, chunk);  // the reader wants a shared_ptr
  }

  const std::string directory_;
  const dcp::Metadata metadata_;
};

ShardedState& ShardedState::add_part(Part part) {
  const char* const title = "checkpoint::ShardedState::add";
  check_argument(!part.name.empty(), title, "the name is empty");
  for (const Part& other : parts_) check_argument(other.name != part.name, title, "'", part.name, "' is taken");
  if (part.number == nullptr) {
    value_or_throw(check_sendable(part.tensor));
    const auto dims = static_cast<size_t>(part.tensor.dim());
    bool within = part.sizes.size() == dims && part.offsets.size() == dims;
    for (size_t i = 0; within && i < dims; ++i) {
      const int64_t room = part.sizes[i] - part.tensor.size(static_cast<int64_t>(i));
      within = part.offsets[i] >= 0 && part.offsets[i] <= room;
    }
    check_argument(within, title, "the shard ", part.tensor.sizes(), " of '", part.name, "' at ",
                   at::IntArrayRef(part.offsets), " is not within ", at::IntArrayRef(part.sizes));
  }
  parts_.push_back(std::move(part));
  return *this;
}

ShardedState& ShardedState::add(std::string name, at::Tensor tensor) {
  value_or_throw(check_sendable(tensor));
  Part part{std::move(name), tensor, nullptr, tensor.sizes().vec(), {}, true};
  part.offsets.resize(part.sizes.size());
  return add_part(std::move(part));
}

ShardedState& ShardedState::add(const std::string& name, const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) add(name + "." + item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(name + "." + item.key(), item.value());
  return *this;
}

ShardedState& ShardedState::add(std::string name, int64_t& number) {
  return add_part({std::move(name), {}, &number, {}, {}, true});
}

ShardedState& ShardedState::add_shard(std::string name, at::Tensor shard, std::vector<int64_t> sizes,
                                      std::vector<int64_t> offsets) {
  return add_part({std::move(name), std::move(shard), nullptr, std::move(sizes), std::move(offsets), false});
}

void save_sharded(Group& group, const std::string& directory, const ShardedState& state) {
  const GroupSpec& self = group.membership();
  const auto check_all = [&](const std::string& problem, const std::function<void()>& undo = {}) {
    throw_if_any_failed(group, problem.empty() ? "" : "could not save the checkpoint " + directory + ": " + problem,
                        undo);
  };
  const ShardWriter writer(state, self);
  const bool alike = broadcast_text(group, writer.names(), 0) == writer.names();
  check_all(alike ? "" : "its state has other whole tensors and numbers than rank 0: " + writer.names());

  const at::Tensor number = at::zeros({}, at::kLong);
  check_all(self.rank != 0 ? "" : error_message_of([&] {
    std::filesystem::create_directories(directory);
    number.fill_(next_number(directory));
  }));
  broadcast(group, number, 0);

  const std::string file = c10::str("__", self.rank, "_", number.item<int64_t>(), ".distcp");
  const auto remove_own = [&] { ::unlink((directory + "/" + file).c_str()); };
  at::Tensor written;
  const std::string problem = error_message_of([&] {
    const Bytes encoded = dcp::encode_metadata(writer.write(directory, file));
    written = at::empty({static_cast<int64_t>(encoded.size())}, at::kByte);
    std::memcpy(written.mutable_data_ptr(), encoded.data(), encoded.size());
  });
  check_all(problem, remove_own);
  const std::vector<at::Tensor> all = gather_bytes(group, written, 0);
  Bytes merged;
  const auto encode = [&] { merged = dcp::encode_metadata(merge(all)); };
  check_all(self.rank != 0 ? "" : error_message_of(encode), remove_own);
  // From here on no rank removes its file: a failed write may have replaced `.metadata`.
  check_all(self.rank != 0 ? "" : error_message_of([&] {
    write_atomically(metadata_path(directory), [&](const ByteSink& sink) { sink(merged.data(), merged.size()); });
    remove_other_files(directory, number.item<int64_t>());
  }));
}

void load_sharded(Group& group, const std::string& directory, ShardedState& state) {
  const auto check_all = [&](const std::string& problem) {
    throw_if_any_failed(group, problem.empty() ? "" : "could not load the checkpoint " + directory + ": " + problem);
  };
  at::Tensor bytes;
  const bool reads = group.membership().rank == 0;
  check_all(!reads ? "" : error_message_of([&] { bytes = read_file(metadata_path(directory)); }));
  bytes = broadcast_bytes(group, bytes, 0);
  check_all(error_message_of([&] {
    const at::NoGradGuard no_grad;
    ShardReader(directory, value_or_throw(dcp::decode_metadata(as_view(bytes)))).read_all(state);
  }));
}

}  // namespace muster::checkpoint
