/* Which variant runs: the one asked for, or AVX2 where the processor has it, and portable C elsewhere.
 *
 * AVX-512 is the rule only for the loops that ask for it by `residua_wide_variant`. On the processors that it was
 * measured on, which do a vector of 512 bits as two of 256, it multiplies no faster; what it has is twice the
 * registers and half the instructions. The rule is no measurement at first use, since numbers must not depend on what
 * else a machine was doing then.
 */
#include "kernels.h"

static volatile int asked = -1;

/* The most that the processor can run. */
EXPORT int residua_instructions_most(void) {
#ifdef RESIDUA_X86
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return RESIDUA_PORTABLE;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq")) {
        return RESIDUA_AVX512;
    }
    return RESIDUA_AVX2;
#else
    return RESIDUA_PORTABLE;
#endif
}

/* Those in use. */
EXPORT int residua_instructions(void) {
    if (asked >= 0) {
        return asked;
    }
    const int most = residua_instructions_most();
    return most < RESIDUA_AVX2 ? most : RESIDUA_AVX2;
}

/* Those asked for, or -1. */
EXPORT int residua_instructions_asked(void) {
    return asked;
}

/* Use these from now on, or with -1 those of the rule; more than the processor can run are not taken. */
EXPORT int residua_use_instructions(int which) {
    if (which > residua_instructions_most()) {
        return 0;
    }
    asked = which;
    return 1;
}

/* The sources this library was built from, so that a stale binary is not taken for a fresh one. */
EXPORT const char *residua_fingerprint(void) {
#ifdef RESIDUA_FINGERPRINT
    return RESIDUA_FINGERPRINT;
#else
    return "";
#endif
}

int residua_variant(int type) {
    return type + residua_instructions() * RESIDUA_TYPES;
}

int residua_wide_variant(int type) {
    return type + (asked >= 0 ? asked : residua_instructions_most()) * RESIDUA_TYPES;
}
