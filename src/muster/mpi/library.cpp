#include "muster/mpi/library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/base/environment.h"
#include "muster/mpi/bootstrap/job_ranks.h"

namespace muster::mpi {
namespace {

Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }

/// MPI 5, chapter "Application Binary Interface".
Constants standard_constants() {
  return {.comm_world = handle(0x101),
          .errors_return = handle(0x143),
          .byte = handle(0x247),
          .int8 = handle(0x240),
          .uint8 = handle(0x241),
          .int16 = handle(0x248),
          .uint16 = handle(0x249),
          .int32 = handle(0x250),
          .uint32 = handle(0x251),
          .int64 = handle(0x258),
          .uint64 = handle(0x259),
          .float32 = handle(0x210),
          .float64 = handle(0x214),
          .complex64 = handle(0x212),
          .complex128 = handle(0x216),
          .sum = handle(0x21),
          .product = handle(0x24),
          .min = handle(0x22),
          .max = handle(0x23),
          .bit_and = handle(0x28),
          .bit_or = handle(0x29),
          .bit_xor = handle(0x2a),
          .in_place = handle(1),
          .any_source = -1,
          .tag_upper_bound_key = 501,
          .thread_multiple = 4096,
          .error_truncate = 15,
          .source_offset = 0};
}

Constants mpich_constants() {
  return {.comm_world = handle(0x44000000),
          .errors_return = handle(0x54000001),
          .byte = handle(0x4c00010d),
          .int8 = handle(0x4c000137),
          .uint8 = handle(0x4c00013b),
          .int16 = handle(0x4c000238),
          .uint16 = handle(0x4c00023c),
          .int32 = handle(0x4c000439),
          .uint32 = handle(0x4c00043d),
          .int64 = handle(0x4c00083a),
          .uint64 = handle(0x4c00083e),
          .float32 = handle(0x4c00040a),
          .float64 = handle(0x4c00080b),
          .complex64 = handle(0x4c000840),
          .complex128 = handle(0x4c001041),
          .sum = handle(0x58000003),
          .product = handle(0x58000004),
          .min = handle(0x58000002),
          .max = handle(0x58000001),
          .bit_and = handle(0x58000006),
          .bit_or = handle(0x58000008),
          .bit_xor = handle(0x5800000a),
          .in_place = handle(UINTPTR_MAX),
          .any_source = -2,
          .tag_upper_bound_key = 0x64400001,
          .thread_multiple = 3,
          .error_truncate = 14,
          .source_offset = 2 * sizeof(int)};
}

/// Its handles are the addresses of variables.
Constants open_mpi_constants(void* loaded) {
  const auto variable = [loaded](const char* name) { return dlsym(loaded, name); };
  return {.comm_world = variable("ompi_mpi_comm_world"),
          .errors_return = variable("ompi_mpi_errors_return"),
          .byte = variable("ompi_mpi_byte"),
          .int8 = variable("ompi_mpi_int8_t"),
          .uint8 = variable("ompi_mpi_uint8_t"),
          .int16 = variable("ompi_mpi_int16_t"),
          .uint16 = variable("ompi_mpi_uint16_t"),
          .int32 = variable("ompi_mpi_int32_t"),
          .uint32 = variable("ompi_mpi_uint32_t"),
          .int64 = variable("ompi_mpi_int64_t"),
          .uint64 = variable("ompi_mpi_uint64_t"),
          .float32 = variable("ompi_mpi_float"),
          .float64 = variable("ompi_mpi_double"),
          .complex64 = variable("ompi_mpi_c_float_complex"),
          .complex128 = variable("ompi_mpi_c_double_complex"),
          .sum = variable("ompi_mpi_op_sum"),
          .product = variable("ompi_mpi_op_prod"),
          .min = variable("ompi_mpi_op_min"),
          .max = variable("ompi_mpi_op_max"),
          .bit_and = variable("ompi_mpi_op_band"),
          .bit_or = variable("ompi_mpi_op_bor"),
          .bit_xor = variable("ompi_mpi_op_bxor"),
          .in_place = handle(1),
          .any_source = -1,
          .tag_upper_bound_key = 0,
          .thread_multiple = 3,
          .error_truncate = 15,
          .source_offset = 0};
}

/// The names under which distributions install MPI. The first ones fit the launcher that started this process.
std::vector<std::string> candidates() {
  const std::vector<std::string> open_mpi = {"libmpi.so.40"};
  std::vector<std::string> names = {"libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi.so.12", "libmpich.so.12"};
  const bool by_open_mpi = !environment("OMPI_COMM_WORLD_SIZE").empty();
  const bool by_mpich = (!environment("PMI_SIZE").empty() && !by_open_mpi) || started_by_muster();
  names.insert(by_mpich ? names.end() : names.begin(), open_mpi.begin(), open_mpi.end());
  names.emplace_back("libmpi.so");
  return names;
}

}  // namespace

Result<const Library*> Library::get() {
  static const Result<Library> loaded = []() -> Result<Library> {
    Library library;
    if (const std::string file(environment("MUSTER_MPI_LIBRARY")); !file.empty()) {
      void* const opened = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
      if (opened == nullptr) return fail(ErrorCode::kUnavailable, fmt::format("MUSTER_MPI_LIBRARY: {}", dlerror()));
      MUSTER_TRY(library.load(file, opened));
      return library;
    }
    // Plug-ins of Open MPI need the symbols of the library (RTLD_GLOBAL).
    for (const int only_loaded : {RTLD_NOLOAD, 0}) {
      for (const std::string& name : candidates()) {
        void* const opened = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL | only_loaded);
        if (opened == nullptr) continue;
        MUSTER_TRY(library.load(name, opened));
        return library;
      }
    }
    return fail(ErrorCode::kUnavailable,
                fmt::format("there is no MPI library: none of {} can be loaded; install Open MPI or MPICH, or set "
                            "MUSTER_MPI_LIBRARY to the path of libmpi.so",
                            fmt::join(candidates(), ", ")));
  }();
  if (!loaded) return tl::unexpected(loaded.error());
  return &*loaded;
}

Result<> Library::load(const std::string& file, void* loaded) {
  MUSTER_TRY(load_functions(loaded, file));
  MUSTER_TRY(load_device_queries(loaded));
  std::vector<char> text(16384);
  int length = 0;
  MUSTER_TRY(check(Get_library_version(text.data(), &length), "MPI_Get_library_version"));
  const std::string_view banner(text.data());
  link_map* map = nullptr;
  const bool named = dlinfo(loaded, RTLD_DI_LINKMAP, &map) == 0;
  const std::string_view path = named ? map->l_name : file;
  if (path.find("libmpi_abi") != std::string_view::npos) {
    static_cast<Constants&>(*this) = standard_constants();
    version_ = fmt::format("MPI ABI, {}", banner.substr(0, banner.find('\n')));
  } else if (dlsym(loaded, "ompi_mpi_comm_world") != nullptr) {
    static_cast<Constants&>(*this) = open_mpi_constants(loaded);
    version_ = banner.substr(0, banner.find(','));
    constexpr std::string_view kTag = "Open MPI v";
    if (version_.starts_with(kTag)) version_ = fmt::format("Open MPI {}", version_.substr(kTag.size()));
  } else if (banner.starts_with("MPICH") || banner.starts_with("Intel") || banner.starts_with("MVAPICH") ||
             banner.find("CRAY MPICH") != std::string_view::npos) {
    static_cast<Constants&>(*this) = mpich_constants();
    version_ = banner.substr(0, banner.find('\n'));
  } else {
    return fail(ErrorCode::kUnsupported,
                fmt::format("{} is an unknown MPI: \"{}\"; muster knows Open MPI, MPICH and the ABI of MPI 5", file,
                            banner.substr(0, banner.find('\n'))));
  }
  for (char& letter : version_) {
    if (letter == '\t') letter = ' ';
  }
  return {};
}

Result<> Library::load_functions(void* loaded, const std::string& file) {
  std::string missing;
#define MUSTER_MPI_FUNCTION(name)                                       \
  name = reinterpret_cast<decltype(name)>(dlsym(loaded, "MPI_" #name)); \
  if (name == nullptr && missing.empty()) missing = "MPI_" #name;
  MUSTER_MPI_FUNCTION(Abort)
  MUSTER_MPI_FUNCTION(Allgather)
  MUSTER_MPI_FUNCTION(Allgatherv)
  MUSTER_MPI_FUNCTION(Allreduce)
  MUSTER_MPI_FUNCTION(Alltoall)
  MUSTER_MPI_FUNCTION(Alltoallv)
  MUSTER_MPI_FUNCTION(Barrier)
  MUSTER_MPI_FUNCTION(Bcast)
  MUSTER_MPI_FUNCTION(Cancel)
  MUSTER_MPI_FUNCTION(Comm_create_group)
  MUSTER_MPI_FUNCTION(Comm_dup)
  MUSTER_MPI_FUNCTION(Comm_free)
  MUSTER_MPI_FUNCTION(Comm_get_attr)
  MUSTER_MPI_FUNCTION(Comm_group)
  MUSTER_MPI_FUNCTION(Comm_rank)
  MUSTER_MPI_FUNCTION(Comm_set_errhandler)
  MUSTER_MPI_FUNCTION(Comm_size)
  MUSTER_MPI_FUNCTION(Error_class)
  MUSTER_MPI_FUNCTION(Error_string)
  MUSTER_MPI_FUNCTION(Finalize)
  MUSTER_MPI_FUNCTION(Finalized)
  MUSTER_MPI_FUNCTION(Gather)
  MUSTER_MPI_FUNCTION(Get_count)
  MUSTER_MPI_FUNCTION(Get_library_version)
  MUSTER_MPI_FUNCTION(Group_free)
  MUSTER_MPI_FUNCTION(Group_incl)
  MUSTER_MPI_FUNCTION(Init_thread)
  MUSTER_MPI_FUNCTION(Initialized)
  MUSTER_MPI_FUNCTION(Irecv)
  MUSTER_MPI_FUNCTION(Isend)
  MUSTER_MPI_FUNCTION(Op_create)
  MUSTER_MPI_FUNCTION(Op_free)
  MUSTER_MPI_FUNCTION(Query_thread)
  MUSTER_MPI_FUNCTION(Reduce)
  MUSTER_MPI_FUNCTION(Reduce_scatter)
  MUSTER_MPI_FUNCTION(Reduce_scatter_block)
  MUSTER_MPI_FUNCTION(Scatter)
  MUSTER_MPI_FUNCTION(Test)
  MUSTER_MPI_FUNCTION(Test_cancelled)
  MUSTER_MPI_FUNCTION(Type_commit)
  MUSTER_MPI_FUNCTION(Type_contiguous)
  MUSTER_MPI_FUNCTION(Type_free)
#undef MUSTER_MPI_FUNCTION
  if (missing.empty()) return {};
  return fail(ErrorCode::kUnsupported, fmt::format("{} has no {}: muster needs MPI 3 or newer", file, missing));
}

Result<> Library::load_device_queries(void* loaded) {
  // torch calls AMD's GPUs "cuda", too.
  constexpr std::pair<std::string_view, const char*> kQueries[] = {{"cuda", "MPIX_Query_cuda_support"},
                                                                   {"cuda", "MPIX_Query_rocm_support"},
                                                                   {"cuda", "MPIX_Query_hip_support"},
                                                                   {"xpu", "MPIX_Query_ze_support"}};
  for (const auto& [device_type, name] : kQueries) {
    const auto function = reinterpret_cast<int (*)()>(dlsym(loaded, name));
    if (function != nullptr) device_queries_.push_back({device_type, function});
  }
  const std::string_view set = environment("MUSTER_MPI_DEVICE_MEMORY");
  if (set.empty()) return {};
  if (set != "0" && set != "1") {
    return fail(ErrorCode::kInvalidArgument, fmt::format("MUSTER_MPI_DEVICE_MEMORY={}: set it to 0 or 1", set));
  }
  device_memory_ = set == "1";
  return {};
}

bool Library::takes_device_memory(std::string_view device_type) const {
  if (device_memory_) return *device_memory_;
  return std::ranges::any_of(device_queries_, [&](const DeviceQuery& query) {
    return query.device_type == device_type && query.function() == 1;
  });
}

Result<> Library::check(int code, const char* call) const {
  if (code == 0) return {};
  std::vector<char> text(8192);
  int length = 0;
  if (Error_string(code, text.data(), &length) != 0) length = 0;
  return fail(ErrorCode::kIo, fmt::format("{} failed: {}", call, std::string_view(text.data(), length)));
}

int Library::source_of(const Status& status) const {
  int source = 0;
  std::memcpy(&source, status.bytes + source_offset, sizeof source);
  return source;
}

}  // namespace muster::mpi
