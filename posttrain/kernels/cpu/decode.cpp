// The decode step on a CPU: everything between its matrix products, which torch does.
//
// Compiled at first use by posttrain/kernels/compiled.py; each function has a twin in torch (posttrain/kernels/decode.py)
// that serves where there is no compiler, and that tests compare it with. Every row is computed by one thread in one
// order, so a result does not depend on how rows are spread over threads.
//
// Keys are cached as blocks of (head size, BLOCK tokens) and values as (BLOCK tokens, head size): scores and outputs then
// both come from unit-stride loops without horizontal sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int BLOCK = 32;  // tokens in a block of the cache; decode.py holds the same number
constexpr int QUERIES = 4; // queries that read a block together

struct bf16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }
inline void store(float *to, float x) { *to = x; }
inline void store(bf16 *to, float x) {
  uint32_t u = __builtin_bit_cast(uint32_t, x);
  to->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16); // to the nearest, ties to even
}

// e^x to about 1e-7 of itself, in a form that compilers vectorise; x is at most 0 here.
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = std::nearbyint(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * __builtin_bit_cast(float, int32_t(int32_t(n) + 127) << 23);
}

// The cache of one layer. A row is a list of blocks; block j holds its tokens from position starts[j] up to the next
// block's start, so that a block need not be full: a prompt's last one is shared as it is by all its responses.
template <typename T> struct Cache {
  T *keys, *values;
  const int32_t *table, *starts; // (rows, width)
  int64_t width;
  int heads, size;

  int64_t offset(int row, int block, int head) const {
    return (int64_t(table[row * width + block]) * heads + head) * size * BLOCK;
  }
  const T *key_block(int row, int block, int head) const { return keys + offset(row, block, head); }
  const T *value_block(int row, int block, int head) const { return values + offset(row, block, head); }
  int start(int row, int block) const { return block < width ? starts[row * width + block] : INT32_MAX; }
  int block_of(int row, int position) const {
    const int32_t *first = starts + row * width;
    return int(std::upper_bound(first, first + width, position) - first) - 1;
  }
};

// RMS norm (if there is a weight) and rotation (if there are angles) of one head, into float.
template <typename T>
void prepare_head(const T *from, int size, const T *norm, float epsilon, const float *cosine, const float *sine, float *to) {
  for (int d = 0; d < size; d++) to[d] = load(from[d]);
  if (norm) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int d = 0; d < size; d++) sum += to[d] * to[d];
    float scale = 1.0f / std::sqrt(sum / size + epsilon);
    for (int d = 0; d < size; d++) to[d] = to[d] * scale * load(norm[d]);
  }
  if (cosine) {
    int half = size / 2;
    for (int d = 0; d < half; d++) {
      float a = to[d], b = to[d + half];
      to[d] = a * cosine[d] - b * sine[d];
      to[d + half] = b * cosine[d + half] + a * sine[d + half];
    }
  }
}

// Blocks lie anywhere, and no hardware fetches ahead across a page: ask for a piece of the next one.
template <typename T> inline void ask_for(const T *line) {
  for (size_t byte = 0; byte < BLOCK * sizeof(T); byte += 64) __builtin_prefetch((const char *)line + byte);
}

// Scores of N queries against the first LANES tokens of a block of keys, while `next` is being fetched.
template <int N, int LANES, typename T>
void score_block(const T *keys, const T *next, const float *query, int size, float *const *scores, int at) {
  float sum[N][LANES] = {};
  for (int d = 0; d < size; d++) {
    const T *key = keys + d * BLOCK;
    ask_for(next + d * BLOCK);
    for (int i = 0; i < N; i++) {
      float q = query[i * size + d];
#pragma omp simd
      for (int t = 0; t < LANES; t++) sum[i][t] += q * load(key[t]);
    }
  }
  for (int i = 0; i < N; i++)
    for (int t = 0; t < LANES; t++) scores[i][at + t] = sum[i][t];
}

// The blocks that N queries of a row look at together, and the positions [begin, end) that any of them sees.
struct Span {
  int row, head, low, high, begin, end;
};

// WIDTH columns of the outputs of N queries.
template <int N, int WIDTH, typename T>
void mix_values(const Cache<T> &cache, const Span &span, int column, float *const *weights, float *out) {
  float sum[N][WIDTH] = {};
  for (int block = span.low; block <= span.high; block++) {
    const T *values = cache.value_block(span.row, block, span.head) + column;
    const T *next = block < span.high ? cache.value_block(span.row, block + 1, span.head) + column : values;
    int start = cache.start(span.row, block), at = (block - span.low) * BLOCK;
    int first = std::max(span.begin - start, 0), last = std::min(span.end, cache.start(span.row, block + 1)) - start;
    for (int t = first; t < last; t++) {
      const T *value = values + t * cache.size;
      for (size_t byte = 0; byte < WIDTH * sizeof(T); byte += 64)
        __builtin_prefetch((const char *)(next + t * cache.size) + byte);
      for (int i = 0; i < N; i++) {
        float w = weights[i][at + t];
#pragma omp simd
        for (int d = 0; d < WIDTH; d++) sum[i][d] += w * load(value[d]);
      }
    }
  }
  for (int i = 0; i < N; i++)
    for (int d = 0; d < WIDTH; d++) out[i * cache.size + column + d] = sum[i][d];
}

// N queries of one row and one head of keys; query i sees the positions [begin[i], end[i]).
template <int N, typename T>
void attend(const Cache<T> &cache, int row, int head, const float *query, const int *begin, const int *end, float *out,
            std::vector<float> &scratch) {
  constexpr float NEVER = -3e38f;
  Span span{row, head, 0, 0, *std::min_element(begin, begin + N), *std::max_element(end, end + N)};
  span.low = cache.block_of(row, span.begin), span.high = cache.block_of(row, span.end - 1);
  int width = (span.high - span.low + 1) * BLOCK;
  if (scratch.size() < size_t(N) * width) scratch.resize(size_t(N) * width);
  float *scores[N], scale[N];
  for (int i = 0; i < N; i++) scores[i] = scratch.data() + size_t(i) * width;
  for (int block = span.low; block <= span.high; block++) {
    const T *next = block < span.high ? cache.key_block(row, block + 1, head) : cache.value_block(row, span.low, head);
    int at = (block - span.low) * BLOCK, start = cache.start(row, block), after = cache.start(row, block + 1);
    const T *keys = cache.key_block(row, block, head);
    if (std::min(span.end, after) - start <= BLOCK / 2) // the rest of the block is empty: half of its memory is enough
      score_block<N, BLOCK / 2>(keys, next, query, cache.size, scores, at);
    else
      score_block<N, BLOCK>(keys, next, query, cache.size, scores, at);
    for (int i = 0; i < N; i++) {
      int first = begin[i] - start, last = std::min(end[i], after) - start;
      for (int t = 0; t < std::min(first, BLOCK); t++) scores[i][at + t] = NEVER;
      for (int t = std::max(last, 0); t < BLOCK; t++) scores[i][at + t] = NEVER;
    }
  }
  for (int i = 0; i < N; i++) {
    float *s = scores[i], top = NEVER, sum = 0;
#pragma omp simd reduction(max : top)
    for (int t = 0; t < width; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < width; t++) sum += s[t] = s[t] > NEVER ? exp_of(s[t] - top) : 0.0f;
    scale[i] = 1.0f / sum;
  }
  int column = 0;
  if (N <= 2) // wider where the sums still fit into registers
    for (; column + 64 <= cache.size; column += 64) mix_values<N, 64>(cache, span, column, scores, out);
  for (; column + 32 <= cache.size; column += 32) mix_values<N, 32>(cache, span, column, scores, out);
  for (; column + 8 <= cache.size; column += 8) mix_values<N, 8>(cache, span, column, scores, out);
  for (; column < cache.size; column++) mix_values<N, 1>(cache, span, column, scores, out);
  for (int i = 0; i < N; i++)
    for (int d = 0; d < cache.size; d++) out[i * cache.size + d] *= scale[i];
}

struct Layout { // mirrored by kernels/compiled.py
  int64_t tokens, tiles, table_width;
  int32_t query_heads, key_heads, size, window, threads;
  float scale, epsilon;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
};

template <typename T>
void paged_attention(const Layout &at, T *query, const T *key, const T *value, const float *cosine, const float *sine,
                     const T *query_norm, const T *key_norm, T *keys, T *values, const int32_t *table,
                     const int32_t *starts, const int32_t *rows, const int32_t *positions, const int32_t *tile_starts, T *out) {
  Cache<T> cache{keys, values, table, starts, at.table_width, at.key_heads, at.size};
  int group = at.query_heads / at.key_heads, size = at.size;
#pragma omp parallel num_threads(at.threads)
  {
    std::vector<float> head(size), scratch, queries(QUERIES * size), outputs(QUERIES * size);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < at.tokens; token++) {
      int row = rows[token], position = positions[token], block = cache.block_of(row, position);
      int place = position - cache.start(row, block);
      const float *c = cosine ? cosine + int64_t(position) * size : nullptr;
      const float *s = sine ? sine + int64_t(position) * size : nullptr;
      if (cosine || query_norm)
        for (int h = 0; h < at.query_heads; h++) {
          T *from = query + token * at.query_stride + h * at.query_head_stride;
          prepare_head(from, size, query_norm, at.epsilon, c, s, head.data());
          for (int d = 0; d < size; d++) store(from + d, head[d]);
        }
      for (int h = 0; h < at.key_heads; h++) {
        prepare_head(key + token * at.key_stride + h * at.key_head_stride, size, key_norm, at.epsilon, c, s, head.data());
        T *to = keys + cache.offset(row, block, h) + place;
        for (int d = 0; d < size; d++) store(to + d * BLOCK, head[d]);
        const T *from = value + token * at.value_stride + h * at.value_head_stride;
        std::copy(from, from + size, values + cache.offset(row, block, h) + place * size);
      }
    }
    // A tile is a run of tokens of one row; its queries of one key head read the cache together.
    int64_t items = at.tiles * at.key_heads;
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < items; item++) {
      int64_t tile = item / at.key_heads;
      int h = int(item % at.key_heads);
      int64_t start = tile_starts[tile];
      int row = rows[start], count = int(tile_starts[tile + 1] - start) * group;
      for (int first = 0; first < count; first += QUERIES) {
        int n = std::min(QUERIES, count - first), begin[QUERIES], end[QUERIES];
        for (int i = 0; i < n; i++) {
          int64_t token = start + (first + i) / group;
          const T *from = query + token * at.query_stride + (h * group + (first + i) % group) * at.query_head_stride;
          for (int d = 0; d < size; d++) queries[i * size + d] = load(from[d]) * at.scale;
          end[i] = positions[token] + 1;
          begin[i] = at.window > 0 ? std::max(0, end[i] - at.window) : 0;
        }
        if (n == 4) attend<4>(cache, row, h, queries.data(), begin, end, outputs.data(), scratch);
        if (n == 3) attend<3>(cache, row, h, queries.data(), begin, end, outputs.data(), scratch);
        if (n == 2) attend<2>(cache, row, h, queries.data(), begin, end, outputs.data(), scratch);
        if (n == 1) attend<1>(cache, row, h, queries.data(), begin, end, outputs.data(), scratch);
        for (int i = 0; i < n; i++) {
          int64_t token = start + (first + i) / group;
          T *to = out + (token * at.query_heads + h * group + (first + i) % group) * size;
          for (int d = 0; d < size; d++) store(to + d, outputs[i * size + d]);
        }
      }
    }
  }
}

// residual += added (if given); out = residual / rms(residual) * weight.
template <typename T>
void add_rms_norm(T *residual, const T *added, const T *weight, T *out, int64_t tokens, int64_t size, float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    T *r = residual + token * size;
    if (added)
      for (int64_t d = 0; d < size; d++) store(r + d, load(r[d]) + load(added[token * size + d]));
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < size; d++) sum += load(r[d]) * load(r[d]);
    float scale = 1.0f / std::sqrt(sum / size + epsilon);
    for (int64_t d = 0; d < size; d++) store(out + token * size + d, load(r[d]) * scale * load(weight[d]));
  }
}

// out = silu(gate) * up, where a row of gate_up holds both.
template <typename T> void silu_mul(const T *gate_up, T *out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    const T *gate = gate_up + token * 2 * size, *up = gate + size;
    for (int64_t d = 0; d < size; d++) {
      float g = load(gate[d]), low = exp_of(-std::fabs(g));
      float sigmoid = (g >= 0 ? 1.0f : low) / (1.0f + low);
      store(out + token * size + d, g * sigmoid * load(up[d]));
    }
  }
}

// One token per row: the most likely one, or the first at which the cumulative probability exceeds the row's uniform number.
template <typename T>
void sample(const T *logits, const int64_t *source, const float *temperature, const uint8_t *greedy, const double *uniform,
            int64_t *token, float *log_prob, int64_t rows, int64_t size, int threads) {
  constexpr int64_t PART = 512;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> weight(size);
    std::vector<double> parts((size + PART - 1) / PART);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const T *x = logits + source[row] * size;
      float heat = 1.0f / temperature[row], top = load(x[0]);
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
      int64_t chosen = 0;
      if (greedy[row]) {
        while (load(x[chosen]) != top && chosen < size - 1) chosen++;
      } else {
        double left = uniform[row] * total;
        size_t p = 0;
        while (p + 1 < parts.size() && left >= parts[p]) left -= parts[p++];
        chosen = p * PART;
        int64_t last = std::min<int64_t>(size, (p + 1) * PART) - 1;
        while (chosen < last && left >= weight[chosen]) left -= weight[chosen++];
      }
      token[row] = chosen;
      log_prob[row] = (load(x[chosen]) - top) * heat - float(std::log(total));
    }
  }
}

} // namespace

#define FOR_TYPE(NAME, T)                                                                                                     \
  extern "C" void paged_attention_##NAME(const Layout *at, void *query, void *key, void *value, float *cosine, float *sine,   \
                                         void *query_norm, void *key_norm, void *keys, void *values, int32_t *table,          \
                                         int32_t *starts, int32_t *rows, int32_t *positions, int32_t *tile_starts,            \
                                         void *out) {                                                                         \
    paged_attention<T>(*at, (T *)query, (T *)key, (T *)value, cosine, sine, (T *)query_norm, (T *)key_norm, (T *)keys,        \
                       (T *)values, table, starts, rows, positions, tile_starts, (T *)out);                                  \
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
  }

FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
