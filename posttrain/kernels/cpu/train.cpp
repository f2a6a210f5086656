// A decoder layer's forward and backward pass in float32: everything between its matrix products, which torch does.
//
// Rows are packed end to end, and rows with a common beginning share it. Attention takes 16 queries at a time, one to a lane,
// so that scores and weights need no horizontal sums; a query looks at its own row, and no other pair is computed. Sums run in one fixed order, except those over tokens in the gradient of a norm's weight, which follow the number
// of threads.

#include "attention.h"
#include <omp.h>

namespace {

struct Shape { // mirrored by kernels/train.py
  int64_t tokens, units;
  int32_t query_heads, key_heads, size, threads;
  float scale;
};

// Where packed tokens look: unit u holds the tokens [unit_starts[u], unit_starts[u + 1]). Its rows are a tree: a branch stands
// behind the tokens that it begins with, and before what it does not see. So token t is seen from itself up to end[t].
struct Sight {
  const int64_t *unit_starts;
  const int32_t *end;
};

// 16 queries (token by token, the heads of one group side by side) and the tokens that any of them sees.
struct Block {
  int64_t token[LANES]; // of each lane; the last one is repeated where there are no more
  int head[LANES], count;
  const int32_t *list; // the keys, in order; the first `seen` of them are those up to the first query
  int64_t many, seen;

  int64_t keys() const { return many; }
  int64_t key(int64_t j) const { return list[j]; }
};

Block block_of(const Shape &at, const Sight &sight, int64_t unit, int key_head, int64_t entry, std::vector<int32_t> &list) {
  int group = at.query_heads / at.key_heads;
  int64_t start = sight.unit_starts[unit], end = sight.unit_starts[unit + 1], entries = (end - start) * group;
  Block block;
  block.count = int(std::min<int64_t>(LANES, entries - entry));
  for (int lane = 0; lane < LANES; lane++) {
    int64_t e = entry + std::min(lane, block.count - 1);
    block.token[lane] = start + e / group;
    block.head[lane] = key_head * group + int(e % group);
  }
  int64_t first = block.token[0], last = block.token[block.count - 1], many = 0;
  // What the first query does not see is a whole branch, which ends before it: no later query sees any of that either.
  for (int64_t token = start; token <= first;)
    if (sight.end[token] > first) list[many++] = int32_t(token++);
    else token = sight.end[token];
  block.seen = many;
  for (int64_t token = first + 1; token <= last; token++) list[many++] = int32_t(token);
  block.list = list.data(), block.many = many;
  return block;
}

// The lanes of a block as columns: to[d * 16 + lane], times `scale`.
inline void gather_lanes(const float *from, int64_t heads, int size, const Block &block, float scale, float *to) {
  for (int lane = 0; lane < LANES; lane++) {
    const float *row = from + (block.token[lane] * heads + block.head[lane]) * size;
    for (int d = 0; d < size; d++) to[d * LANES + lane] = row[d] * scale;
  }
}

template <int N>
inline void some_products(const float *rows, int64_t stride, int size, const Block &block, const float *columns, int64_t j,
                          float *out) {
  const float *row[N];
  Lanes sum[N] = {};
  for (int i = 0; i < N; i++) row[i] = rows + block.key(j + i) * stride;
  for (int d = 0; d < size; d++) {
    Lanes column = read(columns + d * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) add(sum[i], row[i][d], column);
  }
  for (int i = 0; i < N; i++) write(out + (j + i) * LANES, sum[i]);
}

// out[j] = sum over d of rows[key j][d] * columns[d].
inline void products(const float *rows, int64_t stride, int size, const Block &block, const float *columns, float *out) {
  int64_t keys = block.keys(), j = 0;
  for (; j + TILE <= keys; j += TILE) some_products<TILE>(rows, stride, size, block, columns, j, out);
  for (; j + 2 <= keys; j += 2) some_products<2>(rows, stride, size, block, columns, j, out);
  for (; j < keys; j++) some_products<1>(rows, stride, size, block, columns, j, out);
}

constexpr int64_t NEAR = 128; // keys whose weights stay in the nearest cache while all numbers of a head are gone through

// to[d] = sum over keys of rows[key j][d] * weights[j], a tile of d at a time.
inline void mix(const float *rows, int64_t stride, int size, const Block &block, const float *weights, float *to) {
  for (int64_t from = 0, keys = block.keys(); from < keys; from += NEAR) {
    int64_t end = std::min(from + NEAR, keys);
    int d = 0;
    for (; d + TILE <= size; d += TILE) {
      Lanes sum[TILE];
      for (int i = 0; i < TILE; i++) sum[i] = from ? read(to + (d + i) * LANES) : every(0.0f);
      for (int64_t j = from; j < end; j++) {
        const float *row = rows + block.key(j) * stride + d;
        Lanes w = read(weights + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++) add(sum[i], row[i], w);
      }
      for (int i = 0; i < TILE; i++) write(to + (d + i) * LANES, sum[i]);
    }
    for (; d < size; d++) {
      Lanes sum = from ? read(to + d * LANES) : every(0.0f);
      for (int64_t j = from; j < end; j++) add(sum, rows[block.key(j) * stride + d], read(weights + j * LANES));
      write(to + d * LANES, sum);
    }
  }
}

// rows[key j][d] += sum over lanes of weights[j][lane] * columns[lane][d]; columns lie as (16, size).
inline void spread(float *rows, int64_t stride, int size, const Block &block, const float *weights, const float *columns) {
  for (int64_t from = 0, keys = block.keys(); from < keys; from += NEAR) {
    int64_t end = std::min(from + NEAR, keys);
    int d = 0;
    for (; d + LANES <= size; d += LANES) {
      int64_t j = from;
      for (; j + 4 <= end; j += 4) {
        Lanes sum[4] = {};
        for (int lane = 0; lane < LANES; lane++) {
          Lanes column = read(columns + lane * size + d);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) add(sum[i], weights[(j + i) * LANES + lane], column);
        }
        for (int i = 0; i < 4; i++) write_added(rows + block.key(j + i) * stride + d, sum[i]);
      }
      for (; j < end; j++) {
        Lanes sum{};
        for (int lane = 0; lane < LANES; lane++) add(sum, weights[j * LANES + lane], read(columns + lane * size + d));
        write_added(rows + block.key(j) * stride + d, sum);
      }
    }
    for (; d < size; d++)
      for (int64_t j = from; j < end; j++) {
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += weights[j * LANES + lane] * columns[lane * size + d];
        rows[block.key(j) * stride + d] += sum;
      }
  }
}

// Scores of tokens that a lane does not see: later ones and, where lanes are of several branches, those of the others.
inline void hide(const Sight &sight, const Block &block, float *scores) {
  int32_t own[LANES];
  for (int lane = 0; lane < LANES; lane++) own[lane] = int32_t(block.token[lane]);
  bool together = sight.end[own[0]] > own[LANES - 1]; // then all of them see what the first one sees
  for (int64_t j = together ? block.seen : 0; j < block.keys(); j++) {
    int32_t token = block.list[j], end = sight.end[token];
    float *row = scores + j * LANES;
#pragma omp simd
    for (int lane = 0; lane < LANES; lane++)
      row[lane] = token > own[lane] || end <= own[lane] ? NEVER : row[lane];
  }
}

struct Scratch {
  std::vector<float> scores, weights, query, out, gradient;
  std::vector<int32_t> keys;
  Scratch(int64_t longest, int size)
      : scores(longest * LANES), weights(longest * LANES), query(size * LANES), out(size * LANES), gradient(size * LANES),
        keys(longest) {}
};

inline int64_t longest_unit(const Shape &at, const Sight &sight) {
  int64_t longest = 0;
  for (int64_t u = 0; u < at.units; u++) longest = std::max(longest, sight.unit_starts[u + 1] - sight.unit_starts[u]);
  return longest;
}

// out (tokens, heads, size) and the logarithms of the sums, (tokens, heads).
void attention_forward(const Shape &at, const Sight &sight, const float *query, const float *key, const float *value,
                       float *out, float *logsum) {
  int size = at.size, group = at.query_heads / at.key_heads;
  int64_t stride = int64_t(at.key_heads) * size, longest = longest_unit(at, sight);
#pragma omp parallel num_threads(at.threads)
  {
    Scratch room(longest, size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < at.units * at.key_heads; item++) {
      int64_t unit = item / at.key_heads, entries = (sight.unit_starts[unit + 1] - sight.unit_starts[unit]) * group;
      int head = int(item % at.key_heads);
      for (int64_t entry = 0; entry < entries; entry += LANES) {
        Block block = block_of(at, sight, unit, head, entry, room.keys);
        float *scores = room.scores.data();
        gather_lanes(query, at.query_heads, size, block, at.scale, room.query.data());
        products(key + head * size, stride, size, block, room.query.data(), scores);
        hide(sight, block, scores);
        int64_t keys = block.keys();
        Lanes most = every(NEVER), all = every(0.0f);
        for (int64_t j = 0; j < keys; j++) most = larger(read(scores + j * LANES), most);
        for (int64_t j = 0; j < keys; j++) {
          Lanes score = read(scores + j * LANES);
          add(score, -1.0f, most);
          score = exp_of(score);
          write(scores + j * LANES, score);
          add(all, score);
        }
        alignas(64) float top[LANES], sum[LANES];
        write(top, most), write(sum, all);
        mix(value + head * size, stride, size, block, scores, room.out.data());
        for (int lane = 0; lane < block.count; lane++) {
          int64_t place = block.token[lane] * at.query_heads + block.head[lane];
          float scale = 1.0f / sum[lane];
          for (int d = 0; d < size; d++) out[place * size + d] = room.out[d * LANES + lane] * scale;
          logsum[place] = top[lane] + std::log(sum[lane]);
        }
      }
    }
  }
}

// Gradients of query, key and value; those of key and value are added to what is there.
void attention_backward(const Shape &at, const Sight &sight, const float *query, const float *key, const float *value,
                        const float *out, const float *logsum, const float *grad_out, float *grad_query, float *grad_key,
                        float *grad_value) {
  int size = at.size, group = at.query_heads / at.key_heads;
  int64_t stride = int64_t(at.key_heads) * size, longest = longest_unit(at, sight);
#pragma omp parallel num_threads(at.threads)
  {
    Scratch room(longest, size);
    std::vector<float> rows(LANES * size), grad_rows(LANES * size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < at.units * at.key_heads; item++) {
      int64_t unit = item / at.key_heads, entries = (sight.unit_starts[unit + 1] - sight.unit_starts[unit]) * group;
      int head = int(item % at.key_heads);
      for (int64_t entry = 0; entry < entries; entry += LANES) {
        Block block = block_of(at, sight, unit, head, entry, room.keys);
        int64_t keys = block.keys();
        float *p = room.scores.data(), *ds = room.weights.data();
        alignas(64) float sums[LANES], delta[LANES];
        for (int lane = 0; lane < LANES; lane++) {
          int64_t place = block.token[lane] * at.query_heads + block.head[lane];
          bool real = lane < block.count;
          float dot = 0;
          for (int d = 0; d < size; d++) {
            float g = real ? grad_out[place * size + d] : 0.0f;
            rows[lane * size + d] = query[place * size + d] * at.scale;
            grad_rows[lane * size + d] = room.gradient[d * LANES + lane] = g;
            dot += g * out[place * size + d];
          }
          sums[lane] = logsum[place], delta[lane] = dot;
        }
        gather_lanes(query, at.query_heads, size, block, at.scale, room.query.data());
        products(key + head * size, stride, size, block, room.query.data(), p);
        hide(sight, block, p);
        products(value + head * size, stride, size, block, room.gradient.data(), ds);
        Lanes total = read(sums), mean = read(delta);
        for (int64_t j = 0; j < keys; j++) {
          Lanes weight = read(p + j * LANES), slope = read(ds + j * LANES);
          add(weight, -1.0f, total), add(slope, -1.0f, mean);
          weight = exp_of(smaller(weight, 0.0f));
          write(p + j * LANES, weight);
          write(ds + j * LANES, times(weight, slope));
        }
        mix(key + head * size, stride, size, block, ds, room.out.data());
        for (int lane = 0; lane < block.count; lane++) {
          int64_t place = block.token[lane] * at.query_heads + block.head[lane];
          for (int d = 0; d < size; d++) grad_query[place * size + d] = room.out[d * LANES + lane] * at.scale;
        }
        for (int lane = block.count; lane < LANES; lane++)
          for (int64_t j = 0; j < keys; j++) p[j * LANES + lane] = ds[j * LANES + lane] = 0;
        spread(grad_key + head * size, stride, size, block, ds, rows.data());
        spread(grad_value + head * size, stride, size, block, p, grad_rows.data());
      }
    }
  }
}

// out = x / rms(x) * weight, and 1 / rms(x).
void norm_forward(const float *x, const float *weight, float *out, float *inverse, int64_t rows, int64_t size, float epsilon,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    inverse[row] = rms_norm_row(x + row * size, weight, out + row * size, size, epsilon);
}

// grad_x = (added, or 0) + the norm's gradient; grad_weight is overwritten.
void norm_backward(const float *grad, const float *x, const float *weight, const float *inverse, const float *added,
                   float *grad_x, float *grad_weight, int64_t rows, int64_t size, int threads) {
  std::vector<float> parts(threads * size, 0.0f);
#pragma omp parallel num_threads(threads)
  {
    float *own = parts.data() + omp_get_thread_num() * size;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float *g = grad + row * size, *from = x + row * size;
      float scale = inverse[row], dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < size; d++) dot += g[d] * weight[d] * from[d];
      float pull = dot * scale * scale * scale / size;
      for (int64_t d = 0; d < size; d++) {
        own[d] += g[d] * from[d] * scale;
        float to = g[d] * weight[d] * scale - from[d] * pull;
        grad_x[row * size + d] = added ? added[row * size + d] + to : to;
      }
    }
  }
  std::copy(parts.begin(), parts.begin() + size, grad_weight);
  for (int part = 1; part < threads; part++)
    for (int64_t d = 0; d < size; d++) grad_weight[d] += parts[part * size + d];
}

// Heads of queries and keys out of rows that hold queries, keys and values, rotated; values are copied.
void split_heads(const Shape &at, const float *qkv, const float *cosine, const float *sine, float *query, float *key,
                 float *value) {
  int size = at.size;
  int64_t columns = int64_t(at.query_heads + 2 * at.key_heads) * size;
#pragma omp parallel for schedule(static) num_threads(at.threads)
  for (int64_t token = 0; token < at.tokens; token++) {
    const float *from = qkv + token * columns, *c = cosine + token * size, *s = sine + token * size;
    for (int h = 0; h < at.query_heads + at.key_heads; h++, from += size) {
      float *to = h < at.query_heads ? query + (token * at.query_heads + h) * size
                                     : key + (token * at.key_heads + h - at.query_heads) * size;
      rotate_head(from, size, c, s, to);
    }
    std::copy(from, from + int64_t(at.key_heads) * size, value + token * at.key_heads * size);
  }
}

// The way back of split_heads.
void join_heads(const Shape &at, const float *query, const float *key, const float *value, const float *cosine,
                const float *sine, float *qkv) {
  int size = at.size, half = size / 2;
  int64_t columns = int64_t(at.query_heads + 2 * at.key_heads) * size;
#pragma omp parallel for schedule(static) num_threads(at.threads)
  for (int64_t token = 0; token < at.tokens; token++) {
    float *to = qkv + token * columns;
    const float *c = cosine + token * size, *s = sine + token * size;
    for (int h = 0; h < at.query_heads + at.key_heads; h++, to += size) {
      const float *g = h < at.query_heads ? query + (token * at.query_heads + h) * size
                                          : key + (token * at.key_heads + h - at.query_heads) * size;
      for (int d = 0; d < half; d++) {
        to[d] = g[d] * c[d] + g[d + half] * s[d + half];
        to[d + half] = g[d + half] * c[d + half] - g[d] * s[d];
      }
    }
    const float *v = value + token * at.key_heads * size;
    std::copy(v, v + int64_t(at.key_heads) * size, to);
  }
}

// Of a = silu(gate) * up, where rows of gate_up hold both: a itself once more, and the gradient of gate_up.
void gate_backward(const float *grad, const float *gate_up, float *product, float *grad_gate_up, int64_t rows, int64_t size,
                   int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = gate_up + row * 2 * size, *up = gate + size, *g = grad + row * size;
    float *to_gate = grad_gate_up + row * 2 * size, *to_up = to_gate + size, *a = product + row * size;
#pragma omp simd
    for (int64_t d = 0; d < size; d++) {
      float x = gate[d], low = exp_of(-std::fabs(x));
      float sigmoid = (x >= 0 ? 1.0f : low) / (1.0f + low), silu_x = x * sigmoid;
      a[d] = silu_x * up[d];
      to_up[d] = g[d] * silu_x;
      to_gate[d] = g[d] * up[d] * (sigmoid + silu_x * (1.0f - sigmoid));
    }
  }
}

} // namespace

extern "C" {
void train_attention_f32(const Shape *at, const Sight *sight, const float *query, const float *key, const float *value, float *out,
                         float *logsum) {
  attention_forward(*at, *sight, query, key, value, out, logsum);
}
void train_attention_backward_f32(const Shape *at, const Sight *sight, const float *query, const float *key,
                                  const float *value, const float *out, const float *logsum, const float *grad_out,
                                  float *grad_query, float *grad_key, float *grad_value) {
  attention_backward(*at, *sight, query, key, value, out, logsum, grad_out, grad_query, grad_key, grad_value);
}
void norm_forward_f32(const float *x, const float *weight, float *out, float *inverse, int64_t rows, int64_t size,
                      float epsilon, int threads) {
  norm_forward(x, weight, out, inverse, rows, size, epsilon, threads);
}
void norm_backward_f32(const float *grad, const float *x, const float *weight, const float *inverse, const float *added,
                       float *grad_x, float *grad_weight, int64_t rows, int64_t size, int threads) {
  norm_backward(grad, x, weight, inverse, added, grad_x, grad_weight, rows, size, threads);
}
void split_heads_f32(const Shape *at, const float *qkv, const float *cosine, const float *sine, float *query, float *key,
                     float *value) {
  split_heads(*at, qkv, cosine, sine, query, key, value);
}
void join_heads_f32(const Shape *at, const float *query, const float *key, const float *value, const float *cosine,
                    const float *sine, float *qkv) {
  join_heads(*at, query, key, value, cosine, sine, qkv);
}
void gate_backward_f32(const float *grad, const float *gate_up, float *product, float *grad_gate_up, int64_t rows,
                       int64_t size, int threads) {
  gate_backward(grad, gate_up, product, grad_gate_up, rows, size, threads);
}
}
