#include "muster/mpi/datatypes.h"

#include <array>
#include <mutex>
#include <utility>

#include "muster/kernels/reduce.h"

namespace muster::mpi {
namespace {

/// MPI's own type. Null: MPI has none.
Handle own_type(const Library& mpi, Dtype dtype) {
  switch (dtype) {
    case Dtype::kUint8:
      return mpi.uint8;
    case Dtype::kInt8:
      return mpi.int8;
    case Dtype::kInt16:
      return mpi.int16;
    case Dtype::kInt32:
      return mpi.int32;
    case Dtype::kInt64:
      return mpi.int64;
    case Dtype::kUint16:
      return mpi.uint16;
    case Dtype::kUint32:
      return mpi.uint32;
    case Dtype::kUint64:
      return mpi.uint64;
    case Dtype::kFloat32:
      return mpi.float32;
    case Dtype::kFloat64:
      return mpi.float64;
    case Dtype::kComplex64:
      return mpi.complex64;
    case Dtype::kComplex128:
      return mpi.complex128;
    default:
      return nullptr;
  }
}

bool is_floating(Dtype dtype) { return dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64; }

/// MPI's own operation. Null: it gives other results. MPI does not say what the least of NaN and a number is.
Handle own_op(const Library& mpi, Dtype dtype, ReduceOp op) {
  if (own_type(mpi, dtype) == nullptr) return nullptr;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kPremulSum:
      return mpi.sum;
    case ReduceOp::kProduct:
      return mpi.product;
    case ReduceOp::kMin:
      return is_floating(dtype) ? nullptr : mpi.min;
    case ReduceOp::kMax:
      return is_floating(dtype) ? nullptr : mpi.max;
    case ReduceOp::kBitAnd:
      return mpi.bit_and;
    case ReduceOp::kBitOr:
      return mpi.bit_or;
    case ReduceOp::kBitXor:
      return mpi.bit_xor;
  }
  return nullptr;
}

constexpr int kPairs = kDtypeCount * kReduceOpCount;

template <int pair>
void combine(void* in, void* in_and_out, int* length, Handle* /*type*/) {
  constexpr auto kDtype = static_cast<Dtype>(pair / kReduceOpCount);
  constexpr auto kOp = static_cast<ReduceOp>(pair % kReduceOpCount);
  reduce_into(in_and_out, in, static_cast<size_t>(*length), kDtype, kOp);
}

/// MPI does not tell a function which operation it stands for, so there is one for each.
template <int... pairs>
constexpr std::array<UserFunction*, kPairs> functions_of(std::integer_sequence<int, pairs...> /*all*/) {
  return {&combine<pairs>...};
}
constexpr auto kFunctions = functions_of(std::make_integer_sequence<int, kPairs>());

/// Made when they are first needed, and kept until MPI is finalized.
std::mutex made_mutex;
std::array<Handle, kDtypeCount> made_types{};
std::array<Handle, kPairs> made_ops{};

}  // namespace

Result<Handle> type_of(const Library& mpi, Dtype dtype) {
  if (Handle own = own_type(mpi, dtype); own != nullptr) return own;
  const std::lock_guard lock(made_mutex);
  Handle& made = made_types[static_cast<size_t>(dtype)];
  if (made == nullptr) {
    Handle type = nullptr;
    MUSTER_TRY(
        mpi.check(mpi.Type_contiguous(static_cast<int>(size_of(dtype)), mpi.byte, &type), "MPI_Type_contiguous"));
    MUSTER_TRY(mpi.check(mpi.Type_commit(&type), "MPI_Type_commit"));
    made = type;
  }
  return made;
}

Result<Handle> op_of(const Library& mpi, Dtype dtype, ReduceOp op) {
  if (Handle own = own_op(mpi, dtype, op); own != nullptr) return own;
  const size_t pair = static_cast<size_t>(dtype) * kReduceOpCount + static_cast<size_t>(op);
  const std::lock_guard lock(made_mutex);
  Handle& made = made_ops[pair];
  if (made == nullptr) {
    Handle created = nullptr;
    MUSTER_TRY(mpi.check(mpi.Op_create(kFunctions[pair], /*commutes=*/1, &created), "MPI_Op_create"));
    made = created;
  }
  return made;
}

void free_datatypes(const Library& mpi) {
  const std::lock_guard lock(made_mutex);
  for (Handle& type : made_types) {
    if (type != nullptr) (void)mpi.Type_free(&type);
    type = nullptr;
  }
  for (Handle& op : made_ops) {
    if (op != nullptr) (void)mpi.Op_free(&op);
    op = nullptr;
  }
}

}  // namespace muster::mpi
