// Matrix products over weights that were laid out for them.
//
// Columns of a product are cut into tiles of 32; the weights of a tile lie end to end in the order in which they are used. A
// tile of the gated product holds 16 columns of the gate and the same 16 of the other factor, which meet where they are
// computed.

#pragma once
#include "attention.h"

#ifdef __AMX_BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int COLUMNS = 32, ROWS = 64; // a tile of a product; rows are padded to multiples of ROWS

enum Finish { PLAIN, ADD, GATE };

template <typename T> struct Product {
  const T *weight; // packed
  const T *bias;   // or null
  int64_t inner, outer; // width of the input; columns of the result before gating
};

constexpr int HALVES = WIDTH == 64 ? 2 : 1; // of a tile's columns, whose sums fit into the registers together

// 8 rows x 32 columns, float32.
inline void block_product(const float *x, int64_t stride, const float *weight, int64_t inner, float *to) {
  for (int half = 0; half < 2; half += HALVES)
    for (int first = 0; first < 8; first += TILE) {
      Lanes sum[TILE][HALVES] = {};
      const float *row = x + first * stride;
      for (int64_t k = 0; k < inner; k++) {
        Lanes w[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) w[h] = read(weight + k * COLUMNS + (half + h) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++)
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++) add(sum[r][h], row[r * stride + k], w[h]);
      }
      for (int r = 0; r < TILE; r++)
        for (int h = 0; h < HALVES; h++) write(to + (first + r) * COLUMNS + (half + h) * LANES, sum[r][h]);
    }
}

// `rows` (at most ROWS, rounded up to what is computed together) x 32 columns into `to`.
inline void tile_product(const float *x, int64_t stride, const float *weight, int64_t inner, int64_t rows, float *to) {
  for (int r = 0; r < rows; r += 8) block_product(x + r * stride, stride, weight, inner, to + r * COLUMNS);
}

inline void open_tiles(float) {}
inline void close_tiles(float) {}

#ifdef __AMX_BF16__
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void open_tiles(bf16) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.bytes[tile] = 64, shapes.rows[tile] = 16;
  asm volatile("" ::: "memory"); // compilers take the instruction to read eight bytes, and would leave out the rest
  _tile_loadconfig(&shapes);
}
inline void close_tiles(bf16) { _tile_release(); }

// 32 rows at a time, four sums of 16 x 16.
inline void tile_product(const bf16 *x, int64_t stride, const bf16 *weight, int64_t inner, int64_t rows, float *to) {
  for (int r = 0; r < rows; r += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16 *a = x + r * stride, *w = weight;
    for (int64_t k = 0; k < inner; k += 32, w += 2 * 512) {
      if (r == 0) // weights come from far away, once: ask for those of four steps ahead
        for (int line = 0; line < 32; line++) __builtin_prefetch((const char *)(w + 4 * 1024) + 64 * line);
      _tile_loadd(4, a + k, stride * 2);
      _tile_loadd(5, a + 16 * stride + k, stride * 2);
      _tile_loadd(6, w, 64);
      _tile_loadd(7, w + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float *out = to + r * COLUMNS;
    _tile_stored(0, out, COLUMNS * 4);
    _tile_stored(1, out + 16, COLUMNS * 4);
    _tile_stored(2, out + 16 * COLUMNS, COLUMNS * 4);
    _tile_stored(3, out + 16 * COLUMNS + 16, COLUMNS * 4);
  }
}
#else
inline void open_tiles(bf16) {}
inline void close_tiles(bf16) {}
inline void tile_product(const bf16 *, int64_t, const bf16 *, int64_t, int64_t, float *) {}
#endif

// As low precision would have it between two operations.
inline float rounded(float x, float) { return x; }
inline float rounded(float x, bf16) {
  bf16 low;
  store(&low, x);
  return load(low);
}

// Inside a parallel region: out = x * weight (PLAIN), out += x * weight (ADD), or out = silu(gate) * up (GATE).
template <Finish FINISH, typename T>
void multiply(const Product<T> &product, const T *x, int64_t rows, T *out, int64_t out_stride) {
  int64_t tiles = (product.outer + COLUMNS - 1) / COLUMNS, parts = (rows + ROWS - 1) / ROWS;
  alignas(64) float sum[ROWS * COLUMNS];
#pragma omp for collapse(2) schedule(static)
  for (int64_t tile = 0; tile < tiles; tile++)
    for (int64_t part = 0; part < parts; part++) {
      int64_t first = part * ROWS;
      const T *weight = product.weight + tile * COLUMNS * product.inner;
      int64_t count = std::min<int64_t>(ROWS, rows - first);
      tile_product(x + first * product.inner, product.inner, weight, product.inner, count, sum);
      for (int64_t r = 0; r < count; r++) {
        const float *s = sum + r * COLUMNS;
        if (FINISH == GATE) {
          T *to = out + (first + r) * out_stride + tile * 16;
          for (int c = 0; c < 16; c++) store(to + c, silu(rounded(s[c], T{})) * rounded(s[16 + c], T{}));
          continue;
        }
        int64_t column = tile * COLUMNS, wide = std::min<int64_t>(COLUMNS, product.outer - column);
        T *to = out + (first + r) * out_stride + column;
        for (int64_t c = 0; c < wide; c++) {
          float y = s[c] + (product.bias ? load(product.bias[column + c]) : 0.0f);
          store(to + c, FINISH == ADD ? load(to[c]) + rounded(y, T{}) : y);
        }
      }
    }
}

// Where column c of tile t comes from among the rows of the weight, or -1: the gate and the other factor take turns.
inline int64_t source_row(int64_t tile, int c, int64_t outer, bool gated) {
  if (gated) return c < 16 ? tile * 16 + c : outer / 2 + tile * 16 + c - 16;
  int64_t row = tile * COLUMNS + c;
  return row < outer ? row : -1;
}

// Words of four bytes of 16 columns: a float32 number, or two neighbouring inputs in bfloat16. Word i of all columns goes to
// place_of(i), one beside the other; a row of -1 is a column of zeros.
inline int64_t place_of(float, int64_t word, int half) { return word * 32 + half * 16; }
inline int64_t place_of(bf16, int64_t word, int half) { return (word / 16) * 512 + half * 256 + word % 16 * 16; }

// The columns of one tile, in the order in which a product reads them.
template <typename T> void pack_tile(const T *weight, T *to, int64_t tile, int64_t outer, int64_t inner, bool gated) {
  constexpr int64_t WORDS = 32, EACH = 4 / sizeof(T); // words at a time: two lines of the cache; numbers in a word
  int64_t words = inner / EACH;
  for (int half = 0; half < 2; half++) {
    const uint32_t *column[16];
    for (int c = 0; c < 16; c++) {
      int64_t row = source_row(tile, half * 16 + c, outer, gated);
      column[c] = row < 0 ? nullptr : (const uint32_t *)(weight + row * inner);
    }
    uint32_t *out = (uint32_t *)to;
    for (int64_t first = 0; first < words; first += WORDS) {
      uint32_t lines[16][WORDS];
      int64_t count = std::min(WORDS, words - first);
      for (int c = 0; c < 16; c++)
        for (int64_t i = 0; i < count; i++) lines[c][i] = column[c] ? column[c][first + i] : 0;
      for (int64_t i = 0; i < count; i++) {
        uint32_t *at = out + place_of(T{}, first + i, half);
        for (int c = 0; c < 16; c++) at[c] = lines[c][i];
      }
    }
  }
}

template <typename T> void pack(const T *weight, T *to, int64_t outer, int64_t inner, bool gated, int threads) {
  int64_t tiles = (outer + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t tile = 0; tile < tiles; tile++)
    pack_tile(weight, to + tile * COLUMNS * inner, tile, outer, inner, gated);
}

// out (+)= x * weight' + bias over weights as a model holds them, with the sums of `multiply`: number after number, whatever
// rows and columns stand beside. Each thread packs a tile of the weight and multiplies many rows with it.
inline void ordered_product(const float *x, const float *weight, const float *bias, float *out, int64_t out_stride, int64_t rows,
                            int64_t inner, int64_t outer, bool adds, int threads) {
  constexpr int64_t BAND = 512; // rows that a tile is packed for: packing takes about 1/16 of their product
  int64_t tiles = (outer + COLUMNS - 1) / COLUMNS, bands = tiles >= 4 * threads ? 1 : (rows + BAND - 1) / BAND;
  int64_t tall = ((rows + bands - 1) / bands + 7) / 8 * 8, full = rows / 8 * 8;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> packed(COLUMNS * inner), tail(rows > full ? 8 * inner : 0, 0.0f);
    std::copy(x + full * inner, x + rows * inner, tail.begin()); // products read whole blocks of 8 rows
    alignas(64) float sum[8 * COLUMNS];
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t tile = 0; tile < tiles; tile++)
      for (int64_t band = 0; band < bands; band++) {
        pack_tile(weight, packed.data(), tile, outer, inner, false);
        int64_t column = tile * COLUMNS, wide = std::min<int64_t>(COLUMNS, outer - column);
        for (int64_t row = band * tall; row < std::min(rows, (band + 1) * tall); row += 8) {
          block_product(row < full ? x + row * inner : tail.data(), inner, packed.data(), inner, sum);
          for (int64_t r = 0; r < std::min<int64_t>(8, rows - row); r++) {
            float *to = out + (row + r) * out_stride + column;
            for (int64_t c = 0; c < wide; c++) {
              float y = sum[r * COLUMNS + c] + (bias ? bias[column + c] : 0.0f);
              to[c] = adds ? to[c] + y : y;
            }
          }
        }
      }
  }
}

} // namespace
