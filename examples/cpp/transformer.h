// The layers of the transformers that chars.cpp and pipeline/ train.
#pragma once

#include <torch/torch.h>

/// Attention to the earlier characters, then a small network for each character. Each adds its result to its input.
/// Linear: torch::nn::Linear, or a module holder like it.
template <class Linear>
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    namespace nn = torch::nn;
    before_attention = register_module("before_attention", nn::LayerNorm(nn::LayerNormOptions({width})));
    query_key_value = register_module("query_key_value", Linear(width, 3 * width));
    joined = register_module("joined", Linear(width, width));
    network =
        register_module("network", nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({width})),
                                                  Linear(width, 4 * width), nn::GELU(), Linear(4 * width, width)));
  }

  /// Input and output: float32[batch, length, width].
  torch::Tensor forward(const torch::Tensor& input) {
    const auto parts = query_key_value->forward(before_attention->forward(input))
                           .view({input.size(0), input.size(1), 3, heads, input.size(2) / heads})
                           .permute({2, 0, 3, 1, 4});
    const auto attended = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    const auto output = input + joined->forward(attended.transpose(1, 2).reshape(input.sizes()));
    return output + network->forward(output);
  }

  int64_t heads;
  torch::nn::LayerNorm before_attention = nullptr;
  Linear query_key_value = nullptr, joined = nullptr;
  torch::nn::Sequential network = nullptr;
};

/// Turns int64[batch, length] into float32[batch, length, width].
struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl(int64_t alphabet, int64_t context, int64_t width) {
    characters = register_module("characters", torch::nn::Embedding(alphabet, width));
    places = register_module("places", torch::nn::Embedding(context, width));
  }
  torch::Tensor forward(const torch::Tensor& text) {
    return characters->forward(text) + places->forward(torch::arange(text.size(1)));
  }

  torch::nn::Embedding characters = nullptr, places = nullptr;
};
TORCH_MODULE(Embedding);

/// The mean loss of scores of the next characters: float32[batch, length, alphabet] and int64[batch, length].
inline torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& following) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), following.flatten());
}
