/* x[r, :] = sum_j w[j, :] X[r, j, :], one weight for each channel j and place, whatever the row r.
 *
 *     dX[r, j] = w[j] g[r]        dw[j] = sum over rows of g[r] X[r, j]
 *
 * w and its gradient are of the accumulation type. The rows of the next token are sent for while one is read: a
 * processor that is shown rows side by side does not guess them.
 */
#ifdef T

static void FN(compress)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const compress_work *work = argument;
    const int64_t channels = work->channels, width = work->width;
    const A *w = work->w;
    for (int64_t row = begin; row < end; row++) {
        const T *X = (const T *)work->X + row * channels * width;
        SWEEP(width, {
            VEC total = {0};
            for (int64_t j = 0; j < channels; j++) {
                __builtin_prefetch(X + (channels + j) * width + d, 0, 2);
                total += FN(load_some_wide)(w + j * width + d, n) * FN(load_some)(X + j * width + d, n);
            }
            FN(store_some)((T *)work->x + row * width + d, total, n);
        });
    }
}

static void FN(compress_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const compress_work *work = argument;
    const int64_t channels = work->channels, width = work->width, numbers = channels * width;
    const A *w = work->w;
    A *sums = work->grad_w ? (A *)work->scratch + part * numbers : NULL;
    for (int64_t top = begin; top < end; top += BLOCK) {
        const int64_t bottom = top + BLOCK < end ? top + BLOCK : end;
        if (sums) {
            memset(sums, 0, (size_t)numbers * sizeof(A));
        }
        for (int64_t row = top; row < bottom; row++) {
            const T *X = (const T *)work->X + row * numbers;
            T *dX = work->grad_X ? (T *)work->grad_X + row * numbers : NULL;
            SWEEP(width, {
                const VEC g = FN(load_some)((const T *)work->x + row * width + d, n);
                for (int64_t j = 0; j < channels; j++) {
                    const int64_t at = j * width + d;
                    if (sums) {
                        __builtin_prefetch(X + numbers + at, 0, 2);
                        const VEC more = g * FN(load_some)(X + at, n);
                        FN(store_some_wide)(sums + at, FN(load_some_wide)(sums + at, n) + more, n);
                    }
                    if (dX) {
                        FN(store_some)(dX + at, g * FN(load_some_wide)(w + at, n), n);
                    }
                }
            });
        }
        for (int64_t i = 0; sums && i < numbers; i++) {
            work->partial[part * numbers + i] += (double)sums[i];
        }
    }
}

static void FN(compress_collect)(const compress_work *work, int parts) {
    const int64_t numbers = work->channels * work->width;
    for (int64_t i = 0; i < numbers; i++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) {
            sum += work->partial[part * numbers + i];
        }
        ((A *)work->grad_w)[i] = (A)sum;
    }
}

#else

#include "kernels.h"

enum { BLOCK = 256 }; /* rows that are added up in the accumulation type, before those sums are in double */

typedef struct {
    const void *w;         /* [channels, width] */
    const void *X;         /* [rows, channels, width] */
    void *x;               /* [rows, width]: the result, or its gradient */
    void *grad_w, *grad_X; /* NULL where not wanted */
    void *scratch;         /* [parts, channels, width] of the accumulation type */
    double *partial;       /* the same in double */
    int64_t channels, width;
} compress_work;

#define KERNEL "compress.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(compress);
static const range_function backward[] = VARIANTS(compress_backward);
static void (*const collect[])(const compress_work *, int) = VARIANTS(compress_collect);

EXPORT int residua_compress(int type, int threads, const void *w, const void *X, void *x, int64_t rows,
                            int64_t channels, int64_t width) {
    compress_work work = {.w = w, .X = X, .x = x, .channels = channels, .width = width};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_compress_backward(int type, int threads, const void *w, const void *X, const void *gradient,
                                     void *grad_w, void *grad_X, int64_t rows, int64_t channels, int64_t width) {
    compress_work work = {.w = w, .X = X, .x = (void *)gradient, .grad_w = grad_w, .grad_X = grad_X,
                          .channels = channels, .width = width};
    if (grad_w) {
        work.partial = calloc((size_t)(threads * channels * width), 2 * sizeof(double));
        if (!work.partial) {
            return RESIDUA_NO_MEMORY;
        }
        work.scratch = work.partial + threads * channels * width;
    }
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    if (grad_w) {
        collect[residua_variant(type)](&work, threads);
        free(work.partial);
    }
    return RESIDUA_OK;
}

#endif
