/* y[t] = sum_s taps[s] x[t - s], per channel; before the first token stands `tail`, the last of whose rows is t = -1.
 *
 *     dx[t] = sum_s taps[s] g[t + s]     dtail likewise     dtaps[s] = sum over t and sequences of g[t] x[t - s]
 *
 * Taps and their gradients are of the accumulation type. A row of work is one token of one sequence.
 */
#ifdef T

/* Token t of a sequence, from the tail where t < 0. */
INLINE const T *FN(token)(const conv_work *work, int64_t sequence, int64_t t) {
    const int64_t before = work->taps_count - 1;
    if (t < 0) {
        return (const T *)work->tail + (sequence * before + before + t) * work->width;
    }
    return (const T *)work->x + (sequence * work->tokens + t) * work->width;
}

static void FN(shortconv)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const conv_work *work = argument;
    const int64_t width = work->width;
    const A *taps = work->taps;
    for (int64_t row = begin; row < end; row++) {
        const int64_t sequence = row / work->tokens, t = row % work->tokens;
        T *out = (T *)work->out + row * width;
        SWEEP(width, {
            VEC total = {0};
            for (int64_t s = 0; s < work->taps_count; s++) {
                total += FN(load_some_wide)(taps + s * width + d, n) *
                         FN(load_some)(FN(token)(work, sequence, t - s) + d, n);
            }
            FN(store_some)(out + d, total, n);
        });
    }
}

/* Gradients of the history: rows count the tail's tokens and then x's, sequence after sequence. */
static void FN(shortconv_backward)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const conv_work *work = argument;
    const int64_t width = work->width, before = work->taps_count - 1, all = before + work->tokens;
    const A *taps = work->taps;
    for (int64_t row = begin; row < end; row++) {
        const int64_t sequence = row / all, t = row % all - before;
        T *out = t < 0 ? (T *)work->grad_tail : (T *)work->grad_x;
        if (!out) {
            continue;
        }
        out += (t < 0 ? sequence * before + before + t : sequence * work->tokens + t) * width;
        SWEEP(width, {
            VEC total = {0};
            for (int64_t s = t < 0 ? -t : 0; s < work->taps_count && t + s < work->tokens; s++) {
                const T *g = (const T *)work->out + (sequence * work->tokens + t + s) * width + d;
                total += FN(load_some_wide)(taps + s * width + d, n) * FN(load_some)(g, n);
            }
            FN(store_some)(out + d, total, n);
        });
    }
}

/* Sums over stretches of tokens in the accumulation type, and of these in double. */
static void FN(shortconv_taps)(void *argument, int64_t begin, int64_t end, int part) {
    const conv_work *work = argument;
    const int64_t width = work->width;
    double *sums = work->partial + part * work->taps_count * width;
    for (int64_t top = begin; top < end; top += 32) {
        const int64_t bottom = top + 32 < end ? top + 32 : end;
        for (int64_t s = 0; s < work->taps_count; s++) {
            SWEEP(width, {
                VEC total = {0};
                for (int64_t row = top; row < bottom; row++) {
                    const T *x = FN(token)(work, row / work->tokens, row % work->tokens - s);
                    total += FN(load_some)((const T *)work->out + row * width + d, n) * FN(load_some)(x + d, n);
                }
                for (int64_t i = 0; i < n; i++) {
                    sums[s * width + d + i] += (double)total[i];
                }
            });
        }
    }
}

static void FN(shortconv_collect)(const conv_work *work, int parts) {
    const int64_t numbers = work->taps_count * work->width;
    for (int64_t i = 0; i < numbers; i++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) {
            sum += work->partial[part * numbers + i];
        }
        ((A *)work->grad_taps)[i] = (A)sum;
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *x;    /* [sequences, tokens, width] */
    const void *tail; /* [sequences, taps_count - 1, width] */
    const void *taps; /* [taps_count, width] */
    void *out;        /* as x: the result, or its gradient */
    void *grad_x, *grad_tail, *grad_taps; /* NULL where not wanted */
    double *partial;                      /* one sum for each part */
    int64_t tokens, taps_count, width;
} conv_work;

#define KERNEL "shortconv.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(shortconv);
static const range_function backward[] = VARIANTS(shortconv_backward);
static const range_function backward_taps[] = VARIANTS(shortconv_taps);
static void (*const collect[])(const conv_work *, int) = VARIANTS(shortconv_collect);

EXPORT int residua_shortconv(int type, int threads, const void *x, const void *tail, const void *taps, void *out,
                             int64_t sequences, int64_t tokens, int64_t taps_count, int64_t width) {
    conv_work work = {.x = x, .tail = tail, .taps = taps, .out = out, .tokens = tokens, .taps_count = taps_count,
                      .width = width};
    residua_parallel(forward[residua_variant(type)], &work, sequences * tokens, threads);
    return RESIDUA_OK;
}

EXPORT int residua_shortconv_backward(int type, int threads, const void *x, const void *tail, const void *taps,
                                      const void *gradient, void *grad_x, void *grad_tail, void *grad_taps,
                                      int64_t sequences, int64_t tokens, int64_t taps_count, int64_t width) {
    conv_work work = {.x = x, .tail = tail, .taps = taps, .out = (void *)gradient, .grad_x = grad_x,
                      .grad_tail = grad_tail, .grad_taps = grad_taps, .tokens = tokens, .taps_count = taps_count,
                      .width = width};
    if (grad_x || grad_tail) {
        residua_parallel(backward[residua_variant(type)], &work, sequences * (taps_count - 1 + tokens), threads);
    }
    if (grad_taps) {
        work.partial = calloc((size_t)(threads * taps_count * width) + 1, sizeof(double));
        if (!work.partial) {
            return RESIDUA_NO_MEMORY;
        }
        residua_parallel(backward_taps[residua_variant(type)], &work, sequences * tokens, threads);
        collect[residua_variant(type)](&work, threads);
        free(work.partial);
    }
    return RESIDUA_OK;
}

#endif
