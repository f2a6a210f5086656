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

// 8 rows x 32 columns, float32; sums begin with what is in `to` if they go on from there.
inline void block_product(const float *x, int64_t stride, const float *weight, int64_t inner, float *to, bool goes_on = false) {
  for (int half = 0; half < 2; half += HALVES)
    for (int first = 0; first < 8; first += TILE) {
      Lanes sum[TILE][HALVES] = {};
      if (goes_on)
        for (int r = 0; r < TILE; r++)
          for (int h = 0; h < HALVES; h++) sum[r][h] = read(to + (first + r) * COLUMNS + (half + h) * LANES);
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

template <typename T> void pack(const T *weight, T *to, int64_t outer, int64_t inner, bool gated, int threads) {
  constexpr int64_t WORDS = 32, EACH = 4 / sizeof(T); // words at a time: two lines of the cache; numbers in a word
  int64_t tiles = (outer + COLUMNS - 1) / COLUMNS, words = inner / EACH;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t tile = 0; tile < tiles; tile++)
    for (int half = 0; half < 2; half++) {
      const uint32_t *column[16];
      for (int c = 0; c < 16; c++) {
        int64_t row = source_row(tile, half * 16 + c, outer, gated);
        column[c] = row < 0 ? nullptr : (const uint32_t *)(weight + row * inner);
      }
      uint32_t *out = (uint32_t *)(to + tile * COLUMNS * inner);
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

// `deep` numbers of up to 32 columns (rows of the weight) from unpacked memory, as a product reads them; the other columns are
// zeros. Four numbers of four columns are turned at a time.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
inline void pack_stretch(const float *weight, int64_t inner, int64_t wide, int64_t deep, float *to) {
  if (wide < COLUMNS) std::fill(to, to + deep * COLUMNS, 0.0f);
  for (int64_t k = 0; k < deep; k += 4)
    for (int64_t c = 0; c < std::min<int64_t>(wide, COLUMNS); c += 4) {
      const float *from = weight + c * inner + k;
      if (k + 4 <= deep && c + 4 <= wide) {
        Quad q[4];
        for (int i = 0; i < 4; i++) q[i] = *(const Quad *)(from + i * inner);
        for (int i = 0; i < 4; i++) *(Quad *)(to + (k + i) * COLUMNS + c) = Quad{q[0][i], q[1][i], q[2][i], q[3][i]};
        continue;
      }
      for (int64_t i = 0; i < std::min<int64_t>(4, wide - c); i++)
        for (int64_t j = 0; j < std::min<int64_t>(4, deep - k); j++) to[(k + j) * COLUMNS + c + i] = from[i * inner + j];
    }
}

// Sums of one row into `wide` columns of the result.
inline void finish_row(const float *sum, const float *bias, bool adds, int64_t wide, float *to) {
  if (wide >= COLUMNS) {
    for (int half = 0; half < COLUMNS; half += LANES) {
      Lanes y = read(sum + half);
      if (bias) add(y, read(bias + half));
      if (adds) add(y, read(to + half));
      write(to + half, y);
    }
    return;
  }
  for (int64_t c = 0; c < wide; c++) {
    float y = sum[c] + (bias ? bias[c] : 0.0f);
    to[c] = adds ? to[c] + y : y;
  }
}

// Memory of a thread that stays: taking it anew for every product costs a page fault for every 4 KiB.
inline float *thread_memory(int64_t numbers) {
  static thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < numbers) memory.resize(numbers);
  return memory.data();
}

// out (+)= x * weight' + bias over weights as a model holds them, with the sums of `multiply`: number after number, whatever
// rows and columns stand beside. A thread packs a stretch of the sums of GROUP tiles and multiplies a part of the rows with it,
// band by band, so that weights and rows stay in the nearer caches; then the sums go on with the next stretch.
inline void ordered_product(const float *x, const float *weight, const float *bias, float *out, int64_t out_stride, int64_t rows,
                            int64_t inner, int64_t outer, bool adds, int threads) {
  constexpr int64_t GROUP = 8, BAND = 64, DEPTH = 256, PART = 256, WIDE = GROUP * COLUMNS;
  bool whole = inner <= DEPTH; // then bands are finished one after the other, and rows are parted for threads alone
  int64_t tall = whole ? std::max(PART, (rows / (4 * threads) + BAND - 1) / BAND * BAND) : PART, full = rows / 8 * 8;
  int64_t groups = (outer + WIDE - 1) / WIDE, parts = (rows + tall - 1) / tall;
#pragma omp parallel num_threads(threads)
  {
    float *packed = thread_memory(WIDE * (DEPTH + (whole ? BAND : PART)) + 8 * inner), *sums = packed + WIDE * DEPTH;
    float *tail = sums + WIDE * (whole ? BAND : PART);
    std::copy(x + full * inner, x + rows * inner, tail); // products read whole blocks of 8 rows
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t group = 0; group < groups; group++)
      for (int64_t part = 0; part < parts; part++) {
        int64_t first = group * WIDE, tiles = (std::min(WIDE, outer - first) + COLUMNS - 1) / COLUMNS;
        int64_t begin = part * tall, end = std::min(rows, begin + tall);
        for (int64_t k = 0; k < inner; k += DEPTH) {
          int64_t deep = std::min(DEPTH, inner - k);
          for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t column = first + tile * COLUMNS;
            pack_stretch(weight + column * inner + k, inner, outer - column, deep, packed + tile * DEPTH * COLUMNS);
          }
          for (int64_t from = begin; from < end; from += BAND) {
            int64_t count = std::min(BAND, end - from);
            float *here = sums + (whole ? 0 : (from - begin) * WIDE); // by tile, then by row
            for (int64_t tile = 0; tile < tiles; tile++)
              for (int64_t r = 0; r < count; r += 8)
                block_product((from + r < full ? x + (from + r) * inner : tail) + k, inner, packed + tile * DEPTH * COLUMNS, deep,
                              here + (tile * BAND + r) * COLUMNS, k > 0);
            if (k + deep < inner) continue;
            for (int64_t r = 0; r < count; r++) // row by row: memory is written from left to right
              for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t column = first + tile * COLUMNS;
                finish_row(here + (tile * BAND + r) * COLUMNS, bias ? bias + column : nullptr, adds, outer - column,
                           out + (from + r) * out_stride + column);
              }
          }
        }
      }
  }
}

} // namespace
