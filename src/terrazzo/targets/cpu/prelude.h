// What every kernel on a CPU may use: storage types, conversions, blocked matrix products. Our own code only.
#define _GLIBCXX_BITS_SPECFUN_H 1  // cmath without Bessel's functions and others, which take GCC 50 ms to read
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using f32 = float;
using f64 = double;
// 16-bit floats are for storage only, arithmetic is in f32: types of their own, so that nothing takes them for numbers.
enum class f16 : uint16_t {};
enum class bf16 : uint16_t {};
#define TZ static inline __attribute__((always_inline, unused))
// What kernels call once for each of their products is compiled once: of 19 products inlined takes GCC 10 s, of this 0.7.
#define TZ_ONCE static __attribute__((noinline))

template <class To, class From> TZ To tz_bits(From x) { To y; static_assert(sizeof(To) == sizeof(From)); memcpy(&y, &x, sizeof y); return y; }

// Conversions of 16-bit floats are integer arithmetic without branches, so that they vectorise with every compiler.
TZ float tz_widen(bf16 x) { return tz_bits<float>((uint32_t)x << 16); }
TZ float tz_widen(f16 x) {
  uint32_t u = (uint32_t)(int16_t)x << 13 & 0x8fffe000u;               // of the sign's copies, the one at the top is kept
  uint32_t top = (u & 0x0f800000u) == 0x0f800000u ? 0x7f800000u : 0u;  // infinity and NaN
  float scaled = tz_bits<float>(u) * 0x1p112f;                         // moves the exponent's bias; subnormals come out normal
  return tz_bits<float>(tz_bits<uint32_t>(scaled) | top);
}
// Both round to nearest even; a NaN stays one, by its bits: after a choice GCC would know it in what asks for NaN next,
// such as a maximum, and branch there, so that the loop is no vectors.
TZ bf16 tz_narrow_bf16(float x) {
  uint32_t u = tz_bits<uint32_t>(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (bf16)(uint16_t)(rounded | (0x7fc0u & (0u - (uint32_t)(x != x))));
}
TZ bf16 tz_cut_bf16(float x) { return (bf16)(uint16_t)(tz_bits<uint32_t>(x) >> 16); }
// In signed numbers: AVX2 and SSE have no unsigned comparisons.
TZ f16 tz_narrow_f16(float x) {
  int32_t u = tz_bits<int32_t>(x), a = u & 0x7fffffff;
  int32_t normal = (a - (112 << 23) + 0xfff + (a >> 13 & 1)) >> 13;
  int32_t tiny = tz_bits<int32_t>(tz_bits<float>(a) + 0.5f) - 0x3f000000;  // the addition rounds at the last place of a subnormal
  int32_t r = a < 0x38800000 ? tiny : std::min(normal, 0x7c00);
  return (f16)(uint16_t)(r | (0x7e00 & -(int32_t)(x != x)) | (u >> 16 & 0x8000));
}

// A number rounded to 16 bits, which stays in 32: as above, but nothing is packed and taken apart again.
template <class T> TZ float tz_rounded(float x) {
  const int32_t u = tz_bits<int32_t>(x), nan = -(int32_t)(x != x);
  if constexpr (std::is_same_v<T, bf16>) {
    return tz_bits<float>(((u + 0x7fff + (u >> 16 & 1)) & (int32_t)0xffff0000) | (0x7fc00000 & nan));
  } else {
    const int32_t a = u & 0x7fffffff, normal = (a + 0xfff + (a >> 13 & 1)) & ~0x1fff;
    const int32_t tiny = tz_bits<int32_t>((tz_bits<float>(a) + 0.5f) - 0.5f);
    const int32_t r = a < 0x38800000 ? tiny : normal < 0x47800000 ? normal : 0x7f800000;
    return tz_bits<float>(r | (0x7fc00000 & nan) | (u & (int32_t)0x80000000));
  }
}

template <class T> constexpr bool tz_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
#define TZ_COMPARE(op) \
  TZ bool operator op(f16 a, f16 b) { return tz_widen(a) op tz_widen(b); } \
  TZ bool operator op(bf16 a, bf16 b) { return tz_widen(a) op tz_widen(b); }
TZ_COMPARE(==) TZ_COMPARE(!=) TZ_COMPARE(<) TZ_COMPARE(<=) TZ_COMPARE(>) TZ_COMPARE(>=)

// A float rounded to odd keeps what a second rounding to a narrower type must know.
TZ float tz_to_odd(double x) {
  float f = (float)x;
  uint32_t u = tz_bits<uint32_t>(f);
  bool inexact = (double)f != x && x == x && !(u & 1u), away = std::fabs((double)f) > std::fabs(x);
  return tz_bits<float>(inexact ? (away ? u - 1 : u + 1) : u);
}
// Beyond the range of the integer the C conversion is undefined; these go through the widest type that has an instruction.
template <class To, class From> TZ To tz_from_float(From x) {
  if constexpr (sizeof(To) <= 2) return (To)(int32_t)x;
  else if constexpr (std::is_same_v<To, uint32_t>) return (To)(int64_t)x;
  else if constexpr (std::is_same_v<To, uint64_t>) {
    constexpr From half = (From)9223372036854775808.0;
    return x >= half ? (uint64_t)(int64_t)(x - half) ^ (uint64_t)1 << 63 : (uint64_t)(int64_t)x;
  } else return (To)x;
}
// By the bits: GCC 12 fails on a vectorised std::signbit of what was f16.
template <class T> TZ bool tz_signbit(T x) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  return tz_bits<Bits>(x) >> (8 * sizeof x - 1);
}
// Whole numbers in the order of floats: both zeros are one, and NaN is the largest.
template <class T> TZ auto tz_order(T x) {
  using Whole = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr Whole most = std::numeric_limits<Whole>::max();
  Whole bits = tz_bits<Whole>(x + (T)0);
  return x != x ? most : bits ^ (bits >> (8 * sizeof x - 1) & most);
}

// Runs of float16 as float32 and back, eight numbers at a time where the processor has instructions for that, or sixteen:
// what is stored in halves of a vector waits until it is read whole. (Their header takes longer to read than a kernel
// takes to compile.)
template <int n> struct tz_run_of {
  typedef float singles __attribute__((vector_size(4 * n)));
#if defined(__clang__)
  typedef _Float16 halves __attribute__((vector_size(2 * n)));
#else
  typedef short halves __attribute__((vector_size(2 * n)));
#endif
};
#if defined(__F16C__) && defined(__clang__)
template <int n> TZ typename tz_run_of<n>::singles tz_widened(typename tz_run_of<n>::halves x) { return __builtin_convertvector(x, typename tz_run_of<n>::singles); }
template <int n> TZ typename tz_run_of<n>::halves tz_narrowed(typename tz_run_of<n>::singles x) { return __builtin_convertvector(x, typename tz_run_of<n>::halves); }
#elif defined(__F16C__)
template <int n> TZ typename tz_run_of<n>::singles tz_widened(typename tz_run_of<n>::halves x) {
#if defined(__AVX512F__)
  if constexpr (n == 16) return __builtin_ia32_vcvtph2ps512_mask(x, typename tz_run_of<n>::singles{}, -1, 4);
  else
#endif
  return __builtin_ia32_vcvtph2ps256(x);
}
template <int n> TZ typename tz_run_of<n>::halves tz_narrowed(typename tz_run_of<n>::singles x) {  // 0: to nearest even
#if defined(__AVX512F__)
  if constexpr (n == 16) return __builtin_ia32_vcvtps2ph512_mask(x, 0, typename tz_run_of<n>::halves{}, -1);
  else
#endif
  return __builtin_ia32_vcvtps2ph256(x, 0);
}
#endif
#if defined(__F16C__)
template <int n> TZ int64_t tz_widen_runs(const f16* from, float* to, int64_t i, int64_t end) {
  for (typename tz_run_of<n>::halves x; i + n <= end; i += n) {
    memcpy(&x, from + i, sizeof x);
    const typename tz_run_of<n>::singles y = tz_widened<n>(x);
    memcpy(to + i, &y, sizeof y);
  }
  return i;
}
template <int n> TZ int64_t tz_narrow_runs(const float* from, f16* to, int64_t i, int64_t end) {
  for (typename tz_run_of<n>::singles x; i + n <= end; i += n) {
    memcpy(&x, from + i, sizeof x);
    const typename tz_run_of<n>::halves y = tz_narrowed<n>(x);
    memcpy(to + i, &y, sizeof y);
  }
  return i;
}
#endif
TZ void tz_widen_run(const f16* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX512F__)
  i = tz_widen_runs<16>(from, to, i, n);
#endif
#if defined(__F16C__)
  i = tz_widen_runs<8>(from, to, i, n);
#endif
  for (; i < n; i++) to[i] = tz_widen(from[i]);
}
TZ void tz_narrow_run(const float* from, f16* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX512F__)
  i = tz_narrow_runs<16>(from, to, i, n);
#endif
#if defined(__F16C__)
  i = tz_narrow_runs<8>(from, to, i, n);
#endif
  for (; i < n; i++) to[i] = tz_narrow_f16(from[i]);
}

// An index that came from data: out of range is noted, and reads element 0 until the kernel returns.
TZ int64_t tz_at(int64_t i, int64_t extent, int& bad) {
  bool outside = (uint64_t)i >= (uint64_t)extent;
  if (outside) bad |= 1;
  return outside ? 0 : i;
}
// The same of one that is only compared, without a branch, so that loops vectorise: threads and lanes each need a `bad`.
TZ int64_t tz_among(int64_t i, int64_t extent, int& bad) {
  bool outside = (uint64_t)i >= (uint64_t)extent;
  bad |= outside;
  return outside ? 0 : i;
}
// A whole divisor: zero is noted.
template <class T> TZ T tz_divisor(T b, int& bad) {
  if (b == 0) bad |= 2;
  return b;
}
TZ int64_t tz_fdiv(int64_t a, int64_t b) { int64_t q = a / b; return q - (a % b < 0); }
TZ int64_t tz_fmod_index(int64_t a, int64_t b) { int64_t r = a % b; return r < 0 ? r + b : r; }

// glibc has vector versions of these; they must be named where the loop is vectorised.
#if defined(TZ_VECTOR_MATH)
#define TZ_SIMD(name)                                                                \
  extern "C" __attribute__((simd("notinbranch"))) float name##f(float) noexcept;     \
  extern "C" __attribute__((simd("notinbranch"))) double name(double) noexcept;
#define TZ_SIMD2(name)                                                                   \
  extern "C" __attribute__((simd("notinbranch"))) float name##f(float, float) noexcept;  \
  extern "C" __attribute__((simd("notinbranch"))) double name(double, double) noexcept;
#define TZ_SIMD_NAMED(name)                                                                              \
  extern "C" __attribute__((simd("notinbranch"))) float tz_##name##f(float) noexcept __asm__(#name "f");  \
  extern "C" __attribute__((simd("notinbranch"))) double tz_##name##d(double) noexcept __asm__(#name);    \
  TZ float tz_##name(float x) { return tz_##name##f(x); }                                                 \
  TZ double tz_##name(double x) { return tz_##name##d(x); }
TZ_SIMD(exp) TZ_SIMD(log) TZ_SIMD(sin) TZ_SIMD(cos) TZ_SIMD(tanh) TZ_SIMD(erf) TZ_SIMD(expm1) TZ_SIMD(log1p) TZ_SIMD(exp2)
TZ_SIMD(log2) TZ_SIMD(log10) TZ_SIMD(tan) TZ_SIMD(asin) TZ_SIMD(acos) TZ_SIMD(atan) TZ_SIMD(sinh) TZ_SIMD(cosh) TZ_SIMD(asinh)
TZ_SIMD(acosh) TZ_SIMD(atanh) TZ_SIMD(erfc) TZ_SIMD2(pow) TZ_SIMD2(atan2) TZ_SIMD2(hypot)
#endif
// Bits of which a compiler does not know that they are 0: GCC contracts a product that is not made of anything else with
// what is added to it, whatever barrier of the language lies between.
extern "C" { __attribute__((weak)) int64_t tz_no_bits = 0; }
template <class T> TZ T tz_rounded_mul(T a, T b) {
#if defined(__clang__)  // which contracts within an expression only
  return a * b;
#else
  using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  return tz_bits<T>(static_cast<Bits>(tz_bits<Bits>(a * b) ^ static_cast<Bits>(tz_no_bits)));
#endif
}
template <class T> TZ T tz_rsqrt(T x) { return T(1) / std::sqrt(x); }
template <class T> TZ T tz_approx_div(T a, T b) { return a / b; }
template <class T> TZ T tz_approx_log2(T x) { return std::log2(x); }
template <class T> TZ T tz_approx_sqrt(T x) { return std::sqrt(x); }
// Powers of 2 and the hyperbolic tangent, in operations that every compiler has vectors for: clang calls the library's
// for one number at a time, and the library's vector form the scalar one where nothing or little is left, as in the tail
// of a GELU. To a unit in the last place and to two: a fit of (2^f - 1) / f on half a unit around 0, and of
// (tanh(x) / x - 1) / x^2 up to 0.625.
TZ float tz_exp2(float x) {
  float c = x < -150.0f ? -150.0f : x > 128.0f ? 128.0f : x;  // a NaN stays one
  float shifted = c + 12582912.0f, f = c - (shifted - 12582912.0f);  // its last bits are whole numbers
  float p = 1.54614475e-4f;
  p = p * f + 1.33908674e-3f, p = p * f + 9.61805667e-3f, p = p * f + 5.55035711e-2f;
  p = p * f + 2.40226509e-1f, p = p * f + 6.93147188e-1f, p = p * f + 1.0f;
  int32_t n = tz_bits<int32_t>(shifted) - 0x4b400000, half = n >> 1;  // subnormal numbers take two steps
  return p * tz_bits<float>((uint32_t)(half + 127) << 23) * tz_bits<float>((uint32_t)(n - half + 127) << 23);
}
TZ float tz_approx_exp2(float x) { return tz_exp2(x); }
TZ double tz_approx_exp2(double x) { return std::exp2(x); }
template <class T> TZ T tz_approx_logistic(T x) { return T(1) / (T(1) + tz_approx_exp2(x)); }
TZ float tz_plain_tanh(float x) {
  float a = std::fabs(x), z = x * x, p = -6.10494332e-3f;
  p = p * z + 2.10036371e-2f, p = p * z - 5.38524963e-2f, p = p * z + 1.33327823e-1f, p = p * z - 3.33333291e-1f;
  float far = 1.0f - 2.0f / (tz_exp2(a * 2.88539008f) + 1.0f);
  return std::copysign(a < 0.625f ? a + a * (z * p) : far, x);
}
#if defined(__clang__)
#define tanhf tz_plain_tanh
#endif
// The exponential without a call, around which nothing stays in registers, to a unit in the last place (the library's
// vector form: 2.6): 2^n e^r, with (e^r - 1 - r) / r^2 by the coefficients of Sleef. Where nothing is left, and beyond
// the largest number, the last product says so.
TZ float tz_exp(float x) {
  const float c = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
  const float shifted = c * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;  // the first product is exact
  float p = 1.98527618e-4f;
  p = p * r + 1.39304355e-3f, p = p * r + 8.33336078e-3f, p = p * r + 4.16664854e-2f;
  p = p * r + 1.66666672e-1f, p = p * r + 0.5f;
  const float y = (r * r * p + r) + 1.0f;
  const int32_t k = tz_bits<int32_t>(shifted) - 0x4b400000, half = k >> 1;  // subnormal numbers take two steps
  return y * tz_bits<float>((uint32_t)(half + 127) << 23) * tz_bits<float>((uint32_t)(k - half + 127) << 23);
}
TZ double tz_exp(double x) { return exp(x); }
#if defined(TZ_VECTOR_MATH)
// Under other names: where both are wanted of one angle, GCC makes them one call, of which there is no vector form.
TZ_SIMD_NAMED(sin) TZ_SIMD_NAMED(cos)
#else
TZ float tz_sin(float x) { return sinf(x); }
TZ double tz_sin(double x) { return sin(x); }
TZ float tz_cos(float x) { return cosf(x); }
TZ double tz_cos(double x) { return cos(x); }
#endif

// The normal distribution function Phi, without a branch or a power, to an absolute error of 6e-8 (what 1 + erf is good
// for; its relative error is below 8e-5 to x = -5, and there is nothing left below -6.5): a fit to (1/2 - Phi(-a)) / a on
// [0, 1.25], and one to the square root of Phi(-a) on [1.25, 6.5], whose terms are added in pairs, since the processor
// waits for chains of them.
TZ float tz_ndtr(float x) {
  const float a = std::fabs(x), z = a * a, u = (a > 6.5f ? 6.5f : a) * 0.380952381f - 1.47619048f, v = u * u, w = v * v;
  const float near = a * (0.398942262f + z * (-0.0664899871f + z * (9.97150037e-3f + z * (-1.18270912e-3f
    + z * (1.10327106e-4f - z * 6.64476465e-6f)))));
  const float p0 = 7.30153173e-3f - 0.0393543616f * u, p2 = 0.0940965116f - 0.1262867f * u;
  const float p4 = 0.0939993635f - 0.0205416158f * u, p6 = -0.0301939398f + 0.0307510905f * u;
  const float p8 = -7.56630115e-3f - 7.1126027e-3f * u, p10 = 6.45143772e-3f - 2.59909255e-4f * u;
  const float p12 = -1.83128926e-3f + 2.88234383e-4f * u, p14 = 2.64940754e-4f;
  const float low = (p0 + p2 * v) + (p4 + p6 * v) * w, high = (p8 + p10 * v) + (p12 + p14 * v) * w, root = low + high * (w * w);
  const float tail = a < 1.25f ? 0.5f - near : a > 6.5f ? 0.0f : root * root;
  return x < 0 ? tail : 1 - tail;
}

#include "scalars.h"
template <class T> TZ T tz_approx_ndtr(T x) { return tz_ndtr(x); }  // which takes less than powers of 2

#define TZ_TYPES float, double, int64_t, int32_t, int16_t, int8_t, uint64_t, uint32_t, uint16_t, uint8_t, bool
#pragma omp declare reduction(tz_max : TZ_TYPES : omp_out = tz_max(omp_out, omp_in)) initializer(omp_priv = omp_orig)
#pragma omp declare reduction(tz_min : TZ_TYPES : omp_out = tz_min(omp_out, omp_in)) initializer(omp_priv = omp_orig)

// Blocked products. A panel holds the second operand as [k][TZ_N]; a tile of rows times a panel is kept in registers.
#if defined(__AVX512F__)
#define TZ_BYTES 64
#define TZ_ROWS 12
#elif defined(__AVX__)
#define TZ_BYTES 32
#define TZ_ROWS 6
#else
#define TZ_BYTES 16
#define TZ_ROWS 4
#endif
// `type` is for registers, which the compiler may keep on the stack, aligned; `memory` is what lies anywhere, and `bits`
// what are numbers of another type there.
template <class T> struct tz_vec {
  typedef T type __attribute__((vector_size(TZ_BYTES)));
  typedef T memory __attribute__((vector_size(TZ_BYTES), aligned(sizeof(T))));
  typedef T bits __attribute__((vector_size(TZ_BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int lanes = TZ_BYTES / sizeof(T);
};
template <class T> constexpr int tz_cols() { return 2 * tz_vec<T>::lanes; }

// Where step k of the second operand begins: in a panel, or in an image, whose steps are runs at places of their own.
template <class T> struct tz_image {
  const T* memory;
  const int64_t* at;
};
template <class T> TZ const T* tz_step(const T* panel, int64_t k) { return panel + k * tz_cols<T>(); }
template <class T> TZ const T* tz_step(tz_image<T> image, int64_t k) { return image.memory + image.at[k]; }

template <class T, int wide, int rows, class B> TZ void tz_tile(const T* a, int64_t am, int64_t ak, B b, int64_t kc, T* c, bool first) {
  using V = typename tz_vec<T>::type;
  using M = typename tz_vec<T>::memory;
  constexpr int L = tz_vec<T>::lanes;
  V acc[rows][wide];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < wide; j++) acc[i][j] = V{};  // a panel's sum starts at 0: shorter sums round less
  for (int64_t k = 0; k < kc; k++) {
    const T* step = tz_step<T>(b, k);
    V of_b[wide];
    for (int j = 0; j < wide; j++) of_b[j] = *(const M*)(step + j * L);
    for (int i = 0; i < rows; i++) {
      T x = a[i * am + k * ak];
      for (int j = 0; j < wide; j++) acc[i][j] += x * of_b[j];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < wide; j++) {
      M* to = (M*)(c + (i * 2 + j) * L);
      *to = first ? acc[i][j] : *to + acc[i][j];
    }
}
// c[m][TZ_N] (+)= a[m, k] * b[k][TZ_N] for m rows, of which the first vector suffices where there are no more `columns`.
template <class T, int64_t columns, class B> TZ_ONCE void tz_rows(const T* a, int64_t am, int64_t ak, B b, int64_t kc, T* c, int64_t m, bool first) {
  constexpr int N = tz_cols<T>(), wide = columns <= tz_vec<T>::lanes ? 1 : 2;
  int64_t i = 0;
  for (; i + TZ_ROWS <= m; i += TZ_ROWS) tz_tile<T, wide, TZ_ROWS>(a + i * am, am, ak, b, kc, c + i * N, first);
  if constexpr (TZ_ROWS > 8) for (; i + 8 <= m; i += 8) tz_tile<T, wide, 8>(a + i * am, am, ak, b, kc, c + i * N, first);
  for (; i + 4 <= m; i += 4) tz_tile<T, wide, 4>(a + i * am, am, ak, b, kc, c + i * N, first);
  for (; i + 2 <= m; i += 2) tz_tile<T, wide, 2>(a + i * am, am, ak, b, kc, c + i * N, first);
  for (; i < m; i++) tz_tile<T, wide, 1>(a + i * am, am, ak, b, kc, c + i * N, first);
}
// c[n] (+)= a[k] * image[k][n]: one row, several vectors of it at a time.
template <class T, int wide> TZ void tz_part(const T* a, int64_t ak, tz_image<T> image, int64_t kc, T* c, bool first) {
  using V = typename tz_vec<T>::type;
  using M = typename tz_vec<T>::memory;
  constexpr int L = tz_vec<T>::lanes;
  V acc[wide];
  for (int j = 0; j < wide; j++) acc[j] = V{};
  for (int64_t k = 0; k < kc; k++) {
    const T x = a[k * ak], *step = tz_step<T>(image, k);
    for (int j = 0; j < wide; j++) acc[j] += x * *(const M*)(step + j * L);
  }
  for (int j = 0; j < wide; j++) {
    M* to = (M*)(c + j * L);
    *to = first ? acc[j] : *to + acc[j];
  }
}
// Not inlined: where GCC sees who reads the sums, it keeps one of them in memory while they are added up.
template <class T> TZ_ONCE void tz_line(const T* a, int64_t, int64_t ak, tz_image<T> image, int64_t kc, T* c, int64_t n, bool first) {
  constexpr int L = tz_vec<T>::lanes;
  int64_t j = 0;
  for (; j + 8 * L <= n; j += 8 * L) tz_part<T, 8>(a, ak, {image.memory + j, image.at}, kc, c + j, first);
  for (; j + 4 * L <= n; j += 4 * L) tz_part<T, 4>(a, ak, {image.memory + j, image.at}, kc, c + j, first);
  for (; j < n; j += 2 * L) tz_part<T, 2>(a, ak, {image.memory + j, image.at}, kc, c + j, first);
}
// panel[k][j] = image[k][j]
template <class T> static inline void tz_pack_image(tz_image<T> image, T* panel, int64_t kc) {
  using M = typename tz_vec<T>::memory;
  constexpr int L = tz_vec<T>::lanes;
  for (int64_t k = 0; k < kc; k++) {
    const T* step = tz_step<T>(image, k);
    *(M*)(panel + k * 2 * L) = *(const M*)step;
    *(M*)(panel + k * 2 * L + L) = *(const M*)(step + L);
  }
}
// The first so many bytes and the last ones, copied: of no more than twice as many that is all.
template <int size> TZ void tz_ends(void* to, const void* from, int64_t bytes) {
  unsigned char first[size], last[size];
  memcpy(first, from, size), memcpy(last, (const unsigned char*)from + bytes - size, size);
  memcpy(to, first, size), memcpy((unsigned char*)to + bytes - size, last, size);
}
// A run of numbers, copied; it is short, most often.
template <class T> TZ void tz_run(T* to, const T* from, int64_t n) {
  using M = typename tz_vec<T>::memory;
  constexpr int L = tz_vec<T>::lanes;
  if (n >= L) {
    for (int64_t i = 0; i + L <= n; i += L) *(M*)(to + i) = *(const M*)(from + i);
    *(M*)(to + n - L) = *(const M*)(from + n - L);  // the rest, with some of what is there already
  } else if (const int64_t bytes = n * sizeof(T); bytes >= 32) {
    tz_ends<32>(to, from, bytes);
  } else if (bytes >= 16) {
    tz_ends<16>(to, from, bytes);
  } else if (bytes >= 8) {
    tz_ends<8>(to, from, bytes);
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
  }
}
// Two vectors in blocks of H lanes: the even blocks of both, or the odd ones.
template <int H, bool odd, class V, size_t... I> TZ V tz_blocks(V a, V b, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (int)(I & H ? L + (I & ~(size_t)H) + odd * H : I + odd * H)...);
#else
  return V{(I & H ? b[(I & ~(size_t)H) + odd * H] : a[I + odd * H])...};
#endif
}
// A square of L vectors, transposed: its quarters, then the quarters of these.
template <int H, class V, int L> TZ void tz_turn(V (&x)[L]) {
  if constexpr (H >= 1) {
    for (int i = 0; i < L; i++)
      if (!(i & H)) {
        V a = x[i], b = x[i + H];
        x[i] = tz_blocks<H, false>(a, b, std::make_index_sequence<L>());
        x[i + H] = tz_blocks<H, true>(a, b, std::make_index_sequence<L>());
      }
    tz_turn<H / 2>(x);
  }
}
// to[a][b] = from[b * stride + a], in rows of `wide`: a transposition, in squares of one vector, of bits.
template <int wide, class T> static inline void tz_across(const T* from, int64_t stride, T* to, int64_t na, int64_t nb) {
  using U = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  using V = typename tz_vec<U>::type;
  using M = typename tz_vec<U>::bits;
  constexpr int L = tz_vec<U>::lanes;
  int64_t a0 = 0;
  for (; a0 + L <= na; a0 += L) {
    int64_t b0 = 0;
    for (; b0 + L <= nb; b0 += L) {
      V square[L];
      for (int j = 0; j < L; j++) square[j] = *(const M*)(from + (b0 + j) * stride + a0);
      tz_turn<L / 2>(square);
      for (int k = 0; k < L; k++) *(M*)(to + (a0 + k) * wide + b0) = square[k];
    }
    for (; b0 < nb; b0++)
      for (int k = 0; k < L; k++) to[(a0 + k) * wide + b0] = from[b0 * stride + a0 + k];
  }
  for (; a0 < na; a0++)
    for (int64_t b = 0; b < nb; b++) to[a0 * wide + b] = from[b * stride + a0];
}
// So many numbers, converted.
template <int n, class T, class S> TZ void tz_cast_run(const S* from, T* to) {
  if constexpr (std::is_same_v<S, f16> && std::is_same_v<T, float>) tz_widen_run(from, to, n);
  else for (int i = 0; i < n; i++) to[i] = tz_cast<T>(from[i]);
}
// panel[k][j] = w[j * stride + k]: a transposition, in squares of one vector, converted on the way.
template <class T, class S> TZ_ONCE void tz_pack_transposed(const S* w, int64_t stride, T* panel, int64_t kc, int64_t n) {
  using V = typename tz_vec<T>::type;
  using M = typename tz_vec<T>::memory;
  constexpr int N = tz_cols<T>(), L = tz_vec<T>::lanes;
  int64_t k0 = 0;
  for (; k0 + L <= kc; k0 += L) {
    int64_t j0 = 0;
    for (; j0 + L <= n; j0 += L) {
      V square[L];
      for (int j = 0; j < L; j++) {
        T row[L];
        tz_cast_run<L>(w + (j0 + j) * stride + k0, row);
        square[j] = *(const M*)row;
      }
      tz_turn<L / 2>(square);
      for (int k = 0; k < L; k++) *(M*)(panel + (k0 + k) * N + j0) = square[k];
    }
    for (; j0 < N; j0++)
      for (int k = 0; k < L; k++) panel[(k0 + k) * N + j0] = j0 < n ? tz_cast<T>(w[j0 * stride + k0 + k]) : (T)0;
  }
  for (; k0 < kc; k0++)
    for (int64_t j = 0; j < N; j++) panel[k0 * N + j] = j < n ? tz_cast<T>(w[j * stride + k0]) : (T)0;
}
// panel[k][j] = w[k * stride + j]: rows as they lie, converted.
template <class T, class S> TZ_ONCE void tz_pack_rows(const S* w, int64_t stride, T* panel, int64_t kc, int64_t n) {
  constexpr int N = tz_cols<T>();
  for (int64_t k = 0; k < kc; k++) {
    if (n == N) tz_cast_run<N>(w + k * stride, panel + k * N);
    else for (int64_t j = 0; j < N; j++) panel[k * N + j] = j < n ? tz_cast<T>(w[k * stride + j]) : (T)0;
  }
}
