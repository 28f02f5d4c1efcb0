/* out[c, r, :] = sum_n w[c, n, r] v_n[r, :], and the same with weights per channel, w[n, :].
 *
 * Rows are taken in tiles that stay in the first-level cache, four sources at a time, so that memory is read in a few
 * long streams and every source once. The backward pass reads each source once and writes each gradient once:
 *
 *     dv_n[r] = sum_c w[c, n, r] g_c[r]        dw[c, n, r] = <g_c[r], v_n[r]>
 *
 * Weights and their gradients are of the accumulation type.
 */
#ifdef T

INLINE int64_t FN(tile_rows)(int64_t width) {
    return width >= MIX_TILE ? 1 : MIX_TILE / (width > 0 ? width : 1);
}

/* n <= LANES numbers of: sum + w_0 v_0 + w_1 v_1 + ..., started where `first` and written out where `last`. */
INLINE void FN(mix_push)(const T *const *v, const A *w, int count, A *sum, T *out, int64_t d, int64_t n, int first,
                         int last) {
    VEC total = first ? (VEC){0} : FN(load_some_wide)(sum + d, n);
    for (int i = 0; i < count; i++) {
        total += FN(splat)(w[i]) * FN(load_some)(v[i] + d, n);
    }
    if (last) {
        FN(store_some)(out + d, total, n);
    } else {
        FN(store_some_wide)(sum + d, total, n);
    }
}

INLINE void FN(mix_stretch)(const T *const *v, const A *w, int count, A *sum, T *out, int64_t width, int first,
                            int last) {
    SWEEP(width, { FN(mix_push)(v, w, count, sum, out, d, n, first, last); });
}

static void FN(mix_rows)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const mix_work *work = argument;
    const A *weights = work->weights;
    const int64_t width = work->width, height = FN(tile_rows)(width * work->lanes);
    A sums[MIX_TILE];
    for (int64_t top = begin; top < end; top += height) {
        const int64_t bottom = top + height < end ? top + height : end;
        for (int64_t lane = 0; lane < work->lanes; lane++) {
            for (int64_t left = 0; left < width; left += MIX_TILE) {
                const int64_t wide = width - left < MIX_TILE ? width - left : MIX_TILE;
                for (int64_t n = 0, count; n < work->count; n += count) {
                    count = n + 4 <= work->count ? 4 : 1;
                    const int first = n == 0, last = n + count == work->count;
                    for (int64_t row = top; row < bottom; row++) {
                        const T *v[4];
                        A w[4];
                        for (int i = 0; i < count; i++) {
                            v[i] = (const T *)work->sources[n + i] + row * width + left;
                            w[i] = weights[lane * work->by_lane + (n + i) * work->by_source + row * work->by_row];
                        }
                        A *sum = sums + (row - top) * wide;
                        T *out = (T *)work->out + (lane * work->rows + row) * width + left;
                        if (count == 4) {
                            FN(mix_stretch)(v, w, 4, sum, out, wide, first, last);
                        } else {
                            FN(mix_stretch)(v, w, 1, sum, out, wide, first, last);
                        }
                    }
                }
            }
        }
    }
}

INLINE void FN(mix_pull)(const T *v, const T *const *g, const A *w, int lanes, T *dv, VEC *dot, int64_t d, int64_t n,
                         int stream) {
    VEC total = {0};
    const VEC value = FN(load_some)(v + d, n);
    for (int c = 0; c < lanes; c++) {
        const VEC gradient = FN(load_some)(g[c] + d, n);
        dot[c] += gradient * value;
        total += FN(splat)(w[c]) * gradient;
    }
    if (dv && stream && n == LANES) {
        FN(stream)(dv + d, total);
    } else if (dv) {
        FN(store_some)(dv + d, total, n);
    }
}

/* One row of one source against the gradients of all lanes: writes its gradient, and its dots with them. */
INLINE void FN(mix_pull_row)(const T *v, const T *const *g, const A *w, int lanes, T *dv, A *dots, int64_t width,
                             int stream) {
    VEC dot[MIX_LANES];
    for (int c = 0; c < lanes; c++) {
        dot[c] = (VEC){0};
    }
    SWEEP(width, { FN(mix_pull)(v, g, w, lanes, dv, dot, d, n, stream); });
    for (int c = 0; c < lanes; c++) {
        dots[c] = FN(sum)(dot[c]);
    }
}

static void FN(mix_rows_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const mix_work *work = argument;
    const A *weights = work->weights;
    A *by_row = work->kind == ROWS ? work->grad_weights : NULL;
    double *sums = work->kind == ROWS || !work->grad_weights ? NULL : work->partial + part * work->lanes * work->count;
    const int lanes = (int)work->lanes;
    const int64_t width = work->width, height = FN(tile_rows)(width * lanes);
    const T *g[MIX_LANES];
    A w[MIX_LANES], dots[MIX_LANES];
    for (int64_t top = begin; top < end; top += height) {
        const int64_t bottom = top + height < end ? top + height : end;
        for (int64_t n = 0; n < work->count; n++) {
            T *gradients = work->grads[n];
            if (!gradients && !work->grad_weights) {
                continue;
            }
            for (int64_t row = top; row < bottom; row++) {
                const T *v = (const T *)work->sources[n] + row * width;
                T *dv = gradients ? gradients + row * width : NULL;
                const int stream = work->stream && FN(can_stream)(dv);
                for (int c = 0; c < lanes; c++) {
                    g[c] = (const T *)work->out + (c * work->rows + row) * width;
                    w[c] = weights[c * work->by_lane + n * work->by_source + row * work->by_row];
                }
                if (lanes == 1) { /* with their number known, the dots stay in registers */
                    FN(mix_pull_row)(v, g, w, 1, dv, dots, width, stream);
                } else if (lanes == 4) {
                    FN(mix_pull_row)(v, g, w, 4, dv, dots, width, stream);
                } else {
                    FN(mix_pull_row)(v, g, w, lanes, dv, dots, width, stream);
                }
                for (int c = 0; work->grad_weights && c < lanes; c++) {
                    const int64_t at = c * work->count + n;
                    if (by_row) {
                        by_row[at * work->rows + row] = dots[c];
                    } else {
                        sums[at] += (double)dots[c];
                    }
                }
            }
        }
    }
    FN(stream_end)();
}

INLINE void FN(channel_push)(const T *v, const A *w, A *sum, T *out, int64_t n, int first, int last) {
    VEC total = first ? (VEC){0} : FN(load_some_wide)(sum, n);
    total += FN(load_some_wide)(w, n) * FN(load_some)(v, n);
    if (last) {
        FN(store_some)(out, total, n);
    } else {
        FN(store_some_wide)(sum, total, n);
    }
}

/* Weights per channel: out = sum_n w[n, :] v_n[r, :]. */
static void FN(mix_channels)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const mix_work *work = argument;
    const int64_t width = work->width, height = FN(tile_rows)(width);
    A sums[MIX_TILE];
    for (int64_t top = begin; top < end; top += height) {
        const int64_t bottom = top + height < end ? top + height : end;
        for (int64_t left = 0; left < width; left += MIX_TILE) {
            const int64_t wide = width - left < MIX_TILE ? width - left : MIX_TILE;
            for (int64_t n = 0; n < work->count; n++) {
                const A *w = (const A *)work->weights + n * width + left;
                const int first = n == 0, last = n == work->count - 1;
                for (int64_t row = top; row < bottom; row++) {
                    const T *v = (const T *)work->sources[n] + row * width + left;
                    T *out = (T *)work->out + row * width + left;
                    A *sum = sums + (row - top) * wide;
                    SWEEP(wide, { FN(channel_push)(v + d, w + d, sum + d, out + d, n, first, last); });
                }
            }
        }
    }
}

INLINE void FN(channel_pull)(const T *v, const T *g, const A *w, T *dv, A *sum, int64_t n, int stream) {
    const VEC gradient = FN(load_some)(g, n);
    if (dv && stream && n == LANES) {
        FN(stream)(dv, FN(load_wide)(w) * gradient);
    } else if (dv) {
        FN(store_some)(dv, FN(load_some_wide)(w, n) * gradient, n);
    }
    if (sum) {
        FN(store_some_wide)(sum, FN(load_some_wide)(sum, n) + gradient * FN(load_some)(v, n), n);
    }
}

static void FN(mix_channels_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const mix_work *work = argument;
    const int64_t width = work->width, height = FN(tile_rows)(width);
    double *partial = work->grad_weights ? work->partial + part * work->count * width : NULL;
    A sums[MIX_TILE];
    for (int64_t top = begin; top < end; top += height) {
        const int64_t bottom = top + height < end ? top + height : end;
        for (int64_t n = 0; n < work->count; n++) {
            for (int64_t left = 0; left < width; left += MIX_TILE) {
                const int64_t wide = width - left < MIX_TILE ? width - left : MIX_TILE;
                const A *w = (const A *)work->weights + n * width + left;
                memset(sums, 0, (size_t)wide * sizeof(A));
                for (int64_t row = top; row < bottom; row++) {
                    const int64_t at = row * width + left;
                    const T *v = (const T *)work->sources[n] + at;
                    const T *g = (const T *)work->out + at;
                    T *dv = work->grads[n] ? (T *)work->grads[n] + at : NULL;
                    A *sum = partial ? sums : NULL;
                    const int stream = work->stream && FN(can_stream)(dv);
                    SWEEP(wide, {
                        FN(channel_pull)(v + d, g + d, w + d, dv ? dv + d : NULL, sum ? sum + d : NULL, n, stream);
                    });
                }
                for (int64_t d = 0; partial && d < wide; d++) {
                    partial[n * width + left + d] += (double)sums[d];
                }
            }
        }
    }
    FN(stream_end)();
}

/* Adds up what the parts found. */
static void FN(mix_collect)(const mix_work *work, int64_t numbers, int parts) {
    A *total = work->grad_weights;
    for (int64_t i = 0; i < numbers; i++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) {
            sum += work->partial[part * numbers + i];
        }
        total[i] = (A)sum;
    }
}

#else

#include "kernels.h"

enum { MIX_TILE = 4096, MIX_LANES = 32 };

/* Weights per row, or the same for all rows, with one sum of gradients; or per channel. */
enum { ROWS, STATIC, CHANNELS };

typedef struct {
    const void *const *sources; /* count of [rows, width] */
    const void *weights;        /* [lanes, count, rows] by the strides below, or [count, width] */
    void *out;                  /* [lanes, rows, width]: the result, or its gradient */
    void *const *grads;         /* gradients of the sources, NULL where not wanted */
    void *grad_weights;         /* [lanes, count, rows], [lanes, count] or [count, width]; NULL if not wanted */
    double *partial;            /* one sum for each part */
    int64_t count, lanes, rows, width;
    int64_t by_lane, by_source, by_row; /* strides of the weights */
    int kind;
    int stream; /* write gradients past the cache */
} mix_work;

#define KERNEL "mix.c"
#include "variants.h"

static const range_function rows_forward[] = VARIANTS(mix_rows);
static const range_function rows_backward[] = VARIANTS(mix_rows_backward);
static const range_function channels_forward[] = VARIANTS(mix_channels);
static const range_function channels_backward[] = VARIANTS(mix_channels_backward);
static void (*const collect[])(const mix_work *, int64_t, int) = VARIANTS(mix_collect);

EXPORT int residua_mix(int type, int threads, const void *const *sources, const void *weights, void *out,
                       int64_t count, int64_t lanes, int64_t rows, int64_t width, int64_t by_lane, int64_t by_source,
                       int64_t by_row, int kind) {
    mix_work work = {sources, weights, out, NULL, NULL, NULL, count, lanes, rows, width, by_lane, by_source, by_row, kind, 0};
    const range_function *table = kind == CHANNELS ? channels_forward : rows_forward;
    residua_parallel(table[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_mix_backward(int type, int threads, const void *const *sources, const void *weights,
                                const void *gradient, void *const *grads, void *grad_weights, int64_t count,
                                int64_t lanes, int64_t rows, int64_t width, int64_t by_lane, int64_t by_source,
                                int64_t by_row, int kind, int stream) {
    mix_work work = {sources, weights, (void *)gradient, grads,     grad_weights, NULL, count, lanes,
                     rows,    width,   by_lane,          by_source, by_row,       kind, stream};
    const int64_t numbers = kind == CHANNELS ? count * width : lanes * count;
    const int summed = grad_weights && kind != ROWS;
    if (summed) {
        work.partial = calloc((size_t)(threads * numbers) + 1, sizeof(double));
        if (!work.partial) {
            return RESIDUA_NO_MEMORY;
        }
    }
    const range_function *table = kind == CHANNELS ? channels_backward : rows_backward;
    residua_parallel(table[residua_variant(type)], &work, rows, threads);
    if (summed) {
        collect[residua_variant(type)](&work, numbers, threads);
        free(work.partial);
    }
    return RESIDUA_OK;
}

#endif
