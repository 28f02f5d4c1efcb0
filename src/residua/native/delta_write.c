/* out_j = X_j + beta (value_j - <X_j, u>) u,   u = k / sqrt(<k, k> + eps^2), for the rows j of each token's state.
 *
 * Two sweeps over a token, the second out of the first-level cache. The backward pass makes the dots again:
 *
 *     a_j = <g_j, u>     e_j = value_j - <X_j, u>
 *     dX_j = g_j - beta a_j u     dvalue_j = beta a_j     dbeta = sum_j a_j e_j
 *     du = sum_j beta (e_j g_j - a_j X_j)     dk = (du - <du, u> u) / sqrt(<k, k> + eps^2)
 *
 * value, beta and their gradients are of the accumulation type. X may repeat its rows (by_channel = 0).
 */
#ifdef T
#include "mixtures.h"

static void FN(delta_write)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const delta_work *work = argument;
    const A *values = work->value, *betas = work->beta;
    const int64_t width = work->width, channels = work->channels;
    for (int64_t row = begin; row < end; row++) {
        const T *k = (const T *)work->k + row * width;
        const A scale = 1 / (A)sqrt((double)FN(dot)(k, k, width) + work->eps * work->eps);
        for (int64_t j = 0; j < channels; j++) {
            const T *X = (const T *)work->X + row * work->by_row + j * work->by_channel;
            T *out = (T *)work->out + (row * channels + j) * width;
            const A held = FN(dot)(X, k, width) * scale;
            const VEC step = FN(splat)(betas[row] * (values[row * channels + j] - held) * scale);
            SWEEP(width, {
                __builtin_prefetch(X + d + work->by_row, 0, 2); /* of the next token */
                FN(store_some)(out + d, FN(load_some)(X + d, n) + step * FN(load_some)(k + d, n), n);
            });
        }
    }
}

/* dk over one stretch, one channel after the other, and the gradient of the state with it. */
INLINE void FN(delta_pull)(const delta_work *work, int64_t row, int64_t d, int64_t n, const A *a, const A *e, A onto,
                           A scale) {
    const int64_t width = work->width, channels = work->channels;
    const A beta = ((const A *)work->beta)[row];
    const VEC u = FN(load_some)((const T *)work->k + row * width + d, n) * FN(splat)(scale);
    VEC turn = -FN(splat)(onto) * u;
    for (int64_t j = 0; j < channels; j++) {
        const int64_t at = (row * channels + j) * width + d;
        const VEC g = FN(load_some)((const T *)work->out + at, n);
        const VEC X = FN(load_some)((const T *)work->X + row * work->by_row + j * work->by_channel + d, n);
        turn += FN(splat)(beta * e[j]) * g - FN(splat)(beta * a[j]) * X;
        if (work->grad_X) {
            FN(store_some)((T *)work->grad_X + at, g - FN(splat)(beta * a[j]) * u, n);
        }
    }
    if (work->grad_k) {
        FN(store_some)((T *)work->grad_k + row * width + d, turn * FN(splat)(scale), n);
    }
}

static void FN(delta_write_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const delta_work *work = argument;
    const int64_t width = work->width, channels = work->channels;
    const A *values = work->value, *betas = work->beta;
    A *a = (A *)work->scratch + part * 2 * channels, *e = a + channels;
    for (int64_t row = begin; row < end; row++) {
        const T *k = (const T *)work->k + row * width;
        const A scale = 1 / (A)sqrt((double)FN(dot)(k, k, width) + work->eps * work->eps);
        A onto = 0, share = 0;
        for (int64_t j = 0; j < channels; j++) {
            const T *X = (const T *)work->X + row * work->by_row + j * work->by_channel;
            const A held = FN(dot)(X, k, width) * scale;
            a[j] = FN(dot)((const T *)work->out + (row * channels + j) * width, k, width) * scale;
            e[j] = values[row * channels + j] - held;
            onto += betas[row] * a[j] * (e[j] - held); /* <du, u> */
            share += a[j] * e[j];
            if (work->grad_value) {
                ((A *)work->grad_value)[row * channels + j] = betas[row] * a[j];
            }
        }
        if (work->grad_beta) {
            ((A *)work->grad_beta)[row] = share;
        }
        if (!work->grad_X && !work->grad_k) {
            continue;
        }
        SWEEP(width, { FN(delta_pull)(work, row, d, n, a, e, onto, scale); });
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *X;            /* [rows, channels, width] by the strides below */
    const void *k;            /* [rows, width] */
    const void *value, *beta; /* [rows, channels] and [rows] */
    void *out;                /* [rows, channels, width]: the result, or its gradient */
    void *grad_X, *grad_k, *grad_value, *grad_beta; /* as the above, in order; NULL where not wanted */
    void *scratch;                                  /* two numbers per channel for each part */
    int64_t rows, channels, width, by_row, by_channel;
    double eps;
} delta_work;

#define KERNEL "delta_write.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(delta_write);
static const range_function backward[] = VARIANTS(delta_write_backward);

EXPORT int residua_delta_write(int type, int threads, const void *X, const void *k, const void *value,
                               const void *beta, void *out, int64_t rows, int64_t channels, int64_t width,
                               int64_t by_row, int64_t by_channel, double eps) {
    delta_work work = {.X = X, .k = k, .value = value, .beta = beta, .out = out, .rows = rows, .channels = channels,
                       .width = width, .by_row = by_row, .by_channel = by_channel, .eps = eps};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_delta_write_backward(int type, int threads, const void *X, const void *k, const void *value,
                                        const void *beta, const void *gradient, void *grad_X, void *grad_k,
                                        void *grad_value, void *grad_beta, int64_t rows, int64_t channels,
                                        int64_t width, int64_t by_row, int64_t by_channel, double eps) {
    delta_work work = {.X = X, .k = k, .value = value, .beta = beta, .out = (void *)gradient, .grad_X = grad_X,
                       .grad_k = grad_k, .grad_value = grad_value, .grad_beta = grad_beta, .rows = rows,
                       .channels = channels, .width = width, .by_row = by_row, .by_channel = by_channel, .eps = eps};
    work.scratch = malloc((size_t)threads * 2 * (size_t)(channels + 1) * sizeof(double));
    if (!work.scratch) {
        return RESIDUA_NO_MEMORY;
    }
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    free(work.scratch);
    return RESIDUA_OK;
}

#endif
