// 16 numbers at a time, in registers as wide as the processor has them.

#pragma once
#include <cstdint>

namespace {

constexpr int LANES = 16;

// Wider registers than there are would live in memory. A tile is as many sums of 16 as fit into them beside what is multiplied.
#if defined(__AVX512F__)
constexpr int WIDTH = 64, TILE = 8;
#elif defined(__AVX__)
constexpr int WIDTH = 32, TILE = 4;
#else
constexpr int WIDTH = 16, TILE = 4;
#endif
constexpr int PARTS = LANES * 4 / WIDTH;
typedef float Register __attribute__((vector_size(WIDTH)));
typedef int32_t Whole __attribute__((vector_size(WIDTH)));
typedef float Anywhere __attribute__((vector_size(WIDTH), aligned(4), may_alias));
struct Lanes {
  Register part[PARTS];
};
#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)

inline Lanes read(const float *x) {
  Lanes to;
  EACH_PART to.part[p] = *reinterpret_cast<const Anywhere *>(x + p * (LANES / PARTS));
  return to;
}
inline void write(float *to, const Lanes &x) {
  EACH_PART *reinterpret_cast<Anywhere *>(to + p * (LANES / PARTS)) = x.part[p];
}
inline Lanes every(float x) {
  Lanes to;
  EACH_PART to.part[p] = Register{} + x;
  return to;
}
inline void add(Lanes &sum, float x, const Lanes &y) { EACH_PART sum.part[p] += x * y.part[p]; }
inline void add(Lanes &sum, const Lanes &y) { EACH_PART sum.part[p] += y.part[p]; }
inline Lanes times(const Lanes &x, const Lanes &y) {
  Lanes to;
  EACH_PART to.part[p] = x.part[p] * y.part[p];
  return to;
}
inline Lanes larger(const Lanes &x, const Lanes &y) {
  Lanes to;
  EACH_PART to.part[p] = x.part[p] > y.part[p] ? x.part[p] : y.part[p];
  return to;
}
inline Lanes smaller(const Lanes &x, float y) {
  Lanes to;
  EACH_PART to.part[p] = x.part[p] < y ? x.part[p] : Register{} + y;
  return to;
}
inline void write_added(float *to, const Lanes &x) {
  Lanes sum = read(to);
  add(sum, x);
  write(to, sum);
}

constexpr float NEVER = -3e38f, HIDDEN = -1e38f; // scores of tokens that are not seen, and what they stay below

// e^x is 2^n times e^r, where n is the whole number nearest to x * EXP_SCALE; this is e^r. One number, or a register of them.
constexpr float EXP_SCALE = 1.44269504088896341f;
constexpr float ROUND = 12582912.0f; // adding it rounds to a whole number: numbers this large have no digits behind the point
template <typename Number> inline Number exp_near_0(Number x, Number n) {
  Number r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Number p = Number{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

// e^x as `exp_of` of one number has it, 16 at a time; 0 for tokens that are not seen.
inline Lanes exp_of(const Lanes &of) {
  Lanes to;
  EACH_PART {
    Register x = of.part[p] < -87.0f ? Register{} - 87.0f : of.part[p];
    Register n = (x * EXP_SCALE + ROUND) - ROUND;
    Register e = exp_near_0(x, n) * Register((__builtin_convertvector(n, Whole) + 127) << 23);
    to.part[p] = of.part[p] > HIDDEN ? e : Register{};
  }
  return to;
}

} // namespace
