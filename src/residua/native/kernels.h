/* What every kernel file shares: codes that Python passes, threads over ranges of rows, the choice of instructions.
 *
 * A kernel file has two halves. Included through variants.h, which comes once per element type and instruction set,
 * it defines its inner loops under FN(name); compiled by itself, it exports entry points that pick one of them:
 *
 *     #ifdef T
 *     static void FN(scale)(void *work, int64_t begin, int64_t end, int part) { ... load, store, splat ... }
 *     #else
 *     #define KERNEL "scale.c"
 *     #include "variants.h"
 *     static const range_function scale[] = VARIANTS(scale);
 *     EXPORT int residua_scale(int type, int threads, ...) {
 *         residua_parallel(scale[residua_variant(type)], &work, rows, threads);
 *         return RESIDUA_OK;
 *     }
 *     #endif
 *
 * Pointers may have any alignment, widths any value; a row is contiguous. Entry points return a RESIDUA_ code.
 */
#ifndef RESIDUA_KERNELS_H
#define RESIDUA_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))

/* Element types; the order is that of VARIANTS and of `library.TYPES`. */
enum { RESIDUA_FLOAT32, RESIDUA_FLOAT64, RESIDUA_BFLOAT16, RESIDUA_TYPES };

/* Instructions, from the least on; the order is that of VARIANTS and of `library.INSTRUCTIONS`. */
enum { RESIDUA_PORTABLE, RESIDUA_AVX2, RESIDUA_AVX512 };

/* Answers; `library.check` turns all but the first into errors. */
enum { RESIDUA_OK, RESIDUA_NO_MEMORY };

/* Does rows begin to end; `part` counts the ranges of one call from 0, for scratch that threads must not share. */
typedef void (*range_function)(void *work, int64_t begin, int64_t end, int part);

/* Cut rows into at most `threads` ranges of nearly equal length and do them at once; returns when all are done. */
void residua_parallel(range_function function, void *work, int64_t rows, int threads);

/* Where the variant of an element type stands in VARIANTS, for the instructions in use. */
int residua_variant(int type);

/* The same for an inner loop that is faster by AVX-512, even where a vector of it is computed as two. */
int residua_wide_variant(int type);

/* RESIDUA_NO_X86 leaves out what is for x86, as on any other processor: for tests. */
#if (defined(__x86_64__) || defined(__i386__)) && !defined(RESIDUA_NO_X86)
#define RESIDUA_X86 1
#endif

/* The variants of an inner loop, in order; WIDE_VARIANTS for one that has none for bfloat16. */
#ifdef RESIDUA_X86
#define VARIANTS(name)                                                          \
    { name##_f32_base, name##_f64_base, name##_bf16_base,                       \
      name##_f32_avx2, name##_f64_avx2, name##_bf16_avx2,                       \
      name##_f32_avx512, name##_f64_avx512, name##_bf16_avx512 }
#define WIDE_VARIANTS(name)                                                     \
    { name##_f32_base, name##_f64_base, NULL, name##_f32_avx2, name##_f64_avx2, \
      NULL, name##_f32_avx512, name##_f64_avx512, NULL }
#else
#define VARIANTS(name) { name##_f32_base, name##_f64_base, name##_bf16_base }
#define WIDE_VARIANTS(name) { name##_f32_base, name##_f64_base, NULL }
#endif

#endif
