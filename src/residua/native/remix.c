/* out[r, m, :] = onto[r, m, :] + sum_s w[r, s, m] H[r, s, :]: the streams of each token recombined.
 *
 *     dH[r, s] = sum_m w[r, s, m] g[r, m]        dw[r, s, m] = <H[r, s], g[r, m]>
 *
 * Weights and their gradients are of the accumulation type. A token's streams fit the first-level cache, so that the
 * loops may pass over them again.
 */
#ifdef T

/* to[i] = onto[i] + sum_j w[i by_to + j by_from] from[j], for a few rows `i` and one or two vectors of them: what a
 * weight is spread for. */
INLINE void FN(combine_step)(const int rows, const int vectors, const T *from, int64_t count, const T *onto, T *to,
                             const A *w, int64_t by_to, int64_t by_from, int64_t width, int64_t d, int64_t n) {
    VEC total[4][2];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            total[i][v] = onto ? FN(load_some)(onto + i * width + d + v * LANES, n) : (VEC){0};
        }
    }
    for (int64_t j = 0; j < count; j++) {
        VEC value[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            value[v] = FN(load_some)(from + j * width + d + v * LANES, n);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const VEC weight = FN(splat)(w[i * by_to + j * by_from]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                total[i][v] += weight * value[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            FN(store_some)(to + i * width + d + v * LANES, total[i][v], n);
        }
    }
}

INLINE void FN(combine_rows)(const int rows, const T *from, int64_t count, const T *onto, T *to, const A *w,
                             int64_t by_to, int64_t by_from, int64_t width) {
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        FN(combine_step)(rows, 2, from, count, onto, to, w, by_to, by_from, width, d, LANES);
    }
    for (; d < width; d += LANES) {
        FN(combine_step)(rows, 1, from, count, onto, to, w, by_to, by_from, width, d,
                         width - d < LANES ? width - d : LANES);
    }
}

static void FN(combine)(const T *from, int64_t count, const T *onto, T *to, int64_t rows, const A *w, int64_t by_to,
                        int64_t by_from, int64_t width) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        FN(combine_rows)(4, from, count, onto ? onto + i * width : NULL, to + i * width, w + i * by_to, by_to, by_from,
                         width);
    }
    for (; i < rows; i++) {
        FN(combine_rows)(1, from, count, onto ? onto + i * width : NULL, to + i * width, w + i * by_to, by_to, by_from,
                         width);
    }
}

static void FN(remix)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const remix_work *work = argument;
    const int64_t streams = work->streams, made = work->made, width = work->width;
    for (int64_t row = begin; row < end; row++) {
        const A *w = (const A *)work->weights + row * streams * made;
        FN(combine)((const T *)work->H + row * streams * width, streams,
                    work->onto ? (const T *)work->onto + row * work->onto_step : NULL,
                    (T *)work->out + row * made * width, made, w, 1, made, width);
    }
}

/* Dots of one or two streams with one or four gradients. */
INLINE void FN(dots_of)(const int streams, const int made, const T *x, const T *g, A *out, int64_t step,
                        int64_t width) {
    VEC total[8] = {{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}};
    SWEEP(width, {
        VEC slope[4];
        for (int i = 0; i < made; i++) {
            slope[i] = FN(load_some)(g + i * width + d, n);
        }
        for (int s = 0; s < streams; s++) {
            const VEC value = FN(load_some)(x + s * width + d, n);
            for (int i = 0; i < made; i++) {
                total[s * made + i] += value * slope[i];
            }
        }
    });
    A sums[EIGHT];
    if (streams * made > 1) {
        FN(sums_of_8)(total, sums);
    } else {
        sums[0] = FN(sum)(total[0]);
    }
    for (int s = 0; s < streams; s++) {
        for (int i = 0; i < made; i++) {
            out[s * step + i] = sums[s * made + i];
        }
    }
}

/* out[s, m] = <x[s], g[m]>: in tiles whose sums stay in registers. */
static void FN(dots)(const T *x, int64_t streams, const T *g, int64_t made, A *out, int64_t width) {
    for (int64_t s = 0; s < streams; s += 2) {
        const int two = s + 2 <= streams;
        const T *value = x + s * width;
        A *to = out + s * made;
        int64_t m = 0;
        for (; m + 4 <= made; m += 4) {
            if (two) {
                FN(dots_of)(2, 4, value, g + m * width, to + m, made, width);
            } else {
                FN(dots_of)(1, 4, value, g + m * width, to + m, made, width);
            }
        }
        for (; m < made; m++) {
            if (two) {
                FN(dots_of)(2, 1, value, g + m * width, to + m, made, width);
            } else {
                FN(dots_of)(1, 1, value, g + m * width, to + m, made, width);
            }
        }
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
            FN(combine)(g, made, NULL, (T *)work->grad_H + row * streams * width, streams, w, made, 1, width);
        }
        if (work->grad_weights) {
            FN(dots)(H, streams, g, made, (A *)work->grad_weights + row * streams * made, width);
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
    const void *onto;  /* [rows, made, width], or NULL */
    int64_t onto_step; /* numbers from one row of it to the next */
} remix_work;

#define KERNEL "remix.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(remix);
static const range_function backward[] = VARIANTS(remix_backward);

EXPORT int residua_remix(int type, int threads, const void *H, const void *weights, const void *onto, void *out,
                         int64_t rows, int64_t streams, int64_t made, int64_t width, int64_t onto_step) {
    remix_work work = {.H = H, .weights = weights, .out = out, .streams = streams, .made = made, .width = width,
                       .onto = onto, .onto_step = onto_step};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_remix_backward(int type, int threads, const void *H, const void *weights, const void *gradient,
                                  void *grad_H, void *grad_weights, int64_t rows, int64_t streams, int64_t made,
                                  int64_t width) {
    remix_work work = {.H = H, .weights = weights, .out = (void *)gradient, .grad_H = grad_H,
                       .grad_weights = grad_weights, .streams = streams, .made = made, .width = width};
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

#endif
