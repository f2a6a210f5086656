// All layers of a decoder in one call, and many steps of decoding in one call.
//
// One team of threads does the whole of it, so that nothing is started and nothing waits for Python in between.

#include "products.h"
#include "sampling.h"
#include <sys/syscall.h>
#include <unistd.h>

namespace {

struct Layer { // mirrored by kernels/whole_step.py
  void *qkv, *qkv_bias, *out, *gate_up, *down, *before, *between, *query_norm, *key_norm, *keys, *values;
  int64_t window;
};

struct Model {
  int64_t layers, width, hidden;
  Layer *layer;
  float *cosine, *sine;
};

struct Workspace {
  void *residual, *x, *qkv, *attended, *gated;
};

template <typename T>
void norm_rows(const T *residual, const void *weight, T *x, int64_t rows, int64_t size, float epsilon) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    rms_norm_row(residual + row * size, (const T *)weight, x + row * size, size, epsilon);
}

// The tokens of a step: which row of the table each belongs to, where it stands there, runs of tokens of one row.
struct Tokens {
  const int32_t *table, *starts, *rows, *positions, *tile_starts;
};

// Inside a parallel region: all layers, into the residual.
template <typename T> void team_layers(const Model &model, const Workspace &work, const Layout &given, const Tokens &of) {
  int64_t tokens = given.tokens, width = model.width, heads = int64_t(given.query_heads) * given.size;
  int64_t keys = int64_t(given.key_heads) * given.size, all = heads + 2 * keys;
  T *residual = (T *)work.residual, *x = (T *)work.x, *qkv = (T *)work.qkv;
  T *attended = (T *)work.attended, *gated = (T *)work.gated;
  for (int64_t number = 0; number < model.layers; number++) {
    const Layer &layer = model.layer[number];
    Layout at = given;
    at.window = int32_t(layer.window);
    Cache<T> cache{(T *)layer.keys, (T *)layer.values, of.table, of.starts, at.table_width, at.key_heads, at.size};
    Heads<T> parts{qkv,
                   qkv + heads,
                   qkv + heads + keys,
                   model.cosine,
                   model.sine,
                   (const T *)layer.query_norm,
                   (const T *)layer.key_norm,
                   of.rows,
                   of.positions,
                   of.tile_starts,
                   attended};
    norm_rows(residual, layer.before, x, tokens, width, at.epsilon);
    multiply<PLAIN>(Product<T>{(T *)layer.qkv, (T *)layer.qkv_bias, width, all}, x, tokens, qkv, all);
    place_tokens(at, parts, cache);
    attend_tokens(at, parts, cache);
    multiply<ADD>(Product<T>{(T *)layer.out, nullptr, heads, width}, attended, tokens, residual, width);
    norm_rows(residual, layer.between, x, tokens, width, at.epsilon);
    multiply<GATE>(Product<T>{(T *)layer.gate_up, nullptr, width, 2 * model.hidden}, x, tokens, gated, model.hidden);
    multiply<ADD>(Product<T>{(T *)layer.down, nullptr, model.hidden, width}, gated, tokens, residual, width);
  }
}

template <typename T>
void run_layers(const Model &model, const Workspace &work, const Layout &at, const Tokens &of) {
#pragma omp parallel num_threads(at.threads)
  {
    open_tiles(T{});
    team_layers<T>(model, work, at, of);
    close_tiles(T{});
  }
}

struct Ends { // what lies around the layers; mirrored by kernels/whole_step.py
  void *embedding, *norm, *head, *logits;
  int64_t vocabulary;
};

struct Rows { // mirrored by kernels/whole_step.py
  int64_t rows, steps; // at most so many steps
  int64_t stop_at_end; // whether to come back as soon as a row has ended
  int64_t *last;       // (rows) newest token
  int32_t *positions;  // (rows) where it will stand
  int64_t *counts;     // (rows) tokens generated
  const int64_t *limits;
  const uint64_t *seeds;
  const float *temperatures;
  const uint8_t *greedy;
  const int32_t *stops; // (rows) which set of stop tokens
  const int64_t *stop_starts, *stop_ids; // sets end to end, each sorted
  int64_t *tokens;   // (rows, steps) out
  float *log_probs;  // (rows, steps) out
  uint8_t *ended;    // (rows) out: 1 at a stop token, 2 at the limit
};

// Up to `steps` tokens for every row that has not ended. A row's numbers do not depend on how many steps are made in one call.
template <typename T>
void run_steps(const Model &model, const Workspace &work, const Layout &given, const int32_t *table, const int32_t *starts,
               const Ends &ends, const Rows &all) {
  int64_t width = model.width, alive = all.rows, step = 0;
  std::vector<int32_t> rows(alive), positions(alive), tiles(alive + 1);
  for (int64_t i = 0; i <= alive; i++) tiles[i] = int32_t(i);
  for (int64_t i = 0; i < alive; i++) rows[i] = int32_t(i), positions[i] = all.positions[i];
  Tokens of{table, starts, rows.data(), positions.data(), tiles.data()};
  Product<T> head{(T *)ends.head, nullptr, width, ends.vocabulary};
  T *residual = (T *)work.residual, *x = (T *)work.x, *logits = (T *)ends.logits;
  bool more = alive > 0 && all.steps > 0;
#pragma omp parallel num_threads(given.threads)
  {
    open_tiles(T{});
    SampleScratch scratch(ends.vocabulary);
    while (more) {
      Layout at = given;
      at.tokens = at.tiles = alive;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < alive; i++) {
        const T *from = (const T *)ends.embedding + all.last[rows[i]] * width;
        std::copy(from, from + width, residual + i * width);
      }
      team_layers<T>(model, work, at, of);
      norm_rows(residual, ends.norm, x, alive, width, at.epsilon);
      multiply<PLAIN>(head, x, alive, logits, ends.vocabulary);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < alive; i++) {
        int64_t row = rows[i], place = all.counts[row]++;
        double uniform = uniform_of(all.seeds[row], place);
        int64_t token = sample_row(logits + i * ends.vocabulary, ends.vocabulary, all.temperatures[row], all.greedy[row],
                                   uniform, scratch, all.log_probs + row * all.steps + step);
        all.tokens[row * all.steps + step] = all.last[row] = token;
        all.positions[row] = ++positions[i];
        const int64_t *first = all.stop_ids + all.stop_starts[all.stops[row]];
        const int64_t *last = all.stop_ids + all.stop_starts[all.stops[row] + 1];
        if (std::binary_search(first, last, token)) all.ended[row] = 1;
        else if (place + 1 >= all.limits[row]) all.ended[row] = 2;
      }
#pragma omp single
      {
        int64_t kept = 0;
        for (int64_t i = 0; i < alive; i++)
          if (!all.ended[rows[i]]) rows[kept] = rows[i], positions[kept] = positions[i], kept++;
        more = ++step < all.steps && kept > 0 && !(all.stop_at_end && kept < alive);
        alive = kept;
      }
    }
    close_tiles(T{});
  }
}

} // namespace

#define FOR_TYPE(NAME, T)                                                                                                     \
  extern "C" void run_layers_##NAME(const Model *model, const Workspace *work, const Layout *at, int32_t *table,              \
                                    int32_t *starts, int32_t *rows, int32_t *positions, int32_t *tile_starts) {               \
    run_layers<T>(*model, *work, *at, Tokens{table, starts, rows, positions, tile_starts});                                   \
  }                                                                                                                           \
  extern "C" void run_steps_##NAME(const Model *model, const Workspace *work, const Layout *at, int32_t *table,               \
                                   int32_t *starts, const Ends *ends, const Rows *rows) {                                     \
    run_steps<T>(*model, *work, *at, table, starts, *ends, *rows);                                                            \
  }                                                                                                                           \
  extern "C" void pack_##NAME(void *weight, void *to, int64_t outer, int64_t inner, int gated, int threads) {                 \
    pack<T>((T *)weight, (T *)to, outer, inner, gated, threads);                                                              \
  }

FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)

// Whether this processor has the instructions that the products of a type are written for, and lets us use them.
extern "C" int can_multiply_f32() {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}
extern "C" int can_multiply_bf16() {
#ifdef __AMX_BF16__
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0; // asks the kernel for the tile registers
#else
  return 0;
#endif
}
