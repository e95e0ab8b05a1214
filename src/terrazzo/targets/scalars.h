// The scalar functions that C++ and CUDA lack, shared by both. Our own code only.
// Whoever includes this has tz_widen and tz_narrow_* for 16-bit floats, tz_to_odd, tz_from_float and TZ.
template <class To, class From> TZ To tz_cast(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (tz_half<From>) return tz_cast<To>(tz_widen(x));
  else if constexpr (tz_half<To>) {
    float f;
    if constexpr (std::is_same_v<From, double>) f = tz_to_odd(x);
    else f = tz_cast<float>(x);
    if constexpr (std::is_same_v<To, f16>) return tz_narrow_f16(f);
    else return tz_narrow_bf16(f);
  }
  else if constexpr (std::is_same_v<To, bool>) return x != (From)0;
  else if constexpr (std::is_same_v<From, bool> && std::is_floating_point_v<To>) return x ? (To)1 : (To)0;  // GCC 12 has no vectors of the conversion
  else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) return tz_from_float<To>(x);
  else return (To)x;
}

// Integers wrap. In C++ only unsigned ones do; below 64 bits there is a wider type to compute in.
template <class T> using tz_wrap = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <class T> TZ T tz_add(T a, T b) { return (T)((tz_wrap<T>)a + (tz_wrap<T>)b); }
template <class T> TZ T tz_sub(T a, T b) { return (T)((tz_wrap<T>)a - (tz_wrap<T>)b); }
template <class T> TZ T tz_mul(T a, T b) { return (T)((tz_wrap<T>)a * (tz_wrap<T>)b); }
template <class T> TZ T tz_neg(T a) { return (T)(0 - (tz_wrap<T>)a); }
// The one of two numbers is known before it is asked for NaN, so that GCC has instructions for both and no branches: the
// least of 8 numbers in a row takes a fourteenth.
template <class T> TZ T tz_min(T a, T b) {
  const T least = a < b ? a : b;
  if constexpr (std::is_floating_point_v<T>) return a != a ? a : least;
  else return least;
}
template <class T> TZ T tz_max(T a, T b) {
  const T most = a > b ? a : b;
  if constexpr (std::is_floating_point_v<T>) return a != a ? a : most;
  else return most;
}
// The least and the largest of numbers, as fmin and fmax have them, which GCC has no vectors of.
template <class T> TZ T tz_fmin(T a, T b) { const T least = a < b ? a : b; return b != b ? a : least; }
template <class T> TZ T tz_fmax(T a, T b) { const T most = a > b ? a : b; return b != b ? a : most; }
// The smallest number of 16 bits is its own absolute value. ptxas of CUDA 13.0 has abs.s16 in 32 bits and compares 32768.
template <class T> TZ T tz_abs(T x) {
  if constexpr (std::is_floating_point_v<T>) return std::fabs(x);
  else if constexpr (std::is_unsigned_v<T>) return x;
  else if constexpr (sizeof(T) < 4) { const int y = x; return (T)(y < 0 ? -y : y); }
  else return x < 0 ? tz_neg(x) : x;
}
template <class T> TZ T tz_sign(T x) { if constexpr (std::is_floating_point_v<T>) return x != x ? x : (T)((x > 0) - (x < 0)); else return (T)((x > 0) - (x < 0)); }
template <class T> TZ T tz_not(T x) { if constexpr (std::is_same_v<T, bool>) return !x; else return (T)~x; }
// Integer division by zero and of the smallest number by -1 would trap: 0 and wrapping, as numpy has it.
template <class T> TZ T tz_truncdiv(T a, T b) { if (b == 0) return 0; if constexpr (std::is_signed_v<T>) if (b == -1) return tz_neg(a); return (T)(a / b); }
template <class T> TZ T tz_rem(T a, T b) { if (b == 0) return 0; if constexpr (std::is_signed_v<T>) if (b == -1) return 0; return (T)(a % b); }
template <class T> TZ T tz_floordiv(T a, T b) { T q = tz_truncdiv(a, b), r = tz_rem(a, b); return (T)(q - (r != 0 && ((r < 0) != (b < 0)))); }
template <class T> TZ T tz_fmod(T a, T b) { if constexpr (std::is_floating_point_v<T>) return std::fmod(a, b); else return tz_rem(a, b); }
template <class T> TZ T tz_mod(T a, T b) {
  T r = tz_fmod(a, b);
  if constexpr (std::is_floating_point_v<T>) {
    const T zero = std::copysign((T)0, b), next = r + b, found = (r < 0) != (b < 0) ? next : r;
    return r != 0 ? found : zero;
  } else return (T)(r != 0 && ((r < 0) != (b < 0)) ? r + b : r);
}
template <class T> TZ T tz_gcd(T a, T b) { while (b != 0) { T r = tz_rem(a, b); a = b; b = r; } return tz_abs(a); }
template <class T> TZ T tz_shl(T a, T b) { return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)0 : (T)((std::make_unsigned_t<T>)a << b); }
template <class T> TZ T tz_shr(T a, T b) { return b < 0 || b >= (T)(8 * sizeof(T)) ? (a < 0 ? (T)-1 : (T)0) : (T)(a >> b); }
template <class T> TZ T tz_ipow(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? (b % 2 == 0 ? (T)1 : (T)-1) : (T)0;
  T out = 1;
  for (T n = b; n; n = (T)(n >> 1)) { if (n & 1) out = tz_mul(out, a); a = tz_mul(a, a); }
  return out;
}
TZ double tz_ndtr(double x) { return 0.5 * erfc(x * -0.70710678118654752440); }
// Sine and, a quarter turn `on`, cosine where |x| is below TZ_NEAR, to two units in the last place: x less a multiple of pi/2, of which there are
// three parts, and a polynomial for what is left.
constexpr float TZ_NEAR = 48039;
TZ float tz_sine_near(float x, int on) {
  float j = fmaf(x, 0.636619747f, 12582912.0f) - 12582912.0f;
  float r = fmaf(j, -1.57079637f, x);
  r = fmaf(j, 4.37113900e-8f, r), r = fmaf(j, 1.71509937e-15f, r);
  float z = r * r;
  float s = fmaf(fmaf(fmaf(z, -1.9516656e-4f, 8.332173e-3f), z, -1.6666655e-1f), r * z, r);
  float c = fmaf(fmaf(fmaf(fmaf(z, 2.443773e-5f, -1.3887362e-3f), z, 4.1666646e-2f), z, -0.5f), z, 1.0f);
  int quarter = (int)j + on;
  float y = quarter & 1 ? c : s;
  return x == 0 && !on ? x : quarter & 2 ? -y : y;
}
// 1 / sqrt(x), both rounded to nearest, without a branch: what a GPU does with its approximations `root` of 1 / sqrt and `inverse` of 1 / x to round
// either of them, on numbers that are large enough for it; smaller ones are 2^64 times as large meanwhile. Where that finds no number (of 0, of
// infinity, of what is negative and of what is none) the approximation is exact.
template <class Root, class Inverse> TZ float tz_rsqrt_from(float x, Root root, Inverse inverse) {
  bool small = x < 0x1p-101f;
  float s = x * (small ? 0x1p64f : 1.0f), r = root(s), g = s * r;
  float y = fmaf(fmaf(-g, g, s), 0.5f * r, g), p = inverse(y);
  float found = fmaf(p, -fmaf(y, p, -1.0f), p) * (small ? 0x1p32f : 1.0f);
  return found == found ? found : r;
}
