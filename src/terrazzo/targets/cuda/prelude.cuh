// What every CUDA kernel may use: element types, conversions, addresses. Functions of instructions come with their records. Our own code only; no header is needed.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using f32 = float;
using f64 = double;
// 16-bit floats are for storage only, arithmetic is in f32: types of their own, so that nothing takes them for numbers.
enum class f16 : u16 {};
enum class bf16 : u16 {};
using int32_t = i32;
using uint32_t = u32;
using int64_t = i64;
using uint64_t = u64;
#define INT64_MIN (-9223372036854775807LL - 1)
#define TZ static __device__ __forceinline__

// The kernel before this one in its stream may still run: what it wrote is there from here on, and the next one may be
// launched, which waits here likewise. Always true, which the compiler does not know: it would read some memory before.
TZ bool tz_begins() {
#if __CUDA_ARCH__ >= 900
  u32 blocks;
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;\n mov.u32 %0, %%nctaid.x;" : "=r"(blocks) :: "memory");
  return blocks;
#else
  return true;
#endif
}

// What is loaded before is asked for before anything behind it is computed.
TZ void tz_asked() { asm volatile("" ::: "memory"); }

namespace std {  // the few of its templates that scalars.h needs
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
template <class A> constexpr bool is_floating_point_v = is_same_v<A, float> || is_same_v<A, double>;
template <class A> constexpr bool is_unsigned_v = is_same_v<A, u8> || is_same_v<A, u16> || is_same_v<A, u32> || is_same_v<A, u64> || is_same_v<A, bool>;
template <class A> constexpr bool is_signed_v = !is_unsigned_v<A>;
template <class A> using make_unsigned_t = conditional_t<sizeof(A) == 1, u8, conditional_t<sizeof(A) == 2, u16, conditional_t<sizeof(A) == 4, u32, u64>>>;
template <class A> constexpr bool is_integral_v = !is_floating_point_v<A>;
TZ float fabs(float x) { return ::fabsf(x); }
TZ double fabs(double x) { return ::fabs(x); }
TZ float fmod(float a, float b) { return ::fmodf(a, b); }
TZ double fmod(double a, double b) { return ::fmod(a, b); }
TZ float copysign(float a, float b) { return ::copysignf(a, b); }
TZ double copysign(double a, double b) { return ::copysign(a, b); }
template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  TZ float infinity() { return __int_as_float(0x7f800000); }
  TZ float quiet_NaN() { return __int_as_float(0x7fffffff); }
};
template <> struct numeric_limits<double> {
  TZ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
  TZ double quiet_NaN() { return __longlong_as_double(0x7fffffffffffffffLL); }
};
}  // namespace std

TZ float tz_widen(bf16 x) { return __uint_as_float((u32)x << 16); }
TZ float tz_widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x)); return y; }
TZ f16 tz_narrow_f16(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return (f16)y; }
TZ bf16 tz_cut_bf16(float x) { return (bf16)(u16)(__float_as_uint(x) >> 16); }
TZ bf16 tz_narrow_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return (bf16)y;
#else
  u32 u = __float_as_uint(x);
  return (bf16)(u16)(x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}
// To bf16 and back. The conversion of two, of which the lower one is 0, is one instruction of the usual rate.
TZ float tz_round_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(0.0f));
  return __uint_as_float(y);
#else
  return tz_widen(tz_narrow_bf16(x));
#endif
}
// Two numbers of 16 bits at once. With a byte as its lower half 0x4300 is 128 more than that; a sign is worth -256 there.
#if __CUDA_ARCH__ >= 900
TZ u32 tz_two_add(u32 a, u32 b) { u32 y; asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
TZ u32 tz_two_sub(u32 a, u32 b) { u32 y; asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
TZ u32 tz_two_mul(u32 a, u32 b) { u32 y; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
#else
TZ float tz_low(u32 x) { return __uint_as_float(x << 16); }
TZ float tz_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
TZ u32 tz_two(float low, float high) { return (u32)(u16)tz_narrow_bf16(low) | (u32)(u16)tz_narrow_bf16(high) << 16; }
TZ u32 tz_two_add(u32 a, u32 b) { return tz_two(tz_low(a) + tz_low(b), tz_high(a) + tz_high(b)); }
TZ u32 tz_two_sub(u32 a, u32 b) { return tz_two(tz_low(a) - tz_low(b), tz_high(a) - tz_high(b)); }
TZ u32 tz_two_mul(u32 a, u32 b) { return tz_two(tz_low(a) * tz_low(b), tz_high(a) * tz_high(b)); }
#endif
template <class T> TZ u32 tz_two_bytes(const T& first) { return __byte_perm(reinterpret_cast<const u16&>(first), 0, 0x4140); }
TZ u32 tz_two_same(bf16 x) { return (u32)(u16)x * 0x10001u; }
// One instruction, where the compiler has two: it takes one constant at a time.
template <u32 bits, u32 more> TZ u32 tz_masked(u32 x) { u32 y; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(bits), "r"(more)); return y; }
template <u32 bits> TZ u32 tz_two_small(u32 x, u32 more) { return tz_two_add(tz_masked<bits, 0x43004300u>(x), more); }
TZ u32 tz_two_signed(u32 x) { return tz_two_add(tz_masked<0x007f007fu, 0x43004300u>(x), tz_masked<0x00800080u, 0xc300c300u>(x)); }
template <class T> constexpr bool tz_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
#define TZ_COMPARE(op) \
  TZ bool operator op(f16 a, f16 b) { return tz_widen(a) op tz_widen(b); } \
  TZ bool operator op(bf16 a, bf16 b) { return tz_widen(a) op tz_widen(b); }
TZ_COMPARE(==) TZ_COMPARE(!=) TZ_COMPARE(<) TZ_COMPARE(<=) TZ_COMPARE(>) TZ_COMPARE(>=)

// A float rounded to odd keeps what a second rounding to a narrower type must know.
TZ float tz_to_odd(double x) {
  float f = (float)x;
  u32 u = __float_as_uint(f);
  bool inexact = (double)f != x && x == x && !(u & 1u), away = fabs((double)f) > fabs(x);
  return __uint_as_float(inexact ? (away ? u - 1 : u + 1) : u);
}
#if __CUDA_ARCH__ >= 800  // one instruction for a comparison, a test for NaN and two selections
TZ float tz_fmin(float a, float b) { return ::fminf(a, b); }
TZ float tz_fmax(float a, float b) { return ::fmaxf(a, b); }
TZ double tz_fmin(double a, double b) { return ::fmin(a, b); }
TZ double tz_fmax(double a, double b) { return ::fmax(a, b); }
TZ float tz_min(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
TZ float tz_max(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
#endif
TZ float tz_rounded_mul(float a, float b) { return __fmul_rn(a, b); }
TZ double tz_rounded_mul(double a, double b) { return __dmul_rn(a, b); }
TZ float tz_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ float tz_approx_div(float a, float b) { float y; asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
TZ double tz_approx_div(double a, double b) { return a / b; }
TZ float tz_approx_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ double tz_approx_exp2(double x) { return exp2(x); }
TZ float tz_approx_log2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ double tz_approx_log2(double x) { return log2(x); }
TZ float tz_approx_sqrt(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ double tz_approx_sqrt(double x) { return sqrt(x); }
TZ float tz_approx_logistic(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + tz_approx_exp2(x))); return y; }
TZ double tz_approx_logistic(double x) { return 1.0 / (1.0 + exp2(x)); }
template <class To, class From> TZ To tz_from_float(From x) {
  if constexpr (sizeof(To) <= 2) return (To)(i32)x;
  else return (To)x;
}
template <class T> TZ bool tz_signbit(T x) {
  if constexpr (sizeof(T) == 2) return (u16)x >> 15;
  else if constexpr (sizeof(T) == 4) return __float_as_uint(x) >> 31;
  else return (u64)__double_as_longlong(x) >> 63;
}
// Whole numbers in the order of floats: both zeros are one, and NaN is the largest.
TZ i32 tz_order(float x) {
  i32 bits = __float_as_int(x + 0.0f);
  return x != x ? 0x7fffffff : bits ^ (bits >> 31 & 0x7fffffff);
}
TZ i64 tz_order(double x) {
  i64 bits = __double_as_longlong(x + 0.0);
  return x != x ? 0x7fffffffffffffff : bits ^ (bits >> 63 & 0x7fffffffffffffff);
}

// An index that came from data: out of range is noted, and reads element 0.
TZ i64 tz_at(i64 i, i64 extent, int* bad) {
  bool outside = (u64)i >= (u64)extent;
  if (outside) *bad = 1;
  return outside ? 0 : i;
}
template <class T> TZ T tz_fdiv(T a, i64 b) { T q = (T)(a / b); return (T)(q - (a % b < 0)); }
template <class T> TZ T tz_fmod_index(T a, i64 b) { T r = (T)(a % b); return r < 0 ? (T)(r + b) : r; }

#include "scalars.h"
// Phi in half as many multiplications as its float needs, to 2^-17 of it from -6 on: a fit on [0, 6]. Below that it goes to 0.
TZ float tz_approx_ndtr(float x) {
  float a = std::fabs(x), p = 1.79377992e-6f;
  p = fmaf(p, a, -6.07261536e-5f), p = fmaf(p, a, 9.23185667e-4f), p = fmaf(p, a, -8.47684685e-3f);
  p = fmaf(p, a, 0.0538909398f), p = fmaf(p, a, 0.458541572f), p = fmaf(p, a, 1.15121436f);
  float tail = tz_exp2(fmaf(-a, p, -1.0f));
  return x < 0 ? tail : 1 - tail;
}
TZ double tz_approx_ndtr(double x) { return tz_ndtr(x); }
// The normal distribution function Phi, without a branch, to an absolute error of 6.1e-8 (what 1 + erf is good for; its relative error is below
// 3e-5 to x = -5). A fit to -log2(2 Phi(-a)) / a on [0, 9]; the first coefficient's sign keeps the tail going to 0 beyond.
TZ float tz_ndtr(float x) {
  float a = std::fabs(x), p = 1.16174785e-10f;
  p = fmaf(p, a, -6.18802298e-9f), p = fmaf(p, a, 1.45385741e-7f), p = fmaf(p, a, -1.98276689e-6f);
  p = fmaf(p, a, 1.72926684e-5f), p = fmaf(p, a, -9.83098435e-5f), p = fmaf(p, a, 3.26355686e-4f), p = fmaf(p, a, -6.00820531e-5f);
  p = fmaf(p, a, -6.90329773e-3f), p = fmaf(p, a, 0.0524257049f), p = fmaf(p, a, 0.459222764f), p = fmaf(p, a, 1.15110421f);
  float tail = 0.5f * tz_exp2(-a * p);
  return x < 0 ? tail : 1 - tail;
}
// What is far is rare, and its code long: where a thread has a hundred sines, one copy of it for each takes ptxas minutes.
static __device__ __noinline__ float tz_sin_far(float x) { return sinf(x); }
static __device__ __noinline__ float tz_cos_far(float x) { return cosf(x); }
TZ float tz_sin(float x) { return fabsf(x) < TZ_NEAR ? tz_sine_near(x, 0) : tz_sin_far(x); }
TZ float tz_cos(float x) { return fabsf(x) < TZ_NEAR ? tz_sine_near(x, 1) : tz_cos_far(x); }
TZ double tz_sin(double x) { return sin(x); }
// A division and a root of their own have a branch each, behind which the rare cases are: an epilogue that normalises has 64 of both in a thread,
// which ptxas takes seconds for.
TZ float tz_root(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ float tz_inverse(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TZ float tz_rsqrt(float x) { return tz_rsqrt_from(x, tz_root, tz_inverse); }
TZ double tz_rsqrt(double x) { return 1.0 / sqrt(x); }
TZ float tz_exp(float x) { return expf(x); }
TZ double tz_exp(double x) { return exp(x); }
TZ double tz_cos(double x) { return cos(x); }

// What the driver encodes of a tensor and a box of it.
struct alignas(64) TensorMap { u8 bytes[128]; };

TZ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The byte offset with bits 4.. exchanged by those three above: conflict-free rows of `span` bytes (0: as it is).
template <int span> TZ int swizzle(int offset) {
  if constexpr (span == 0) return offset;
  else return offset ^ ((offset >> 3) & (span - 16));
}
