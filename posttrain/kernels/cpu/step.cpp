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

// The tokens that the last layer goes on with after its keys and values are cached; mirrored by kernels/whole_step.py.
struct Wanted {
  int64_t count;
  const int64_t *places; // among the tokens, ascending
  const int32_t *rows, *positions, *tile_starts;
};

// Rows `places` of a matrix to its beginning. Inside a parallel region; one thread does it.
template <typename T> void gather_rows(T *matrix, int64_t stride, int64_t width, const Wanted &wanted) {
#pragma omp single
  for (int64_t i = 0; i < wanted.count; i++) {
    const T *from = matrix + wanted.places[i] * stride;
    if (wanted.places[i] != i) std::copy(from, from + width, matrix + i * stride);
  }
}

// Inside a parallel region: all layers, into the residual (of the wanted tokens, if they are named).
template <typename T>
void team_layers(const Model &model, const Workspace &work, const Layout &given, const Tokens &of, const Wanted *wanted) {
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
    if (wanted && number == model.layers - 1) {
      gather_rows(qkv, all, heads, *wanted);
      gather_rows(residual, width, width, *wanted);
      at.tokens = at.tiles = tokens = wanted->count;
      parts.rows = wanted->rows, parts.positions = wanted->positions, parts.tile_starts = wanted->tile_starts;
    }
    attend_tokens(at, parts, cache);
    multiply<ADD>(Product<T>{(T *)layer.out, nullptr, heads, width}, attended, tokens, residual, width);
    norm_rows(residual, layer.between, x, tokens, width, at.epsilon);
    multiply<GATE>(Product<T>{(T *)layer.gate_up, nullptr, width, 2 * model.hidden}, x, tokens, gated, model.hidden);
    multiply<ADD>(Product<T>{(T *)layer.down, nullptr, model.hidden, width}, gated, tokens, residual, width);
  }
}

template <typename T>
void run_layers(const Model &model, const Workspace &work, const Layout &at, const Tokens &of, const Wanted *wanted) {
#pragma omp parallel num_threads(at.threads)
  {
    open_tiles(T{});
    team_layers<T>(model, work, at, of, wanted);
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
  int64_t *histories;    // (rows) rows with the same number have the same prompt and tokens, up to the newest
  int64_t *next_history; // a number that was never given
};

// Rows that have not ended, and those of them that are computed: of rows that are the same up to their newest token one is,
// and the others take its keys, values and logits.
struct Alive {
  std::vector<int32_t> rows, computed, positions, leader; // leader: of each row, its place among the computed
  std::vector<int32_t> order, tiles;

  explicit Alive(int64_t count) : rows(count), positions(count), leader(count), tiles(count + 1) {
    for (int64_t i = 0; i <= count; i++) tiles[i] = int32_t(i);
    for (int64_t i = 0; i < count; i++) rows[i] = int32_t(i);
    computed.reserve(count);
  }

  void find_leaders(const Rows &all) {
    auto key = [&](int32_t row) { return std::make_pair(all.histories[row], all.last[row]); };
    order = rows;
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return std::make_pair(key(a), a) < std::make_pair(key(b), b); });
    computed.clear();
    for (size_t i = 0; i < order.size(); i++) {
      if (!i || key(order[i]) != key(order[i - 1])) computed.push_back(order[i]);
      leader[order[i]] = int32_t(computed.size() - 1);
    }
    for (int32_t row : rows) all.histories[row] = *all.next_history + leader[row];
    *all.next_history += int64_t(computed.size());
    for (size_t i = 0; i < computed.size(); i++) positions[i] = all.positions[computed[i]];
  }

  // Whether any are left.
  bool drop(const uint8_t *ended) {
    rows.erase(std::remove_if(rows.begin(), rows.end(), [&](int32_t row) { return ended[row]; }), rows.end());
    return !rows.empty();
  }
};

// The key and value of the newest token, from one row's block to another's.
template <typename T> void copy_token(const Cache<T> &cache, int from, int to, int position) {
  int source = cache.block_of(from, position), target = cache.block_of(to, position);
  int at = position - cache.start(from, source), place = position - cache.start(to, target);
  for (int h = 0; h < cache.heads; h++) {
    const T *key = cache.key_block(from, source, h) + at, *value = cache.value_block(from, source, h) + at * cache.size;
    T *own = cache.keys + cache.offset(to, target, h) + place;
    for (int d = 0; d < cache.size; d++) own[d * BLOCK] = key[d * BLOCK];
    std::copy(value, value + cache.size, cache.values + cache.offset(to, target, h) + place * cache.size);
  }
}

// Up to `steps` tokens for every row that has not ended. A row's numbers do not depend on how
// many steps are made in one call.
template <typename T>
void run_steps(const Model &model, const Workspace &work, const Layout &given, const int32_t *table, const int32_t *starts,
               const Ends &ends, const Rows &all) {
  int64_t width = model.width, step = 0;
  Alive alive(all.rows);
  Product<T> head{(T *)ends.head, nullptr, width, ends.vocabulary};
  T *residual = (T *)work.residual, *x = (T *)work.x, *logits = (T *)ends.logits;
  bool more = all.rows > 0 && all.steps > 0;
#pragma omp parallel num_threads(given.threads)
  {
    open_tiles(T{});
    SampleScratch scratch(ends.vocabulary);
    while (more) {
#pragma omp single
      alive.find_leaders(all);
      Layout at = given;
      int64_t rows = int64_t(alive.rows.size()), computed = at.tokens = at.tiles = int64_t(alive.computed.size());
#pragma omp for schedule(static)
      for (int64_t i = 0; i < computed; i++) {
        const T *from = (const T *)ends.embedding + all.last[alive.computed[i]] * width;
        std::copy(from, from + width, residual + i * width);
      }
      Tokens of{table, starts, alive.computed.data(), alive.positions.data(), alive.tiles.data()};
      team_layers<T>(model, work, at, of, nullptr);
      norm_rows(residual, ends.norm, x, computed, width, at.epsilon);
      multiply<PLAIN>(head, x, computed, logits, ends.vocabulary);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows; i++) {
        int64_t row = alive.rows[i], place = all.counts[row]++, leader = alive.leader[row];
        for (int64_t number = 0; alive.computed[leader] != row && number < model.layers; number++) {
          const Layer &layer = model.layer[number];
          Cache<T> cache{(T *)layer.keys, (T *)layer.values, table, starts, at.table_width, at.key_heads, at.size};
          copy_token(cache, alive.computed[leader], int(row), alive.positions[leader]);
        }
        double uniform = uniform_of(all.seeds[row], place);
        int64_t token = sample_row(logits + leader * ends.vocabulary, ends.vocabulary, all.temperatures[row],
                                   all.greedy[row], uniform, scratch, all.log_probs + row * all.steps + step);
        all.tokens[row * all.steps + step] = all.last[row] = token;
        all.positions[row]++;
        const int64_t *first = all.stop_ids + all.stop_starts[all.stops[row]];
        const int64_t *last = all.stop_ids + all.stop_starts[all.stops[row] + 1];
        if (std::binary_search(first, last, token)) all.ended[row] = 1;
        else if (place + 1 >= all.limits[row]) all.ended[row] = 2;
      }
#pragma omp single
      {
        bool some = alive.drop(all.ended);
        more = ++step < all.steps && some && !(all.stop_at_end && int64_t(alive.rows.size()) < rows);
      }
    }
    close_tiles(T{});
  }
}

} // namespace

#define FOR_TYPE(NAME, T)                                                                                                     \
  extern "C" void run_layers_##NAME(const Model *model, const Workspace *work, const Layout *at, int32_t *table,              \
                                    int32_t *starts, int32_t *rows, int32_t *positions, int32_t *tile_starts,                 \
                                    const Wanted *wanted) {                                                                   \
    run_layers<T>(*model, *work, *at, Tokens{table, starts, rows, positions, tile_starts}, wanted);                           \
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

extern "C" void ordered_product_f32(const float *x, const float *weight, const float *bias, float *out, int64_t out_stride,
                                    int64_t rows, int64_t inner, int64_t outer, int adds, int threads) {
  ordered_product(x, weight, bias, out, out_stride, rows, inner, outer, adds, threads);
}

// Whether this processor has the instructions that the products of a type were measured with, and lets us use them.
extern "C" int can_multiply_f32() {
#if defined(__AVX512F__) || defined(__aarch64__)
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
