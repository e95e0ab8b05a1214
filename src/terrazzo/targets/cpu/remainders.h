// Remainders of float32 in vectors: no library has them, and GCC is told that fmodf has, under the names of the ABI. A
// quotient in float64 of less than 2^28, cut, times the divisor is exact, and so is what is left of the dividend; that is
// a divisor too little where the quotient was rounded up. Where any lane has a larger quotient, or none, all are fmodf's.
#if defined(TZ_VECTOR_MATH) && !defined(TZ_REMAINDERS)
extern "C" __attribute__((simd("notinbranch"))) float fmodf(float, float) noexcept;
extern "C" float tz_plain_fmodf(float, float) noexcept __asm__("fmodf");  // which is not among those
template <int n> struct tz_lanes {
  typedef float singles __attribute__((vector_size(4 * n)));
  typedef double doubles __attribute__((vector_size(8 * n)));
  typedef int32_t wholes __attribute__((vector_size(4 * n)));
};
template <int n> TZ bool tz_remainders(const float* a, const float* b, float* r) {  // whether they are what is left
  typename tz_lanes<n>::singles x, y;
  memcpy(&x, a, sizeof x), memcpy(&y, b, sizeof y);
  using W = typename tz_lanes<n>::wholes;
  using D = typename tz_lanes<n>::doubles;
  const W sign = (W)x & (int32_t)0x80000000;
  using S = typename tz_lanes<n>::singles;
  const D over = __builtin_convertvector((S)((W)x & 0x7fffffff), D), by = __builtin_convertvector((S)((W)y & 0x7fffffff), D);
  const D q = over / by, below = over - __builtin_convertvector(__builtin_convertvector(q, W), D) * by;
  const D left = below < 0 ? below + by : below;
  const W found = __builtin_convertvector((q < 268435456.0) & (left >= 0) & (left < by), W);
  x = (S)((W)__builtin_convertvector(left, S) | sign);
  memcpy(r, &x, sizeof x);
  int64_t each[n / 2], all = -1;
  memcpy(each, &found, sizeof found);
  for (int i = 0; i < n / 2; i++) all &= each[i];
  return all == -1;
}
template <int n> TZ typename tz_lanes<n>::singles tz_fmods(typename tz_lanes<n>::singles x, typename tz_lanes<n>::singles y) {
#if defined(__AVX512F__)
  constexpr int lanes = n < 8 ? n : 8;  // float64 that a vector has
#else
  constexpr int lanes = n < 4 ? n : 4;
#endif
  float a[n], b[n], r[n];
  memcpy(a, &x, sizeof a), memcpy(b, &y, sizeof b);
  for (int k = 0; k < n; k += lanes)
    if (!tz_remainders<lanes>(a + k, b + k, r + k))
      for (int i = k; i < k + lanes; i++) r[i] = tz_plain_fmodf(a[i], b[i]);
  memcpy(&x, r, sizeof r);
  return x;
}
#define TZ_REMAINDERS(letter, n)                                                                      \
  extern "C" __attribute__((visibility("hidden"))) tz_lanes<n>::singles _ZGV##letter##N##n##vv_fmodf( \
    tz_lanes<n>::singles a, tz_lanes<n>::singles b) { return tz_fmods<n>(a, b); }
TZ_REMAINDERS(b, 4)
#if defined(__AVX__)
TZ_REMAINDERS(c, 8)
#endif
#if defined(__AVX2__)
TZ_REMAINDERS(d, 8)
#endif
#if defined(__AVX512F__)
TZ_REMAINDERS(e, 16)
#endif
#endif
