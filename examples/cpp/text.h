// Reads the play that chars.cpp and embeddings.cpp learn.
#pragma once

#include <torch/torch.h>
#include <zlib.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

/// The play. Each character is its index in `alphabet`.
struct Text {
  std::string alphabet;
  torch::Tensor training, held_out;  // int64[N]
};

inline std::string read_compressed(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw std::runtime_error("cannot open " + path);
  std::string text;
  char part[1 << 14];
  int size = 0;
  while ((size = gzread(file.get(), part, sizeof part)) > 0) text.append(part, static_cast<size_t>(size));
  if (size < 0 || text.empty()) throw std::runtime_error("cannot read " + path);
  return text;
}

inline Text load_text(const std::string& path) {
  const std::string characters = read_compressed(path);
  Text text{characters, {}, {}};
  std::sort(text.alphabet.begin(), text.alphabet.end());
  text.alphabet.erase(std::unique(text.alphabet.begin(), text.alphabet.end()), text.alphabet.end());
  std::vector<int64_t> numbers;
  for (const char character : characters) {
    numbers.push_back(static_cast<int64_t>(text.alphabet.find(character)));
  }
  const auto all = torch::tensor(numbers);
  const int64_t held_out = all.size(0) / 10;
  text.training = all.narrow(0, 0, all.size(0) - held_out);
  text.held_out = all.narrow(0, all.size(0) - held_out, held_out);
  return text;
}
