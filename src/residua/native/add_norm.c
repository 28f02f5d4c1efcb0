/* s = h + y and out = gain s / sqrt(mean(s^2) + eps), in one pass over memory.
 *
 *     r = 1 / sqrt(mean(s^2) + eps)     p = gain g_out     ds = g_s + r (p - s r^2 <p, s> / width)
 *     dh = dy = ds                      dgain = sum over rows of g_out s r
 *
 * The backward pass makes r again from s, which is an output and therefore kept anyway.
 */
#ifdef T

static void FN(add_norm)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const add_norm_work *work = argument;
    const int64_t width = work->width;
    const A *gain = work->gain;
    for (int64_t row = begin; row < end; row++) {
        const T *h = (const T *)work->h + row * width, *y = (const T *)work->y + row * width;
        T *s = (T *)work->sum + row * width, *out = (T *)work->out + row * width;
        VEC squares = {0};
        SWEEP(width, {
            FN(store_some)(s + d, FN(load_some)(h + d, n) + FN(load_some)(y + d, n), n);
            const VEC rounded = FN(load_some)(s + d, n);
            squares += rounded * rounded;
        });
        const VEC r = FN(splat)((A)(1 / sqrt((double)FN(sum)(squares) / (double)width + work->eps)));
        SWEEP(width, {
            FN(store_some)(out + d, FN(load_some)(s + d, n) * r * FN(load_some_wide)(gain + d, n), n);
        });
    }
}

static void FN(add_norm_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const add_norm_work *work = argument;
    const int64_t width = work->width;
    const A *gain = work->gain;
    A *gains = work->grad_gain ? (A *)work->partial + part * 2 * width : NULL;
    A *tile = gains ? gains + width : NULL; /* sums of a few rows, then added: fewer roundings */
    for (int64_t row = begin; row < end; row++) {
        const T *s = (const T *)work->sum + row * width, *g = (const T *)work->out + row * width;
        const T *through = work->through ? (const T *)work->through + row * width : NULL;
        T *out = (T *)work->grad + row * width;
        VEC squares = {0}, dots = {0};
        SWEEP(width, {
            const VEC x = FN(load_some)(s + d, n);
            squares += x * x;
            dots += x * FN(load_some)(g + d, n) * FN(load_some_wide)(gain + d, n);
        });
        const double r = 1 / sqrt((double)FN(sum)(squares) / (double)width + work->eps);
        const VEC scale = FN(splat)((A)r);
        const VEC pull = FN(splat)((A)(r * r * r * (double)FN(sum)(dots) / (double)width));
        SWEEP(width, {
            const VEC x = FN(load_some)(s + d, n), gradient = FN(load_some)(g + d, n);
            VEC found = scale * gradient * FN(load_some_wide)(gain + d, n) - pull * x;
            if (through) {
                found += FN(load_some)(through + d, n);
            }
            FN(store_some)(out + d, found, n);
            if (tile) {
                FN(store_some_wide)(tile + d, FN(load_some_wide)(tile + d, n) + gradient * x * scale, n);
            }
        });
        if (tile && (row % 32 == 31 || row + 1 == end)) {
            for (int64_t d = 0; d < width; d++) {
                gains[d] += tile[d];
                tile[d] = 0;
            }
        }
    }
}

static void FN(add_norm_collect)(const add_norm_work *work, int parts) {
    A *total = work->grad_gain;
    for (int64_t d = 0; d < work->width; d++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) {
            sum += (double)((const A *)work->partial)[part * 2 * work->width + d];
        }
        total[d] = (A)sum;
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *h, *y; /* [rows, width] */
    const void *gain;  /* [width], of the accumulation type */
    void *sum;         /* [rows, width] */
    void *out;         /* [rows, width]: the normalised sum, or its gradient */
    const void *through; /* the gradient of the sum by other ways; NULL if there is none */
    void *grad;          /* the gradient of h and of y */
    void *grad_gain;     /* NULL if not wanted */
    void *partial;       /* two rows for each part, zeros */
    int64_t width;
    double eps;
} add_norm_work;

#define KERNEL "add_norm.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(add_norm);
static const range_function backward[] = VARIANTS(add_norm_backward);
static void (*const collect[])(const add_norm_work *, int) = VARIANTS(add_norm_collect);

EXPORT int residua_add_norm(int type, int threads, const void *h, const void *y, const void *gain, void *sum,
                            void *out, int64_t rows, int64_t width, double eps) {
    add_norm_work work = {.h = h, .y = y, .gain = gain, .sum = sum, .out = out, .width = width, .eps = eps};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_add_norm_backward(int type, int threads, const void *sum, const void *gain, const void *gradient,
                                     const void *through, void *grad, void *grad_gain, int64_t rows, int64_t width,
                                     double eps) {
    add_norm_work work = {.gain = gain, .sum = (void *)sum, .out = (void *)gradient, .through = through, .grad = grad,
                          .grad_gain = grad_gain, .width = width, .eps = eps};
    if (grad_gain) {
        work.partial = calloc((size_t)(threads * 2 * width) + 1, sizeof(double));
        if (!work.partial) {
            return RESIDUA_NO_MEMORY;
        }
    }
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    if (grad_gain) {
        collect[residua_variant(type)](&work, threads);
        free(work.partial);
    }
    return RESIDUA_OK;
}

#endif
