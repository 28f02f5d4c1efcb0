/* Which variant runs: AVX2 with FMA where the processor has both, portable C elsewhere or where it is asked for. */
#include "kernels.h"

static volatile int forced_portable = 0;

static int has_avx2(void) {
#ifdef RESIDUA_X86
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

/* 1 if the AVX2 variants run. */
EXPORT int residua_avx2(void) {
    return !forced_portable && has_avx2();
}

/* For tests: run the portable variants although the processor has AVX2. */
EXPORT void residua_force_portable(int on) {
    forced_portable = on;
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
    return type + (residua_avx2() ? RESIDUA_TYPES : 0);
}
