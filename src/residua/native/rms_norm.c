/* y = x r gain,   r = 1 / sqrt(<x, x> / d + eps), for rows of d numbers; the gain is one of them, or none.
 *
 *     h = g gain     dx = r h - x r^3 <h, x> / d     dgain = sum over rows of g x r
 *
 * A row is read twice, the second time out of the first-level cache. The gain and its gradient are of the accumulation type.
 */
#ifdef T

static void FN(rms_norm)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const norm_work *work = argument;
    const int64_t width = work->width;
    const A *gain = work->gain;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)work->x + row * width;
        T *out = (T *)work->out + row * width;
        VEC squares = {0};
        SWEEP(width, {
            const VEC one = FN(load_some)(x + d, n);
            squares += one * one;
        });
        const VEC scale = FN(splat)((A)(1 / sqrt((double)FN(sum)(squares) / (double)width + work->eps)));
        if (gain) {
            SWEEP(width, {
                FN(store_some)(out + d, FN(load_some)(x + d, n) * scale * FN(load_some_wide)(gain + d, n), n);
            });
        } else {
            SWEEP(width, { FN(store_some)(out + d, FN(load_some)(x + d, n) * scale, n); });
        }
    }
}

/* The gain's gradient: sums over stretches of rows in the accumulation type, and of these in double. */
static void FN(rms_norm_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const norm_work *work = argument;
    const int64_t width = work->width;
    const A *gain = work->gain;
    A *sums = work->partial ? (A *)work->scratch + part * width : NULL;
    for (int64_t top = begin; top < end; top += 32) {
        const int64_t bottom = top + 32 < end ? top + 32 : end;
        if (sums) {
            memset(sums, 0, (size_t)width * sizeof(A));
        }
        for (int64_t row = top; row < bottom; row++) {
            const T *x = (const T *)work->x + row * width;
            const T *g = (const T *)work->out + row * width;
            T *dx = work->grad_x ? (T *)work->grad_x + row * width : NULL;
            VEC squares = {0}, onto = {0};
            SWEEP(width, {
                const VEC one = FN(load_some)(x + d, n);
                VEC pull = FN(load_some)(g + d, n);
                if (gain) {
                    pull *= FN(load_some_wide)(gain + d, n);
                }
                squares += one * one;
                onto += one * pull;
            });
            const A scale = (A)(1 / sqrt((double)FN(sum)(squares) / (double)width + work->eps));
            const VEC r = FN(splat)(scale), back = FN(splat)(scale * scale * scale * FN(sum)(onto) / (A)width);
            SWEEP(width, {
                const VEC one = FN(load_some)(x + d, n);
                const VEC pull = FN(load_some)(g + d, n);
                if (sums) {
                    FN(store_some_wide)(sums + d, FN(load_some_wide)(sums + d, n) + pull * one * r, n);
                }
                if (dx) {
                    const VEC h = gain ? pull * FN(load_some_wide)(gain + d, n) : pull;
                    FN(store_some)(dx + d, h * r - one * back, n);
                }
            });
        }
        for (int64_t d = 0; sums && d < width; d++) {
            work->partial[part * width + d] += (double)sums[d];
        }
    }
}

static void FN(rms_norm_collect)(const norm_work *work, int parts) {
    for (int64_t d = 0; d < work->width; d++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) {
            sum += work->partial[part * work->width + d];
        }
        ((A *)work->grad_gain)[d] = (A)sum;
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *x;              /* [rows, width] */
    const void *gain;           /* [width], or NULL */
    void *out;                  /* as x: the result, or its gradient */
    void *grad_x, *grad_gain;   /* NULL where not wanted */
    void *scratch;              /* [parts, width] of the accumulation type */
    double *partial;            /* [parts, width] */
    int64_t width;
    double eps;
} norm_work;

#define KERNEL "rms_norm.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(rms_norm);
static const range_function backward[] = VARIANTS(rms_norm_backward);
static void (*const collect[])(const norm_work *, int) = VARIANTS(rms_norm_collect);

EXPORT int residua_rms_norm(int type, int threads, const void *x, const void *gain, void *out, int64_t rows,
                            int64_t width, double eps) {
    norm_work work = {.x = x, .gain = gain, .out = out, .width = width, .eps = eps};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_rms_norm_backward(int type, int threads, const void *x, const void *gain, const void *gradient,
                                     void *grad_x, void *grad_gain, int64_t rows, int64_t width, double eps) {
    norm_work work = {.x = x, .gain = gain, .out = (void *)gradient, .grad_x = grad_x, .grad_gain = grad_gain,
                      .width = width, .eps = eps};
    if (grad_gain) {
        work.partial = calloc((size_t)(threads * width), 2 * sizeof(double));
        if (!work.partial) {
            return RESIDUA_NO_MEMORY;
        }
        work.scratch = work.partial + threads * width;
    }
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    if (grad_gain) {
        collect[residua_variant(type)](&work, threads);
        free(work.partial);
    }
    return RESIDUA_OK;
}

#endif
