// Sampling of one row: shared by the operations (decode.cpp) and the steps in a row (steps.cpp).

#pragma once
#include "attention.h"

namespace {

constexpr int64_t PART = 512; // tokens whose probabilities are summed together

struct SampleScratch {
  std::vector<float> weight;
  std::vector<double> parts;
  explicit SampleScratch(int64_t size) : weight(size), parts((size + PART - 1) / PART) {}
};

// The largest logit of a row, and the logarithm of the sum of all exp((logit - top) / temperature).
struct Softmax {
  float top, heat, log_sum;
  double total;

  template <typename T> float log_prob(const T *x, int64_t token) const { return (load(x[token]) - top) * heat - log_sum; }
};

// Fills the scratch with the exponentials and the sums of their parts.
template <typename T> SAME_BITS Softmax softmax_of(const T *x, int64_t size, float temperature, SampleScratch &scratch) {
  float *weight = scratch.weight.data(), heat = 1.0f / temperature, top = load(x[0]);
  std::vector<double> &parts = scratch.parts;
#pragma omp simd reduction(max : top)
  for (int64_t v = 1; v < size; v++) top = load(x[v]) > top ? load(x[v]) : top;
  for (int64_t v = 0; v < size; v++) weight[v] = exp_of((load(x[v]) - top) * heat);
  double total = 0;
  for (size_t p = 0; p < parts.size(); p++) {
    float sum = 0;
    int64_t end = std::min<int64_t>(size, (p + 1) * PART);
#pragma omp simd reduction(+ : sum)
    for (int64_t v = p * PART; v < end; v++) sum += weight[v];
    total += parts[p] = sum;
  }
  return {top, heat, float(std::log(total)), total};
}

// The most likely token, or the first at which the cumulative probability exceeds `uniform`.
template <typename T>
int64_t sample_row(const T *x, int64_t size, float temperature, bool greedy, double uniform, SampleScratch &scratch,
                   float *log_prob) {
  Softmax softmax = softmax_of(x, size, temperature, scratch);
  const float *weight = scratch.weight.data(), top = softmax.top;
  const std::vector<double> &parts = scratch.parts;
  int64_t chosen = 0;
  if (greedy) {
    while (load(x[chosen]) != top && chosen < size - 1) chosen++;
  } else {
    double left = uniform * softmax.total;
    size_t p = 0;
    while (p + 1 < parts.size() && left >= parts[p]) left -= parts[p++];
    chosen = p * PART;
    int64_t last = std::min<int64_t>(size, (p + 1) * PART) - 1;
    while (chosen < last && left >= weight[chosen]) left -= weight[chosen++];
  }
  *log_prob = softmax.log_prob(x, chosen);
  return chosen;
}

inline uint64_t mix(uint64_t x) { // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The random number of a request's token: `uniforms` in rollout/sampling.py.
inline double uniform_of(uint64_t seed, int64_t place) {
  constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
  return double(mix(mix(seed + GOLDEN) + GOLDEN * (uint64_t(place) + 1)) >> 11) * 0x1p-53;
}

} // namespace
