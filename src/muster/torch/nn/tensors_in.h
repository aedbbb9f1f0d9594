#pragma once

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace muster::nn {

/// Finds the tensors in the result of a module's forward: tensors, and tuples, pairs, vectors, arrays, optionals and
/// maps of them. For a type of your own:
///
///   template <>
///   struct muster::nn::TensorsIn<Answer> : std::true_type {
///     static void visit(const Answer& answer, std::vector<at::Tensor>& found) { ... }
///   };
template <class T>
struct TensorsIn : std::false_type {};

template <>
struct TensorsIn<at::Tensor> : std::true_type {
  static void visit(const at::Tensor& tensor, std::vector<at::Tensor>& found) {
    if (tensor.defined()) found.push_back(tensor);
  }
};

template <class T>
struct TensorsIn<std::optional<T>> : TensorsIn<T> {
  static void visit(const std::optional<T>& value, std::vector<at::Tensor>& found) {
    if (value) TensorsIn<T>::visit(*value, found);
  }
};

namespace detail {

template <class Tuple, class... Ts>
struct TensorsInTuple : std::conjunction<TensorsIn<Ts>...> {
  static void visit(const Tuple& values, std::vector<at::Tensor>& found) {
    std::apply([&found](const auto&... each) { (TensorsIn<Ts>::visit(each, found), ...); }, values);
  }
};
template <class Container, class T>
struct TensorsInEach : TensorsIn<T> {
  static void visit(const Container& values, std::vector<at::Tensor>& found) {
    for (const auto& value : values) TensorsIn<T>::visit(value, found);
  }
};
template <class Map, class T>
struct TensorsInMap : TensorsIn<T> {
  static void visit(const Map& values, std::vector<at::Tensor>& found) {
    for (const auto& [key, value] : values) TensorsIn<T>::visit(value, found);
  }
};

}  // namespace detail

template <class... Ts>
struct TensorsIn<std::tuple<Ts...>> : detail::TensorsInTuple<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct TensorsIn<std::pair<A, B>> : detail::TensorsInTuple<std::pair<A, B>, A, B> {};
template <class T>
struct TensorsIn<std::vector<T>> : detail::TensorsInEach<std::vector<T>, T> {};
template <class T, size_t N>
struct TensorsIn<std::array<T, N>> : detail::TensorsInEach<std::array<T, N>, T> {};
template <class K, class T>
struct TensorsIn<std::map<K, T>> : detail::TensorsInMap<std::map<K, T>, T> {};
template <class K, class T>
struct TensorsIn<std::unordered_map<K, T>> : detail::TensorsInMap<std::unordered_map<K, T>, T> {};

/// The defined tensors in `value`, in order; none if T is not one of those types.
template <class T>
std::vector<at::Tensor> tensors_in(const T& value) {
  std::vector<at::Tensor> found;
  if constexpr (TensorsIn<T>::value) TensorsIn<T>::visit(value, found);
  return found;
}

}  // namespace muster::nn
