// The operations of a decode step on a CPU, one by one: everything between its matrix products, which torch does.
//
// Compiled at first use by posttrain/kernels/compiled.py; each function has a twin in torch (posttrain/kernels/decode.py)
// that serves where there is no compiler, and that tests compare it with.

#include "attention.h"
#include "sampling.h"

namespace {

// residual += added (if given); out = residual / rms(residual) * weight.
template <typename T>
void add_rms_norm(T *residual, const T *added, const T *weight, T *out, int64_t tokens, int64_t size, float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    T *r = residual + token * size;
    if (added)
      for (int64_t d = 0; d < size; d++) store(r + d, load(r[d]) + load(added[token * size + d]));
    rms_norm_row(r, weight, out + token * size, size, epsilon);
  }
}

// out = silu(gate) * up, where a row of gate_up holds both.
template <typename T> void silu_mul(const T *gate_up, T *out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    const T *gate = gate_up + token * 2 * size, *up = gate + size;
    for (int64_t d = 0; d < size; d++) store(out + token * size + d, silu(load(gate[d])) * load(up[d]));
  }
}

// One token per row, from the logits `source[row]`.
template <typename T>
void sample(const T *logits, const int64_t *source, const float *temperature, const uint8_t *greedy, const double *uniform,
            int64_t *token, float *log_prob, int64_t rows, int64_t size, int threads) {
#pragma omp parallel num_threads(threads)
  {
    SampleScratch scratch(size);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
      token[row] = sample_row(logits + source[row] * size, size, temperature[row], greedy[row], uniform[row], scratch,
                              log_prob + row);
  }
}

// Log-probs of given tokens as sampling has them, entropies, and the logarithms of the sums of exp(logit / temperature).
template <typename T>
void token_log_probs(const T *logits, const int64_t *token, float temperature, float *log_prob, float *entropy, float *log_sum,
                     int64_t rows, int64_t size, int threads) {
#pragma omp parallel num_threads(threads)
  {
    SampleScratch scratch(size);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const T *x = logits + row * size;
      Softmax softmax = softmax_of(x, size, temperature, scratch);
      log_prob[row] = softmax.log_prob(x, token[row]);
      log_sum[row] = softmax.top * softmax.heat + softmax.log_sum;
      double mean = 0; // of the scores, less the largest
      for (int64_t first = 0; first < size; first += PART) {
        float sum = 0;
        int64_t end = std::min(size, first + PART);
#pragma omp simd reduction(+ : sum)
        for (int64_t v = first; v < end; v++) sum += scratch.weight[v] * ((load(x[v]) - softmax.top) * softmax.heat);
        mean += sum;
      }
      entropy[row] = float(softmax.log_sum - mean / softmax.total);
    }
  }
}

} // namespace

#define FOR_TYPE(NAME, T)                                                                                                     \
  extern "C" void paged_attention_##NAME(const Layout *at, void *query, void *key, void *value, float *cosine, float *sine,   \
                                         void *query_norm, void *key_norm, void *keys, void *values, int32_t *table,          \
                                         int32_t *starts, int32_t *rows, int32_t *positions, int32_t *tile_starts,            \
                                         void *out) {                                                                         \
    Cache<T> cache{(T *)keys, (T *)values, table, starts, at->table_width, at->key_heads, at->size};                          \
    Heads<T> heads{(T *)query,     (T *)key, (T *)value, cosine,      sine,    (T *)query_norm,                               \
                   (T *)key_norm, rows,     positions,  tile_starts, (T *)out};                                              \
    _Pragma("omp parallel num_threads(at->threads)") {                                                                        \
      place_tokens(*at, heads, cache);                                                                                        \
      attend_tokens(*at, heads, cache);                                                                                       \
    }                                                                                                                         \
  }                                                                                                                           \
  extern "C" void add_rms_norm_##NAME(void *residual, void *added, void *weight, void *out, int64_t tokens, int64_t size,     \
                                      float epsilon, int threads) {                                                           \
    add_rms_norm<T>((T *)residual, (T *)added, (T *)weight, (T *)out, tokens, size, epsilon, threads);                        \
  }                                                                                                                           \
  extern "C" void silu_mul_##NAME(void *gate_up, void *out, int64_t tokens, int64_t size, int threads) {                      \
    silu_mul<T>((T *)gate_up, (T *)out, tokens, size, threads);                                                               \
  }                                                                                                                           \
  extern "C" void sample_##NAME(void *logits, int64_t *source, float *temperature, uint8_t *greedy, double *uniform,          \
                                int64_t *token, float *log_prob, int64_t rows, int64_t size, int threads) {                   \
    sample<T>((T *)logits, source, temperature, greedy, uniform, token, log_prob, rows, size, threads);                       \
  }                                                                                                                           \
  extern "C" void token_log_probs_##NAME(void *logits, int64_t *token, float temperature, float *log_prob, float *entropy,    \
                                         float *log_sum, int64_t rows, int64_t size, int threads) {                           \
    token_log_probs<T>((T *)logits, token, temperature, log_prob, entropy, log_sum, rows, size, threads);                     \
  }

FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
