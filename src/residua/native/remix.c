/* out[r, m, :] = sum_s w[r, s, m] H[r, s, :]: the streams of each token recombined.
 *
 *     dH[r, s] = sum_m w[r, s, m] g[r, m]        dw[r, s, m] = <H[r, s], g[r, m]>
 *
 * Weights and their gradients are of the accumulation type. A token's streams fit the first-level cache, so that the
 * loops may pass over them again.
 */
#ifdef T

/* to[i] = sum_j w[i by_to + j by_from] from[j], over rows of `width`, for up to 4 rows `i` at once. */
INLINE void FN(combine)(const T *from, int64_t count, T *to, int rows, const A *w, int64_t by_to, int64_t by_from,
                        int64_t width, int64_t d, int64_t n) {
    VEC total[4] = {{0}, {0}, {0}, {0}};
    for (int64_t j = 0; j < count; j++) {
        const VEC value = FN(load_some)(from + j * width + d, n);
        for (int i = 0; i < rows; i++) {
            total[i] += FN(splat)(w[i * by_to + j * by_from]) * value;
        }
    }
    for (int i = 0; i < rows; i++) {
        FN(store_some)(to + i * width + d, total[i], n);
    }
}

INLINE void FN(combine_width)(const T *from, int64_t count, T *to, int rows, const A *w, int64_t by_to,
                              int64_t by_from, int64_t width) {
    SWEEP(width, { FN(combine)(from, count, to, rows, w, by_to, by_from, width, d, n); });
}

static void FN(combine_all)(const T *from, int64_t count, T *to, int64_t rows, const A *w, int64_t by_to,
                            int64_t by_from, int64_t width) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        FN(combine_width)(from, count, to + i * width, 4, w + i * by_to, by_to, by_from, width);
    }
    for (; i < rows; i++) {
        FN(combine_width)(from, count, to + i * width, 1, w + i * by_to, by_to, by_from, width);
    }
}

static void FN(remix)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const remix_work *work = argument;
    const int64_t streams = work->streams, made = work->made, width = work->width;
    for (int64_t row = begin; row < end; row++) {
        const A *w = (const A *)work->weights + row * streams * made;
        FN(combine_all)((const T *)work->H + row * streams * width, streams, (T *)work->out + row * made * width, made,
                        w, 1, made, width);
    }
}

/* Dots of one stream with up to four gradients. */
INLINE void FN(dots)(const T *x, const T *g, int count, A *out, int64_t width) {
    VEC total[4] = {{0}, {0}, {0}, {0}};
    SWEEP(width, {
        const VEC value = FN(load_some)(x + d, n);
        for (int i = 0; i < count; i++) {
            total[i] += value * FN(load_some)(g + i * width + d, n);
        }
    });
    for (int i = 0; i < count; i++) {
        out[i] = FN(sum)(total[i]);
    }
}

static void FN(remix_backward)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const remix_work *work = argument;
    const int64_t streams = work->streams, made = work->made, width = work->width;
    for (int64_t row = begin; row < end; row++) {
        const T *H = (const T *)work->H + row * streams * width;
        const T *g = (const T *)work->out + row * made * width;
        if (work->grad_H) {
            const A *w = (const A *)work->weights + row * streams * made;
            FN(combine_all)(g, made, (T *)work->grad_H + row * streams * width, streams, w, made, 1, width);
        }
        for (int64_t s = 0; work->grad_weights && s < streams; s++) {
            A *dw = (A *)work->grad_weights + (row * streams + s) * made;
            int64_t m = 0;
            for (; m + 4 <= made; m += 4) {
                FN(dots)(H + s * width, g + m * width, 4, dw + m, width);
            }
            for (; m < made; m++) {
                FN(dots)(H + s * width, g + m * width, 1, dw + m, width);
            }
        }
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *H;       /* [rows, streams, width] */
    const void *weights; /* [rows, streams, made] */
    void *out;           /* [rows, made, width]: the result, or its gradient */
    void *grad_H, *grad_weights; /* NULL where not wanted */
    int64_t streams, made, width;
} remix_work;

#define KERNEL "remix.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(remix);
static const range_function backward[] = VARIANTS(remix_backward);

EXPORT int residua_remix(int type, int threads, const void *H, const void *weights, void *out, int64_t rows,
                         int64_t streams, int64_t made, int64_t width) {
    remix_work work = {H, weights, out, NULL, NULL, streams, made, width};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_remix_backward(int type, int threads, const void *H, const void *weights, const void *gradient,
                                  void *grad_H, void *grad_weights, int64_t rows, int64_t streams, int64_t made,
                                  int64_t width) {
    remix_work work = {H, weights, (void *)gradient, grad_H, grad_weights, streams, made, width};
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

#endif
