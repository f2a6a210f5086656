// Numbers, the paged cache, and attention over it: shared by the operations (decode.cpp) and the whole step (step.cpp).
//
// Every row is computed by one thread in one order, so a result does not depend on how rows are spread over threads. The
// training pass (train.cpp) sums in the same order, and calls the same functions: a token gets the same bits in both. Keys are
// cached as blocks of (head size, BLOCK tokens) and values as (BLOCK tokens, head size): scores and outputs then both come
// from unit-stride loops without horizontal sums.

#pragma once
#include "lanes.h"
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
  float n = (x * EXP_SCALE + ROUND) - ROUND; // as the lanes have it; `nearbyint` would round the product once more
  return exp_near_0(x, n) * __builtin_bit_cast(float, int32_t(int32_t(n) + 127) << 23);
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

// Not inlined: a compiler may unroll a sum in another way, or fuse other products with sums, in every place that it is
// inlined into, and decoding and training would differ in their last bits.
#define SAME_BITS __attribute__((noinline))

// 1 / rms(x).
template <typename T> SAME_BITS float inverse_rms(const T *x, int64_t size, float epsilon) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; d++) sum += load(x[d]) * load(x[d]);
  return 1.0f / std::sqrt(sum / size + epsilon);
}

// The rotation of one head by the angles of its position; `to` may be `from`.
SAME_BITS inline void rotate_head(const float *from, int size, const float *cosine, const float *sine, float *to) {
  int half = size / 2;
  for (int d = 0; d < half; d++) {
    float a = from[d], b = from[d + half];
    to[d] = a * cosine[d] - b * sine[d];
    to[d + half] = b * cosine[d + half] + a * sine[d + half];
  }
}

// RMS norm (if there is a weight) and rotation (if there are angles) of one head, into float.
template <typename T>
void prepare_head(const T *from, int size, const T *norm, float epsilon, const float *cosine, const float *sine, float *to) {
  for (int d = 0; d < size; d++) to[d] = load(from[d]);
  if (norm) {
    float scale = inverse_rms(to, size, epsilon);
    for (int d = 0; d < size; d++) to[d] = to[d] * scale * load(norm[d]);
  }
  if (cosine) rotate_head(to, size, cosine, sine, to);
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

// WIDTH columns of the outputs of N queries, and the sums of their weights. These are added up here, key by key as in
// training: the chain of additions costs nothing beside those of the outputs.
template <int N, int WIDTH, typename T>
void mix_values(const Cache<T> &cache, const Span &span, int column, float *const *weights, float *out, float *totals) {
  float sum[N][WIDTH] = {}, total[N] = {};
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
        total[i] += w;
#pragma omp simd
        for (int d = 0; d < WIDTH; d++) sum[i][d] += w * load(value[d]);
      }
    }
  }
  for (int i = 0; i < N; i++) {
    totals[i] = total[i];
    for (int d = 0; d < WIDTH; d++) out[i * cache.size + column + d] = sum[i][d];
  }
}

// What a layer does to its scores: a cap (0 if there is none), and sinks of the queries, or null.
struct Changes {
  float cap;
  const float *sinks;
};

// N queries of one row and one head of keys; query i sees the positions [begin[i], end[i]).
template <int N, typename T>
void attend(const Cache<T> &cache, int row, int head, const float *query, const int *begin, const int *end,
            const Changes &changes, float *out, std::vector<float> &scratch) {
  Span span{row, head, 0, 0, *std::min_element(begin, begin + N), *std::max_element(end, end + N)};
  span.low = cache.block_of(row, span.begin), span.high = cache.block_of(row, span.end - 1);
  int width = (span.high - span.low + 1) * BLOCK;
  if (scratch.size() < size_t(N) * width) scratch.resize(size_t(N) * width);
  float *scores[N], totals[N], lost[N];
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
    float *s = scores[i], top = changes.sinks ? changes.sinks[i] : NEVER;
    if (changes.cap > 0)
      for (int t = 0; t < width; t++)
        if (s[t] > NEVER) s[t] = changes.cap * std::tanh(s[t] / changes.cap);
#pragma omp simd reduction(max : top)
    for (int t = 0; t < width; t++) top = s[t] > top ? s[t] : top;
    for (int t = 0; t < width; t++) s[t] = s[t] > NEVER ? exp_of(s[t] - top) : 0.0f;
    lost[i] = changes.sinks ? exp_of(changes.sinks[i] - top) : 0.0f; // a sink has weight, but no value
  }
  int column = 0;
  if (N <= 2) // wider where the sums still fit into registers
    for (; column + 64 <= cache.size; column += 64) mix_values<N, 64>(cache, span, column, scores, out, totals);
  for (; column + 32 <= cache.size; column += 32) mix_values<N, 32>(cache, span, column, scores, out, totals);
  for (; column + 8 <= cache.size; column += 8) mix_values<N, 8>(cache, span, column, scores, out, totals);
  for (; column < cache.size; column++) mix_values<N, 1>(cache, span, column, scores, out, totals);
  for (int i = 0; i < N; i++) {
    float scale = 1.0f / (totals[i] + lost[i]);
    for (int d = 0; d < cache.size; d++) out[i * cache.size + d] *= scale;
  }
}

struct Layout { // mirrored by kernels/compiled.py
  int64_t tokens, tiles, table_width;
  int32_t query_heads, key_heads, size, window, threads;
  float scale, epsilon;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
  const float *sinks; // of the heads of queries, or null
  float cap;          // of scores; 0 if there is none
};

// The tokens of one call and where their queries, keys and values lie.
template <typename T> struct Heads {
  T *query;
  const T *key, *value;
  const float *cosine, *sine; // by position, or null
  const T *query_norm, *key_norm;
  const int32_t *rows, *positions, *tile_starts;
  T *out;
};

// Inside a parallel region: rotate queries in place, put keys and values into the cache.
template <typename T> void place_tokens(const Layout &at, const Heads<T> &heads, const Cache<T> &cache) {
  int size = at.size;
  std::vector<float> head(size);
#pragma omp for schedule(static)
  for (int64_t token = 0; token < at.tokens; token++) {
    int row = heads.rows[token], position = heads.positions[token], block = cache.block_of(row, position);
    int place = position - cache.start(row, block);
    const float *c = heads.cosine ? heads.cosine + int64_t(position) * size : nullptr;
    const float *s = heads.sine ? heads.sine + int64_t(position) * size : nullptr;
    if (c || heads.query_norm)
      for (int h = 0; h < at.query_heads; h++) {
        T *from = heads.query + token * at.query_stride + h * at.query_head_stride;
        prepare_head(from, size, heads.query_norm, at.epsilon, c, s, head.data());
        for (int d = 0; d < size; d++) store(from + d, head[d]);
      }
    for (int h = 0; h < at.key_heads; h++) {
      const T *from = heads.key + token * at.key_stride + h * at.key_head_stride;
      prepare_head(from, size, heads.key_norm, at.epsilon, c, s, head.data());
      T *to = cache.keys + cache.offset(row, block, h) + place;
      for (int d = 0; d < size; d++) store(to + d * BLOCK, head[d]);
      const T *value = heads.value + token * at.value_stride + h * at.value_head_stride;
      std::copy(value, value + size, cache.values + cache.offset(row, block, h) + place * size);
    }
  }
}

// Inside a parallel region: attention of all tokens. A tile is a run of tokens of one row; its queries of one key head
// read the cache together.
template <typename T> void attend_tokens(const Layout &at, const Heads<T> &heads, const Cache<T> &cache) {
  int group = at.query_heads / at.key_heads, size = at.size;
  std::vector<float> scratch, queries(QUERIES * size), outputs(QUERIES * size);
#pragma omp for schedule(dynamic, 4)
  for (int64_t item = 0; item < at.tiles * at.key_heads; item++) {
    int h = int(item % at.key_heads);
    int64_t start = heads.tile_starts[item / at.key_heads], stop = heads.tile_starts[item / at.key_heads + 1];
    int row = heads.rows[start], count = int(stop - start) * group;
    for (int first = 0; first < count; first += QUERIES) {
      int n = std::min(QUERIES, count - first), begin[QUERIES], end[QUERIES];
      float sinks[QUERIES];
      for (int i = 0; i < n; i++) {
        int64_t token = start + (first + i) / group;
        const T *from = heads.query + token * at.query_stride + (h * group + (first + i) % group) * at.query_head_stride;
        for (int d = 0; d < size; d++) queries[i * size + d] = load(from[d]) * at.scale;
        if (at.sinks) sinks[i] = at.sinks[h * group + (first + i) % group];
        end[i] = heads.positions[token] + 1;
        begin[i] = at.window > 0 ? std::max(0, end[i] - at.window) : 0;
      }
      Changes changes{at.cap, at.sinks ? sinks : nullptr};
      if (n == 4) attend<4>(cache, row, h, queries.data(), begin, end, changes, outputs.data(), scratch);
      if (n == 3) attend<3>(cache, row, h, queries.data(), begin, end, changes, outputs.data(), scratch);
      if (n == 2) attend<2>(cache, row, h, queries.data(), begin, end, changes, outputs.data(), scratch);
      if (n == 1) attend<1>(cache, row, h, queries.data(), begin, end, changes, outputs.data(), scratch);
      for (int i = 0; i < n; i++) {
        int64_t token = start + (first + i) / group;
        T *to = heads.out + (token * at.query_heads + h * group + (first + i) % group) * size;
        for (int d = 0; d < size; d++) store(to + d, outputs[i * size + d]);
      }
    }
  }
}

// Norm of one row; gives 1 / rms.
template <typename T> float rms_norm_row(const T *from, const T *weight, T *to, int64_t size, float epsilon) {
  float scale = inverse_rms(from, size, epsilon);
  for (int64_t d = 0; d < size; d++) store(to + d, load(from[d]) * scale * load(weight[d]));
  return scale;
}

inline float silu(float x) {
  float low = exp_of(-std::fabs(x));
  return x * (x >= 0 ? 1.0f : low) / (1.0f + low);
}

} // namespace
