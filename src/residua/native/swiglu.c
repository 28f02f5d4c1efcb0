/* y = silu(a) b,   silu(a) = a s, s = 1 / (1 + exp(-a)), number by number.
 *
 *     da = g b s (1 + a (1 - s))     db = g a s
 *
 * A row of work is SWIGLU_BLOCK numbers.
 */
#ifdef T

/* 1 / (1 + exp(-x)), from exp(-|x|), which cannot overflow. */
INLINE VEC FN(sigmoid)(VEC x) {
    const VEC power = FN(exponential)(-FN(larger)(x, -x)), share = 1 / (1 + power);
    return FN(either)(x > 0, share, power * share);
}

static void FN(swiglu)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const swiglu_work *work = argument;
    const int64_t from = begin * SWIGLU_BLOCK, to = end * SWIGLU_BLOCK;
    const int64_t count = (to < work->numbers ? to : work->numbers) - from;
    const T *a = (const T *)work->a + from, *b = (const T *)work->b + from;
    T *out = (T *)work->out + from;
    SWEEP(count, {
        const VEC x = FN(load_some)(a + d, n);
        FN(store_some)(out + d, x * FN(sigmoid)(x) * FN(load_some)(b + d, n), n);
    });
}

static void FN(swiglu_backward)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const swiglu_work *work = argument;
    const int64_t from = begin * SWIGLU_BLOCK, to = end * SWIGLU_BLOCK;
    const int64_t count = (to < work->numbers ? to : work->numbers) - from;
    const T *a = (const T *)work->a + from, *b = (const T *)work->b + from, *g = (const T *)work->out + from;
    T *da = work->grad_a ? (T *)work->grad_a + from : NULL, *db = work->grad_b ? (T *)work->grad_b + from : NULL;
    SWEEP(count, {
        const VEC x = FN(load_some)(a + d, n);
        const VEC pull = FN(load_some)(g + d, n);
        const VEC share = FN(sigmoid)(x);
        if (da) {
            FN(store_some)(da + d, pull * FN(load_some)(b + d, n) * share * (1 + x * (1 - share)), n);
        }
        if (db) {
            FN(store_some)(db + d, pull * x * share, n);
        }
    });
}

#else

#include "kernels.h"

enum { SWIGLU_BLOCK = 1024 };

typedef struct {
    const void *a, *b;
    void *out;             /* the result, or its gradient */
    void *grad_a, *grad_b; /* NULL where not wanted */
    int64_t numbers;
} swiglu_work;

#define KERNEL "swiglu.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(swiglu);
static const range_function backward[] = VARIANTS(swiglu_backward);

EXPORT int residua_swiglu(int type, int threads, const void *a, const void *b, void *out, int64_t numbers) {
    swiglu_work work = {.a = a, .b = b, .out = out, .numbers = numbers};
    residua_parallel(forward[residua_variant(type)], &work, (numbers + SWIGLU_BLOCK - 1) / SWIGLU_BLOCK, threads);
    return RESIDUA_OK;
}

EXPORT int residua_swiglu_backward(int type, int threads, const void *a, const void *b, const void *gradient,
                                   void *grad_a, void *grad_b, int64_t numbers) {
    swiglu_work work = {.a = a, .b = b, .out = (void *)gradient, .grad_a = grad_a, .grad_b = grad_b,
                        .numbers = numbers};
    residua_parallel(backward[residua_variant(type)], &work, (numbers + SWIGLU_BLOCK - 1) / SWIGLU_BLOCK, threads);
    return RESIDUA_OK;
}

#endif
