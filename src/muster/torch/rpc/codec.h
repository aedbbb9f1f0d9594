#pragma once

#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "muster/torch/exception.h"
#include "muster/torch/rpc/alias.h"
#include "muster/torch/rpc/value.h"

namespace muster::rpc {

/// Writes and reads a C++ type as a value. Specialize it for types that neither the list below nor a list of fields
/// covers. `write(ValueWriter&, const T&)` and `T read(ValueReader&)`.
///
/// C++                                             value, and type in Python
/// bool, integers, float and double                bool, int, float
/// std::string                                     str
/// at::Tensor; Alias, to write                     torch.Tensor
/// std::optional<T>                                None, or as T
/// std::vector<T>                                  list
/// std::pair<A, B>, std::tuple<Ts...>              tuple
/// std::map<K, V>, std::unordered_map<K, V>        dict
/// a struct with `static constexpr auto kFields`   dict with the names of the fields (field())
template <class T>
struct Codec;

/// One field of a struct that travels: `static constexpr auto kFields = std::tuple{field("x", &Point::x), ...}`.
template <class S, class T>
struct Field {
  const char* name;
  T S::*member;
};
template <class S, class T>
constexpr Field<S, T> field(const char* name, T S::*member) {
  return {name, member};
}

template <class T>
concept HasFields = requires {
  T::kFields;
};

template <class T>
void write(ValueWriter& out, const T& value) {
  Codec<std::remove_cvref_t<T>>::write(out, value);
}
template <class T>
T read(ValueReader& in) {
  return Codec<std::remove_cvref_t<T>>::read(in);
}

template <>
struct Codec<bool> {
  static void write(ValueWriter& out, bool value) { out.put_bool(value); }
  static bool read(ValueReader& in) {
    if (in.peek() == Tag::kFalse) return in.next(), false;
    return in.expect(Tag::kTrue), true;
  }
};

template <std::integral T>
struct Codec<T> {
  static void write(ValueWriter& out, T value) {
    if (!std::in_range<int64_t>(value)) throw_error(Error{ErrorCode::kInvalidArgument, "an integer is over 2^63 - 1"});
    out.put_int(static_cast<int64_t>(value));
  }
  static T read(ValueReader& in) {
    in.expect(Tag::kInt);
    const int64_t value = in.int_value();
    if (std::in_range<T>(value)) return static_cast<T>(value);
    throw_error(Error{ErrorCode::kInvalidArgument, c10::str("the integer ", value, " is out of range")});
  }
};

/// Takes integers, too, as Python does.
template <std::floating_point T>
struct Codec<T> {
  static void write(ValueWriter& out, T value) { out.put_float(static_cast<double>(value)); }
  static T read(ValueReader& in) {
    if (in.peek() == Tag::kInt) return static_cast<T>(rpc::read<int64_t>(in));
    in.expect(Tag::kFloat);
    return static_cast<T>(in.float_value());
  }
};

template <>
struct Codec<std::string> {
  static void write(ValueWriter& out, const std::string& value) { out.put_string(value); }
  static std::string read(ValueReader& in) {
    in.expect(Tag::kString);
    return std::string(in.bytes_value());
  }
};

/// Literals can only be written.
template <size_t N>
struct Codec<char[N]> {
  static void write(ValueWriter& out, const char* value) { out.put_string(value); }
};
template <>
struct Codec<const char*> : Codec<char[1]> {};

template <>
struct Codec<at::Tensor> {
  static void write(ValueWriter& out, const at::Tensor& value) { out.put_tensor(value); }
  static at::Tensor read(ValueReader& in) {
    if (in.peek() != Tag::kAlias) return in.expect(Tag::kTensor), in.tensor_value();
    in.next();
    return in.alias_value();
  }
};

/// Arrives as an at::Tensor.
template <>
struct Codec<Alias> {
  static void write(ValueWriter& out, const Alias& value) { out.put_alias(value); }
};

/// The result of a function that returns void.
template <>
struct Codec<std::monostate> {
  static void write(ValueWriter& out, std::monostate) { out.put_none(); }
  static std::monostate read(ValueReader& in) { return in.expect(Tag::kNone), std::monostate(); }
};

template <class T>
struct Codec<std::optional<T>> {
  static void write(ValueWriter& out, const std::optional<T>& value) {
    if (!value) return out.put_none();
    rpc::write(out, *value);
  }
  static std::optional<T> read(ValueReader& in) {
    if (in.peek() == Tag::kNone) return in.next(), std::nullopt;
    return rpc::read<T>(in);
  }
};

template <class T>
struct Codec<std::vector<T>> {
  static void write(ValueWriter& out, const std::vector<T>& value) {
    out.begin_list(value.size());
    for (const auto& item : value) rpc::write<T>(out, item);
  }
  static std::vector<T> read(ValueReader& in) {
    in.expect(Tag::kList);
    std::vector<T> value;
    for (size_t left = in.count(); left > 0; --left) value.push_back(rpc::read<T>(in));
    return value;
  }
};

/// Reads the head of a tuple of `size` values.
inline void expect_tuple(ValueReader& in, size_t size) {
  in.expect(Tag::kTuple);
  const size_t count = in.count();
  if (count == size) return;
  throw_error(Error{ErrorCode::kInvalidArgument, c10::str("expected ", size, " values, got ", count)});
}

template <class... Ts>
struct Codec<std::tuple<Ts...>> {
  static void write(ValueWriter& out, const std::tuple<Ts...>& value) {
    out.begin_tuple(sizeof...(Ts));
    std::apply([&](const Ts&... items) { (rpc::write(out, items), ...); }, value);
  }
  static std::tuple<Ts...> read(ValueReader& in) {
    expect_tuple(in, sizeof...(Ts));
    return std::tuple<Ts...>{rpc::read<Ts>(in)...};  // braces: from left to right
  }
};

template <class A, class B>
struct Codec<std::pair<A, B>> {
  static void write(ValueWriter& out, const std::pair<A, B>& value) {
    rpc::write(out, std::tuple<A, B>(value.first, value.second));
  }
  static std::pair<A, B> read(ValueReader& in) {
    return std::make_from_tuple<std::pair<A, B>>(rpc::read<std::tuple<A, B>>(in));
  }
};

template <class M>
struct MapCodec {
  static void write(ValueWriter& out, const M& value) {
    out.begin_dict(value.size());
    for (const auto& [key, item] : value) {
      rpc::write(out, key);
      rpc::write(out, item);
    }
  }
  static M read(ValueReader& in) {
    in.expect(Tag::kDict);
    M value;
    for (size_t left = in.count(); left > 0; --left) {
      auto key = rpc::read<typename M::key_type>(in);
      value.insert_or_assign(std::move(key), rpc::read<typename M::mapped_type>(in));
    }
    return value;
  }
};
template <class K, class V>
struct Codec<std::map<K, V>> : MapCodec<std::map<K, V>> {};
template <class K, class V>
struct Codec<std::unordered_map<K, V>> : MapCodec<std::unordered_map<K, V>> {};

template <HasFields S>
struct Codec<S> {
  static void write(ValueWriter& out, const S& value) {
    out.begin_dict(std::tuple_size_v<decltype(S::kFields)>);
    const auto write_field = [&](const auto& field) {
      out.put_string(field.name);
      rpc::write(out, value.*field.member);
    };
    std::apply([&](const auto&... fields) { (write_field(fields), ...); }, S::kFields);
  }
  /// All fields must be there, in any order, and no others.
  static S read(ValueReader& in) {
    in.expect(Tag::kDict);
    constexpr size_t kCount = std::tuple_size_v<decltype(S::kFields)>;
    const size_t count = in.count();
    if (count != kCount) {
      throw_error(Error{ErrorCode::kInvalidArgument, c10::str("expected ", kCount, " fields, got ", count)});
    }
    S value;
    uint64_t seen = 0;
    static_assert(kCount <= 64);
    for (size_t i = 0; i < kCount; ++i) {
      const auto name = rpc::read<std::string>(in);
      size_t index = 0;
      const auto read_field = [&](const auto& field) {
        const uint64_t bit = uint64_t{1} << index++;
        if (name != field.name || (seen & bit) != 0) return false;
        seen |= bit;
        value.*field.member = rpc::read<std::remove_cvref_t<decltype(value.*field.member)>>(in);
        return true;
      };
      if (std::apply([&](const auto&... fields) { return (read_field(fields) || ...); }, S::kFields)) continue;
      throw_error(Error{ErrorCode::kInvalidArgument, c10::str("there is no field \"", name, "\", or it came twice")});
    }
    return value;
  }
};

}  // namespace muster::rpc
