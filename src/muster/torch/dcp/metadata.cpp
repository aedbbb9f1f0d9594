#include "muster/torch/dcp/metadata.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "muster/torch/dcp/pickle.h"

namespace muster::dcp {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kMaxBytes = 256 << 20;  // of .metadata
constexpr size_t kMaxDims = 64;
constexpr size_t kMaxName = 4096;
constexpr size_t kMaxAttributes = 16;

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata.Metadata";
constexpr std::string_view kTensorStorage = "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
constexpr std::string_view kBytesStorage = "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
constexpr std::string_view kChunkStorage = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
constexpr std::string_view kProperties = "torch.distributed.checkpoint.metadata.TensorProperties";
constexpr std::string_view kMemoryFormat = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING";
constexpr std::string_view kIndex = "torch.distributed.checkpoint.metadata.MetadataIndex";
constexpr std::string_view kStorageInfo = "torch.distributed.checkpoint.filesystem._StorageInfo";
constexpr std::string_view kLayout = "torch.serialization._get_layout";
constexpr std::string_view kSize = "torch.Size";
constexpr std::string_view kRebuild2 = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kRebuild3 = "torch._utils._rebuild_tensor_v3";
constexpr std::string_view kUntyped = "torch.storage.UntypedStorage";
constexpr std::string_view kOrderedDict = "collections.OrderedDict";

constexpr std::string_view kClasses[] = {
    kMetadata, kTensorStorage, kBytesStorage, kChunkStorage, kProperties, kMemoryFormat, kIndex, kStorageInfo, kLayout,
    kSize, kRebuild2, kRebuild3, kUntyped, kOrderedDict,
    // Python 3.11.0 to 3.11.4 makes an enumerator of getattr and its name. Nothing is called, and the memory format is
    // not read.
    "builtins.getattr",
    // In the attributes that describe the checkpoint itself, which are not read.
    "torch.distributed.checkpoint.metadata.StorageMeta", "pathlib.PosixPath", "pathlib.WindowsPath",
    "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
    // dtypes
    "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64", "torch.float16", "torch.float32",
    "torch.float64", "torch.complex32", "torch.bcomplex32", "torch.complex64", "torch.complex128", "torch.bool",
    "torch.bfloat16", "torch.float8_e5m2", "torch.float8_e4m3fn", "torch.float8_e5m2fnuz", "torch.float8_e4m3fnuz",
    "torch.float8_e8m0fnu", "torch.uint16", "torch.uint32", "torch.uint64", "torch.float4_e2m1fn_x2",
    // storages
    "torch.ByteStorage", "torch.CharStorage", "torch.ShortStorage", "torch.IntStorage", "torch.LongStorage",
    "torch.HalfStorage", "torch.FloatStorage", "torch.DoubleStorage", "torch.ComplexFloatStorage",
    "torch.ComplexDoubleStorage", "torch.BoolStorage", "torch.BFloat16Storage"};

constexpr std::pair<std::string_view, std::string_view> kDtypeOfStorage[] = {
    {"torch.ByteStorage", "uint8"},
    {"torch.CharStorage", "int8"},
    {"torch.ShortStorage", "int16"},
    {"torch.IntStorage", "int32"},
    {"torch.LongStorage", "int64"},
    {"torch.HalfStorage", "float16"},
    {"torch.FloatStorage", "float32"},
    {"torch.DoubleStorage", "float64"},
    {"torch.ComplexFloatStorage", "complex64"},
    {"torch.ComplexDoubleStorage", "complex128"},
    {"torch.BoolStorage", "bool"},
    {"torch.BFloat16Storage", "bfloat16"}};

tl::unexpected<Error> malformed(const std::string& what) {
  return fail(ErrorCode::kProtocol, "malformed pickle: " + what);
}

/// The attribute of an object, or null. Looks at a few attributes only, because objects may share a huge state.
const PickleValue* find_attribute(const PickleValue& object, std::string_view name) {
  if (object.kind != Kind::kObject || object.items.size() != 2 || object.items[1]->kind != Kind::kDict) return nullptr;
  const auto& state = object.items[1]->items;
  for (size_t i = 0; i + 1 < std::min(state.size(), 2 * kMaxAttributes); i += 2) {
    if (state[i]->kind == Kind::kText && state[i]->text == name) return state[i + 1];
  }
  return nullptr;
}

Result<const PickleValue*> attribute(const PickleValue& object, std::string_view type, std::string_view name,
                                     Kind kind) {
  const PickleValue* found = object.text == type ? find_attribute(object, name) : nullptr;
  if (found == nullptr || found->kind != kind) {
    return malformed("a " + std::string(type.substr(type.rfind('.') + 1)) + " without " + std::string(name));
  }
  return found;
}

Result<int64_t> number_of(const PickleValue& value) {
  if (value.kind != Kind::kInteger || value.number < 0 || value.number > kMaxNumber) {
    return malformed("a size or offset is not a number that is possible");
  }
  return value.number;
}

/// A tuple of numbers, or a torch.Size.
Result<Shape> shape_of(const PickleValue& value) {
  const bool size = value.kind == Kind::kObject && value.text == kSize && value.items[0]->items.size() == 1;
  const PickleValue& tuple = size ? *value.items[0]->items[0] : value;
  if (tuple.kind != Kind::kTuple || tuple.items.size() > kMaxDims) return malformed("a shape is not a tuple");
  Shape shape;
  for (const PickleValue* item : tuple.items) {
    MUSTER_ASSIGN(const int64_t number, number_of(*item));
    shape.push_back(number);
  }
  return shape;
}

Result<std::string> dtype_of(const PickleValue& value) {
  constexpr std::string_view kPrefix = "torch.";
  if (value.kind != Kind::kGlobal || !value.text.starts_with(kPrefix)) return malformed("a dtype is missing");
  return std::string(value.text.substr(kPrefix.size()));
}

Result<std::string_view> name_of(const PickleValue& value, size_t limit) {
  if (value.kind != Kind::kText || value.text.empty() || value.text.size() > limit)
    return malformed("a name is missing");
  return value.text;
}

/// Where the archive of each chunk is, by the name of its entry and the chunk's offsets.
using Locations = std::map<std::pair<std::string_view, Shape>, const PickleValue*>;

Result<Locations> locations_of(const PickleValue& storage) {
  Locations locations;
  for (size_t i = 0; i + 1 < storage.items.size(); i += 2) {
    const PickleValue& index = *storage.items[i];
    MUSTER_ASSIGN(const auto* name, attribute(index, kIndex, "fqn", Kind::kText));
    MUSTER_ASSIGN(const std::string_view text, name_of(*name, kMaxName));
    const PickleValue* offset = find_attribute(index, "offset");
    Shape offsets;
    if (offset != nullptr && offset->kind != Kind::kNone) {
      MUSTER_ASSIGN(offsets, shape_of(*offset));
    }
    locations.insert_or_assign({text, std::move(offsets)}, storage.items[i + 1]);
  }
  return locations;
}

/// Removes the location, because no two chunks share one.
Result<Chunk> take_chunk(std::string_view name, Shape offsets, Shape sizes, Locations& locations) {
  const auto found = locations.find({name, offsets});
  if (found == locations.end()) return malformed("a chunk of '" + std::string(name) + "' is in no file");
  const PickleValue& info = *found->second;
  locations.erase(found);
  MUSTER_ASSIGN(const auto* path, attribute(info, kStorageInfo, "relative_path", Kind::kText));
  MUSTER_ASSIGN(const auto* position, attribute(info, kStorageInfo, "offset", Kind::kInteger));
  MUSTER_ASSIGN(const auto* length, attribute(info, kStorageInfo, "length", Kind::kInteger));
  const PickleValue* extensions = find_attribute(info, "transform_descriptors");
  if (extensions != nullptr && !extensions->items.empty()) {
    return fail(ErrorCode::kUnsupported, "'" + std::string(name) + "' was saved with an extension of PyTorch");
  }
  Chunk chunk{std::move(offsets), std::move(sizes), {}, 0, 0};
  MUSTER_ASSIGN(const std::string_view file, name_of(*path, 255));
  if (file.find('/') != std::string_view::npos || file.find('\0') != std::string_view::npos || file.starts_with('.')) {
    return malformed("'" + std::string(file) + "' is not a name of a file");
  }
  chunk.file = file;
  MUSTER_ASSIGN(chunk.position, number_of(*position));
  MUSTER_ASSIGN(chunk.length, number_of(*length));
  return chunk;
}

Result<Entry> entry_of(std::string_view name, const PickleValue& value, Locations& locations) {
  Entry entry;
  if (value.kind == Kind::kObject && value.text == kBytesStorage) {
    MUSTER_ASSIGN(Chunk chunk, take_chunk(name, {}, {}, locations));
    entry.chunks.push_back(std::move(chunk));
    return entry;
  }
  MUSTER_ASSIGN(const auto* properties, attribute(value, kTensorStorage, "properties", Kind::kObject));
  MUSTER_ASSIGN(const auto* size, attribute(value, kTensorStorage, "size", Kind::kObject));
  MUSTER_ASSIGN(const auto* chunks, attribute(value, kTensorStorage, "chunks", Kind::kList));
  const PickleValue* state = properties->items.size() == 2 ? properties->items[1] : nullptr;
  if (state == nullptr || state->kind != Kind::kTuple || state->items.empty()) return malformed("a dtype is missing");
  MUSTER_ASSIGN(entry.dtype, dtype_of(*state->items[0]));
  MUSTER_ASSIGN(entry.sizes, shape_of(*size));
  for (const PickleValue* item : chunks->items) {
    MUSTER_ASSIGN(const auto* offsets, attribute(*item, kChunkStorage, "offsets", Kind::kObject));
    MUSTER_ASSIGN(const auto* sizes, attribute(*item, kChunkStorage, "sizes", Kind::kObject));
    MUSTER_ASSIGN(Shape from, shape_of(*offsets));
    MUSTER_ASSIGN(Shape lengths, shape_of(*sizes));
    if (from.size() != entry.sizes.size() || lengths.size() != entry.sizes.size()) {
      return malformed("a chunk has other dimensions than its tensor");
    }
    MUSTER_ASSIGN(Chunk chunk, take_chunk(name, std::move(from), std::move(lengths), locations));
    entry.chunks.push_back(std::move(chunk));
  }
  return entry;
}

void put_shape(PickleWriter& out, const Shape& shape) {
  out.put(Opcode::kMark);
  for (const int64_t number : shape) out.put_integer(number);
  out.put(Opcode::kTuple);
}

void put_size(PickleWriter& out, const Shape& shape) {
  out.put_global(kSize);
  put_shape(out, shape);
  out.put(Opcode::kTuple1).put(Opcode::kReduce);
}

void put_entry(PickleWriter& out, const Entry& entry) {
  if (entry.dtype.empty()) {
    out.put_global(kBytesStorage).put(Opcode::kEmptyTuple).put(Opcode::kNewObj);
    return;
  }
  out.begin_object(kTensorStorage).put_text("properties");
  // The state is a tuple: dtype, layout, requires_grad, memory format, pin_memory.
  out.put_global(kProperties).put(Opcode::kEmptyTuple).put(Opcode::kNewObj).put(Opcode::kMark);
  out.put_global("torch." + entry.dtype);
  out.put_global(kLayout).put_text("torch.strided").put(Opcode::kTuple1).put(Opcode::kReduce).put(Opcode::kNewFalse);
  out.put_global(kMemoryFormat).put_integer(0).put(Opcode::kTuple1).put(Opcode::kReduce).put(Opcode::kNewFalse);
  out.put(Opcode::kTuple).put(Opcode::kBuild);
  put_size(out.put_text("size"), entry.sizes);
  out.put_text("chunks").put(Opcode::kEmptyList).put(Opcode::kMark);
  for (const Chunk& chunk : entry.chunks) {
    out.begin_object(kChunkStorage);
    put_size(out.put_text("offsets"), chunk.offsets);
    put_size(out.put_text("sizes"), chunk.sizes);
    out.end_object();
  }
  out.put(Opcode::kAppends).end_object();
}

void put_location(PickleWriter& out, const std::string& name, const Entry& entry, const Chunk& chunk) {
  out.begin_object(kIndex).put_text("fqn").put_text(name);
  if (!entry.dtype.empty()) put_size(out.put_text("offset"), chunk.offsets);
  out.end_object().begin_object(kStorageInfo).put_text("relative_path").put_text(chunk.file);
  out.put_text("offset").put_integer(chunk.position).put_text("length").put_integer(chunk.length).end_object();
}

/// tensor.end(), unless it is greater than kMaxNumber.
std::optional<int64_t> end_of(const StoredTensor& tensor) {
  int64_t end = tensor.offset;
  if (std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end()) return end;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    int64_t step = 0;
    if (__builtin_mul_overflow(tensor.sizes[i] - 1, tensor.strides[i], &step) || step > kMaxNumber) return std::nullopt;
    end += step;
    if (end > kMaxNumber) return std::nullopt;
  }
  return end + 1;
}

/// The key and the dtype of torch.save()'s persistent id ("storage", class, key, device, length).
Result<std::pair<std::string, std::string>> storage_of(const PickleValue& value) {
  const PickleValue* id = value.kind == Kind::kPersistent ? value.items[0] : nullptr;
  if (id == nullptr || id->kind != Kind::kTuple || id->items.size() != 5 || id->items[1]->kind != Kind::kGlobal) {
    return malformed("a tensor has no storage");
  }
  MUSTER_ASSIGN(const std::string_view key, name_of(*id->items[2], 255));
  const auto* const known = std::find_if(std::begin(kDtypeOfStorage), std::end(kDtypeOfStorage),
                                         [&](const auto& each) { return each.first == id->items[1]->text; });
  return std::pair(std::string(key), std::string(known == std::end(kDtypeOfStorage) ? "" : known->second));
}

}  // namespace

Result<Metadata> decode_metadata(ByteView bytes) {
  if (bytes.size() > kMaxBytes) return fail(ErrorCode::kResourceExhausted, ".metadata is longer than 256 MiB");
  MUSTER_ASSIGN(const Pickle pickle, Pickle::parse(bytes, kClasses));
  MUSTER_ASSIGN(const auto* entries, attribute(pickle.root(), kMetadata, "state_dict_metadata", Kind::kDict));
  MUSTER_ASSIGN(const auto* storage, attribute(pickle.root(), kMetadata, "storage_data", Kind::kDict));
  MUSTER_ASSIGN(Locations locations, locations_of(*storage));
  Metadata metadata;
  for (size_t i = 0; i + 1 < entries->items.size(); i += 2) {
    MUSTER_ASSIGN(const std::string_view name, name_of(*entries->items[i], kMaxName));
    MUSTER_ASSIGN(Entry entry, entry_of(name, *entries->items[i + 1], locations));
    metadata.insert_or_assign(std::string(name), std::move(entry));
  }
  return metadata;
}

Bytes encode_metadata(const Metadata& metadata) {
  PickleWriter out;
  out.begin_object(kMetadata).put_text("state_dict_metadata").put(Opcode::kEmptyDict).put(Opcode::kMark);
  for (const auto& [name, entry] : metadata) put_entry(out.put_text(name), entry);
  out.put(Opcode::kSetItems).put_text("planner_data").put(Opcode::kEmptyDict).put(Opcode::kMark);
  for (const auto& [name, entry] : metadata) out.put_text(name).put_text(name).put(Opcode::kTuple1);
  out.put(Opcode::kSetItems).put_text("storage_data").put(Opcode::kEmptyDict).put(Opcode::kMark);
  for (const auto& [name, entry] : metadata) {
    for (const Chunk& chunk : entry.chunks) put_location(out, name, entry, chunk);
  }
  out.put(Opcode::kSetItems).put_text("storage_meta").put(Opcode::kNone).put_text("version").put_text("1.0.0");
  return out.end_object().finish();
}

int64_t StoredTensor::end() const { return end_of(*this).value_or(kMaxNumber); }

Result<StoredTensor> decode_tensor(ByteView bytes) {
  MUSTER_ASSIGN(const Pickle pickle, Pickle::parse(bytes, kClasses));
  const PickleValue& root = pickle.root();
  const bool untyped = root.text == kRebuild3;
  if (root.kind != Kind::kObject || (!untyped && root.text != kRebuild2)) return malformed("it holds no tensor");
  const auto& arguments = root.items[0]->items;  // storage, offset, sizes, strides, requires_grad, hooks, ...
  const size_t expected = untyped ? 7 : 6;
  if (arguments.size() != expected && arguments.size() != expected + 1) return malformed("a tensor lacks arguments");
  if (arguments.size() > expected && !arguments[expected]->items.empty()) {
    return fail(ErrorCode::kUnsupported, "a tensor was saved with a lazy conjugation or negation");
  }
  StoredTensor tensor;
  MUSTER_ASSIGN(auto storage, storage_of(*arguments[0]));
  tensor.record = std::move(storage.first);
  tensor.dtype = std::move(storage.second);
  if (untyped) {
    MUSTER_ASSIGN(tensor.dtype, dtype_of(*arguments[6]));
  }
  MUSTER_ASSIGN(tensor.offset, number_of(*arguments[1]));
  MUSTER_ASSIGN(tensor.sizes, shape_of(*arguments[2]));
  MUSTER_ASSIGN(tensor.strides, shape_of(*arguments[3]));
  if (tensor.dtype.empty() || tensor.sizes.size() != tensor.strides.size() || !end_of(tensor)) {
    return malformed("a tensor has no dtype, or impossible strides");
  }
  return tensor;
}

Bytes encode_tensor(const StoredTensor& tensor, int64_t bytes) {
  PickleWriter out;
  out.put_global(kRebuild3).put(Opcode::kMark);
  out.put(Opcode::kMark).put_text("storage").put_global(kUntyped).put_text(tensor.record).put_text("cpu");
  out.put_integer(bytes).put(Opcode::kTuple).put(Opcode::kBinPersId).put_integer(tensor.offset);
  put_shape(out, tensor.sizes);
  put_shape(out, tensor.strides);
  out.put(Opcode::kNewFalse).put_global(kOrderedDict).put(Opcode::kEmptyTuple).put(Opcode::kReduce);
  out.put_global("torch." + tensor.dtype).put(Opcode::kTuple).put(Opcode::kReduce);
  return out.finish();
}

Result<int64_t> decode_integer(ByteView bytes) {
  MUSTER_ASSIGN(const Pickle pickle, Pickle::parse(bytes, kClasses));
  if (pickle.root().kind != Kind::kInteger) return malformed("it holds no integer");
  return pickle.root().number;
}

Bytes encode_integer(int64_t number) {
  PickleWriter out;
  out.put_integer(number);
  return out.finish();
}

}  // namespace muster::dcp
