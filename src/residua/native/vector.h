/* A vector of LANES accumulators for the current T, A and ISA: VEC, and the few things kernels do with one.
 *
 * GCC's vector types are portable C to GCC and Clang: on AVX2 and AVX-512 a VEC is a register, elsewhere a pair of
 * them. Memory is read and written by memcpy, so that no pointer need be aligned. `*_part` takes the first n lanes,
 * n < LANES; the others are read as zero and not written.
 */
typedef A FN(vec) __attribute__((vector_size(BYTES)));
#undef VEC
#define VEC FN(vec)

/* What eight numbers need that are read and written as vectors. */
#undef EIGHT
#define EIGHT (LANES > 8 ? LANES : 8)

INLINE VEC FN(splat)(A x) {
    return x - (VEC){0};
}

#if defined(USE_AVX512) && !defined(USE_DOUBLE)
/* Its two halves, added. */
INLINE __m256 FN(folded)(VEC x) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
}
#endif

/* In the order of sums_of_8, so that equal vectors have equal sums: differences of such sums must vanish exactly. */
INLINE A FN(sum)(VEC x) {
#if defined(USE_AVX512) && defined(USE_DOUBLE)
    const __m256d half = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)x), _mm512_extractf64x4_pd((__m512d)x, 1));
    return (half[0] + half[1]) + (half[2] + half[3]);
#elif defined(USE_AVX512)
    const __m256 half = FN(folded)(x);
    return ((half[0] + half[1]) + (half[2] + half[3])) + ((half[4] + half[5]) + (half[6] + half[7]));
#elif LANES == 8
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#else
    return (x[0] + x[1]) + (x[2] + x[3]);
#endif
}

/* sums[i] = the sum of x[i], of eight vectors at once. */
INLINE void FN(sums_of_8)(const VEC *x, A *sums) {
#if (defined(USE_AVX2) || defined(USE_AVX512)) && !defined(USE_DOUBLE)
    __m256 pairs[4], fours[2];
    for (int i = 0; i < 4; i++) {
#ifdef USE_AVX512
        pairs[i] = _mm256_hadd_ps(FN(folded)(x[2 * i]), FN(folded)(x[2 * i + 1]));
#else
        pairs[i] = _mm256_hadd_ps((__m256)x[2 * i], (__m256)x[2 * i + 1]);
#endif
    }
    for (int i = 0; i < 2; i++) {
        fours[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
    }
    const __m256 low = _mm256_permute2f128_ps(fours[0], fours[1], 0x20);
    _mm256_storeu_ps(sums, low + _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
    for (int i = 0; i < 8; i++) {
        sums[i] = FN(sum)(x[i]);
    }
#endif
}

INLINE VEC FN(root)(VEC x) {
#if defined(USE_AVX512) && defined(USE_DOUBLE)
    return (VEC)_mm512_sqrt_pd((__m512d)x);
#elif defined(USE_AVX512)
    return (VEC)_mm512_sqrt_ps((__m512)x);
#elif defined(USE_AVX2) && !defined(USE_DOUBLE)
    return (VEC)_mm256_sqrt_ps((__m256)x);
#elif defined(USE_AVX2)
    return (VEC)_mm256_sqrt_pd((__m256d)x);
#else
    for (int i = 0; i < LANES; i++) {
        x[i] = (A)sqrt((double)x[i]);
    }
    return x;
#endif
}

typedef __typeof__((VEC){0} > (VEC){0}) FN(mask);

/* x where the mask is set, y elsewhere. */
INLINE VEC FN(either)(FN(mask) chosen, VEC x, VEC y) {
    return (VEC)((chosen & (FN(mask))x) | (~chosen & (FN(mask))y));
}

/* The larger of two numbers; the second, if one is NaN. */
INLINE VEC FN(larger)(VEC x, VEC y) {
#if defined(USE_AVX512) && defined(USE_DOUBLE)
    return (VEC)_mm512_max_pd((__m512d)x, (__m512d)y);
#elif defined(USE_AVX512)
    return (VEC)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(USE_AVX2) && !defined(USE_DOUBLE)
    return (VEC)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return FN(either)(x > y, x, y);
#endif
}

/* The largest of its numbers. */
INLINE A FN(most)(VEC x) {
    A found = x[0];
    for (int i = 1; i < LANES; i++) {
        found = x[i] > found ? x[i] : found;
    }
    return found;
}

/* exp for x <= 0. In float32 to two units in the last place; what underflows is some 1e-38, and NaN stays NaN. */
INLINE VEC FN(exponential)(VEC x) {
#ifndef USE_DOUBLE
    typedef int32_t whole __attribute__((vector_size(BYTES)));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest whole number in the low bits */
    x = FN(larger)(FN(splat)(-87.0f), x);
    VEC shifted = x * 1.44269504f + magic;
    VEC power = shifted - magic;
    VEC r = x - power * 0.693359375f; /* ln 2 in two parts */
    r = r + power * 2.12194440e-4f;
    VEC p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    whole exponent = ((whole)shifted - 0x4b400000 + 127) << 23;
    return p * (VEC)exponent;
#else
    for (int i = 0; i < LANES; i++) {
        x[i] = exp(x[i]);
    }
    return x;
#endif
}

/* Accumulators in memory: weights, statistics, scratch. */
INLINE VEC FN(load_wide)(const A *p) {
    VEC x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE VEC FN(load_wide_part)(const A *p, int64_t n) {
#if defined(USE_AVX512) && defined(USE_DOUBLE)
    return (VEC)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#elif defined(USE_AVX512)
    return (VEC)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    VEC x = {0};
    memcpy(&x, p, (size_t)n * sizeof(A));
    return x;
#endif
}

INLINE void FN(store_wide)(A *p, VEC x) {
    memcpy(p, &x, sizeof x);
}

INLINE void FN(store_wide_part)(A *p, VEC x, int64_t n) {
#if defined(USE_AVX512) && defined(USE_DOUBLE)
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)x);
#elif defined(USE_AVX512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
    memcpy(p, &x, (size_t)n * sizeof(A));
#endif
}

#ifdef USE_BFLOAT16

typedef uint16_t FN(half) __attribute__((vector_size(BYTES / 2)));
typedef uint32_t FN(bits) __attribute__((vector_size(BYTES)));

INLINE VEC FN(widen)(FN(half) x) {
#if defined(USE_AVX512) /* GCC does not find these for itself */
    return (VEC)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(USE_AVX2)
    return (VEC)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
    return (VEC)(__builtin_convertvector(x, FN(bits)) << 16);
#endif
}

/* bfloat16 in the lower halves of 32 bits. */
INLINE FN(bits) FN(rounded)(VEC x) {
    const FN(bits) bits = (FN(bits))x, high = bits >> 16;
    const FN(bits) nearest = (bits + 0x7fff + (high & 1)) >> 16;
    const FN(bits) quiet = high | 0x40; /* rounding could carry a NaN into an infinity */
#if defined(USE_AVX512) /* not avx512_bf16's conversion, which takes small numbers for zero */
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (FN(bits))_mm512_mask_blend_epi32(is_nan, (__m512i)nearest, (__m512i)quiet);
#elif defined(USE_AVX2)
    return (FN(bits))_mm256_blendv_ps((__m256)nearest, (__m256)quiet, _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q));
#else
    const FN(bits) is_nan = (FN(bits))(x != x);
    return (quiet & is_nan) | (nearest & ~is_nan);
#endif
}

INLINE FN(half) FN(narrow)(VEC x) {
#if defined(USE_AVX512)
    return (FN(half))_mm512_cvtepi32_epi16((__m512i)FN(rounded)(x));
#elif defined(USE_AVX2)
    const __m256i wide = (__m256i)FN(rounded)(x);
    return (FN(half))_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#else
    return __builtin_convertvector(FN(rounded)(x), FN(half));
#endif
}

INLINE VEC FN(load)(const T *p) {
    FN(half) x;
    memcpy(&x, p, sizeof x);
    return FN(widen)(x);
}

INLINE VEC FN(load_part)(const T *p, int64_t n) {
#ifdef USE_AVX512
    return FN(widen)((FN(half))_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
#else
    FN(half) x = {0};
    memcpy(&x, p, (size_t)n * sizeof(T));
    return FN(widen)(x);
#endif
}

INLINE void FN(store)(T *p, VEC x) {
    FN(half) narrow = FN(narrow)(x);
    memcpy(p, &narrow, sizeof narrow);
}

INLINE void FN(store_part)(T *p, VEC x, int64_t n) {
    FN(half) narrow = FN(narrow)(x);
#ifdef USE_AVX512
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)narrow);
#else
    memcpy(p, &narrow, (size_t)n * sizeof(T));
#endif
}

#else

INLINE VEC FN(load)(const T *p) {
    return FN(load_wide)(p);
}

INLINE VEC FN(load_part)(const T *p, int64_t n) {
    return FN(load_wide_part)(p, n);
}

INLINE void FN(store)(T *p, VEC x) {
    FN(store_wide)(p, x);
}

INLINE void FN(store_part)(T *p, VEC x, int64_t n) {
    FN(store_wide_part)(p, x, n);
}

#endif

/* n <= LANES numbers; with n known when compiling, one of the two branches is gone. */
INLINE VEC FN(load_some)(const T *p, int64_t n) {
    return n == LANES ? FN(load)(p) : FN(load_part)(p, n);
}

INLINE VEC FN(load_some_wide)(const A *p, int64_t n) {
    return n == LANES ? FN(load_wide)(p) : FN(load_wide_part)(p, n);
}

INLINE void FN(store_some)(T *p, VEC x, int64_t n) {
    if (n == LANES) {
        FN(store)(p, x);
    } else {
        FN(store_part)(p, x, n);
    }
}

INLINE void FN(store_some_wide)(A *p, VEC x, int64_t n) {
    if (n == LANES) {
        FN(store_wide)(p, x);
    } else {
        FN(store_wide_part)(p, x, n);
    }
}

/* Does a block for d = 0, LANES, ... below `width`, with n = LANES numbers at once and the rest of them at the end. */
#undef SWEEP
#define SWEEP(width, ...)                                                                                             \
    do {                                                                                                              \
        int64_t d = 0;                                                                                                \
        for (; d + LANES <= (width); d += LANES) {                                                                    \
            const int64_t n = LANES;                                                                                  \
            __VA_ARGS__                                                                                               \
        }                                                                                                             \
        if (d < (width)) {                                                                                            \
            const int64_t n = (width) - d;                                                                            \
            __VA_ARGS__                                                                                               \
        }                                                                                                             \
    } while (0)

/* Stores past the cache, for results that nobody reads soon. Only to pointers for which `can_stream` holds; a thread
 * that streamed ends its range with `stream_end`. In portable C these are plain stores. */
INLINE int FN(can_stream)(const T *p) {
    return ((uintptr_t)p & (LANES * sizeof(T) - 1)) == 0;
}

INLINE void FN(stream)(T *p, VEC x) {
#if defined(USE_AVX512) && defined(USE_BFLOAT16)
    _mm256_stream_si256((__m256i *)(void *)p, (__m256i)FN(narrow)(x));
#elif defined(USE_AVX512)
    _mm512_stream_si512((__m512i *)(void *)p, (__m512i)x);
#elif defined(USE_AVX2) && defined(USE_BFLOAT16)
    _mm_stream_si128((__m128i *)(void *)p, (__m128i)FN(narrow)(x));
#elif defined(USE_AVX2)
    _mm256_stream_si256((__m256i *)(void *)p, (__m256i)x);
#else
    FN(store)(p, x);
#endif
}

/* Whether rows of so many numbers from p on can be written by store_two as streams. */
INLINE int FN(can_stream_rows)(const T *p, int64_t width) {
    return (((uintptr_t)p | (uintptr_t)width * sizeof(T)) & (BYTES - 1)) == 0;
}

/* Two vectors that follow each other; in bfloat16 they are one, and rounded together. */
INLINE void FN(store_two)(const int streamed, T *p, VEC x, VEC y) {
#if defined(USE_AVX512) && defined(USE_BFLOAT16)
    const __m512i first = _mm512_castsi256_si512((__m256i)FN(narrow)(x));
    const __m512i both = _mm512_inserti64x4(first, (__m256i)FN(narrow)(y), 1);
    if (streamed) {
        _mm512_stream_si512((__m512i *)(void *)p, both);
    } else {
        _mm512_storeu_si512(p, both);
    }
#elif defined(USE_AVX2) && defined(USE_BFLOAT16)
    const __m256i mixed = _mm256_packus_epi32((__m256i)FN(rounded)(x), (__m256i)FN(rounded)(y));
    const __m256i both = _mm256_permute4x64_epi64(mixed, 0xd8); /* packing works on halves of a vector */
    if (streamed) {
        _mm256_stream_si256((__m256i *)(void *)p, both);
    } else {
        _mm256_storeu_si256((__m256i *)(void *)p, both);
    }
#else
    if (streamed) {
        FN(stream)(p, x);
        FN(stream)(p + LANES, y);
    } else {
        FN(store)(p, x);
        FN(store)(p + LANES, y);
    }
#endif
}

INLINE void FN(stream_end)(void) {
#if defined(USE_AVX2) || defined(USE_AVX512)
    _mm_sfence();
#endif
}
