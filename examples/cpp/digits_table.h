// Reads the images that digits.cpp and distributed_autograd.cpp learn.
#pragma once

#include <torch/torch.h>
#include <zlib.h>

#include <charconv>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int64_t kPixels = 64;

/// float32[N, 65]: the pixels of one image per line, then its digit.
inline torch::Tensor read_table(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw std::runtime_error("cannot open " + path);
  std::vector<float> numbers;
  char line[4096];
  while (gzgets(file.get(), line, sizeof line) != nullptr) {
    for (const char* at = line; *at != '\0' && *at != '\n';) {
      int number = 0;
      const auto [end, error] = std::from_chars(at, line + sizeof line, number);
      if (error != std::errc()) throw std::runtime_error(path + " holds something that is not a number");
      numbers.push_back(static_cast<float>(number));
      at = *end == ',' ? end + 1 : end;
    }
  }
  return torch::tensor(numbers).reshape({-1, kPixels + 1});
}
