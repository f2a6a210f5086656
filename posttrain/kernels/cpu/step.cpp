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
  const int64_t *drafts, *drafted; // (rows, steps) tokens that may come, or null; (rows) how many
  int64_t width;                   // tokens of a row in one pass
  int64_t *passes, *tried;         // (rows) out: passes with a draft, and drafted tokens in them
};

// Rows that have not ended, and those of them that are computed: of rows that are the same up to their newest token one is,
// and the others take its keys, values and logits. A computed row has its newest token in a pass, and drafted ones behind it.
struct Alive {
  std::vector<int32_t> rows, computed, leader; // leader: of each row, its place among the computed
  std::vector<int32_t> order, first;           // first: of each computed row, the place of its newest token in the pass
  std::vector<int32_t> token_rows, positions, tiles; // of the tokens of a pass
  std::vector<int64_t> ids, made;                    // made: of each row, tokens since the call began

  explicit Alive(int64_t count) : rows(count), leader(count), made(count) {
    for (int64_t i = 0; i < count; i++) rows[i] = int32_t(i);
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
  }

  void lay_out_tokens(const Rows &all) {
    constexpr int TOGETHER = 4; // tokens of one row that read the cache together, as in kernels/decode.py
    for (auto *list : {&first, &token_rows, &positions, &tiles}) list->clear();
    ids.clear();
    for (int32_t row : computed) {
      int64_t wide = all.drafts ? std::min(all.width, 1 + all.drafted[row] - made[row]) : 1;
      // One token more than the draft is sampled, and neither limit nor results have room for another.
      wide = std::max<int64_t>(1, std::min({wide, all.limits[row] - all.counts[row], all.steps - made[row]}));
      first.push_back(int32_t(ids.size()));
      for (int64_t j = 0; j < wide; j++) {
        if (j % TOGETHER == 0) tiles.push_back(int32_t(ids.size()));
        token_rows.push_back(row);
        positions.push_back(int32_t(all.positions[row] + j));
        ids.push_back(j ? all.drafts[row * all.steps + made[row] + j - 1] : all.last[row]);
      }
    }
    for (auto *list : {&first, &tiles}) list->push_back(int32_t(ids.size()));
  }

  // Whether the next pass has drafts for all rows that had one, and room for what it makes.
  bool can_go_on(const Rows &all) const {
    for (int32_t row : rows) {
      if (made[row] >= all.steps) return false;
      if (all.drafts && !all.drafted[row] && made[row] >= all.width) return false; // there may be a draft by now
      if (!all.drafts || !all.drafted[row]) continue;
      int64_t at = row * all.steps + made[row] - 1;
      if (made[row] >= all.drafted[row] || all.tokens[at] != all.drafts[at]) return false;
    }
    return true;
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

// Up to `steps` tokens for every row that has not ended. A row's numbers do not depend on how many steps are made in one call.
// With drafts, each pass has several tokens of a row. All are sampled, each with its own random number; those behind the first
// that the draft did not foresee are dropped, and the call comes back.
template <typename T>
void run_steps(const Model &model, const Workspace &work, const Layout &given, const int32_t *table, const int32_t *starts,
               const Ends &ends, const Rows &all) {
  int64_t width = model.width;
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
      {
        alive.find_leaders(all);
        alive.lay_out_tokens(all);
      }
      Layout at = given;
      int64_t rows = int64_t(alive.rows.size()), tokens = at.tokens = int64_t(alive.ids.size());
      at.tiles = int64_t(alive.tiles.size()) - 1;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < tokens; i++) {
        const T *from = (const T *)ends.embedding + alive.ids[i] * width;
        std::copy(from, from + width, residual + i * width);
      }
      Tokens of{table, starts, alive.token_rows.data(), alive.positions.data(), alive.tiles.data()};
      team_layers<T>(model, work, at, of, nullptr);
      norm_rows(residual, ends.norm, x, tokens, width, at.epsilon);
      multiply<PLAIN>(head, x, tokens, logits, ends.vocabulary);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows; i++) {
        int64_t row = alive.rows[i], leader = alive.leader[row], begin = alive.first[leader], end = alive.first[leader + 1];
        const int64_t *stop = all.stop_ids + all.stop_starts[all.stops[row]];
        const int64_t *stop_end = all.stop_ids + all.stop_starts[all.stops[row] + 1];
        if (end - begin > 1) all.passes[row]++, all.tried[row] += end - begin - 1;
        for (int64_t t = begin; t < end; t++) {
          for (int64_t number = 0; alive.computed[leader] != row && number < model.layers; number++) {
            const Layer &layer = model.layer[number];
            Cache<T> cache{(T *)layer.keys, (T *)layer.values, table, starts, at.table_width, at.key_heads, at.size};
            copy_token(cache, alive.computed[leader], int(row), alive.positions[t]);
          }
          int64_t place = all.counts[row]++, result = row * all.steps + alive.made[row]++;
          int64_t token = sample_row(logits + t * ends.vocabulary, ends.vocabulary, all.temperatures[row], all.greedy[row],
                                     uniform_of(all.seeds[row], place), scratch, all.log_probs + result);
          all.tokens[result] = all.last[row] = token;
          all.positions[row]++;
          // Rows with the same leader that end a pass at the same token have the same past.
          all.histories[row] = *all.next_history + t;
          if (std::binary_search(stop, stop_end, token)) all.ended[row] = 1;
          else if (place + 1 >= all.limits[row]) all.ended[row] = 2;
          if (all.ended[row] || (t + 1 < end && token != alive.ids[t + 1])) break;
        }
      }
#pragma omp single
      {
        *all.next_history += tokens;
        bool some = alive.drop(all.ended);
        more = some && alive.can_go_on(all) && !(all.stop_at_end && int64_t(alive.rows.size()) < rows);
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
