/* Includes the file named by KERNEL once per element type, in portable C and, on x86, for AVX2 with FMA and for AVX-512.
 *
 * The last two are compiled for their instructions by attribute, not by flag: the rest of the library runs on any
 * processor.
 */
#include "kernels.h"

#ifdef RESIDUA_X86
#include <immintrin.h>
#endif

#define JOIN_(name, type, isa) name##_##type##_##isa
#define JOIN(name, type, isa) JOIN_(name, type, isa)
#define FN(name) JOIN(name, TYPE, ISA)

/* Where the two others exist, hardly a processor runs this one: a fifth of the build's time goes if it is optimised less. */
#if defined(RESIDUA_X86) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
#define BYTES 32
#define ISA base
#include "types.h"
#undef ISA
#if defined(RESIDUA_X86) && !defined(__clang__)
#pragma GCC pop_options
#endif

#ifdef RESIDUA_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ISA avx2
#define USE_AVX2 1
#include "types.h"
#undef USE_AVX2
#undef ISA
#undef BYTES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")
#endif
#define BYTES 64
#define ISA avx512
#define USE_AVX512 1
#include "types.h"
#undef USE_AVX512
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#undef BYTES
#undef KERNEL
