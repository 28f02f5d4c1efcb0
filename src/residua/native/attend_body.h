/* The depth read for one element type and instruction set: what its two forms share.
 *
 * Steps take n numbers of a row, LANES or, at the end of a row, fewer: a constant but for the last step.
 */
#undef SHARED /* a function over numbers of type A: bfloat16 has that of float32 */
#ifdef USE_BFLOAT16
#define SHARED(name) JOIN(name, f32, ISA)
#else
#define SHARED(name) FN(name)
#endif
#define NOINLINE static __attribute__((noinline)) /* saves compiling; a call is nothing beside a row */

INLINE void FN(dots_step)(const int row_count, const T *const *rows, const int vector_count, const A *const *vectors,
                          int64_t d, int64_t n, VEC sum[4][4], VEC *squares) {
    VEC x[4];
#pragma GCC unroll 4
    for (int r = 0; r < row_count; r++) {
        x[r] = FN(load_some)(rows[r] + d, n);
        if (squares) {
            squares[r] += x[r] * x[r];
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vector_count; v++) {
        VEC y = FN(load_some_wide)(vectors[v] + d, n);
#pragma GCC unroll 4
        for (int r = 0; r < row_count; r++) {
            sum[r][v] += x[r] * y;
        }
    }
}

/* softmax of row[0..n) in place; its entries up to a multiple of LANES are scratch. Returns the log of the sum. */
NOINLINE A FN(softmax)(A *row, int64_t n) {
    A most = row[0];
    for (int64_t i = 1; i < n; i++) {
        most = row[i] > most ? row[i] : most;
    }
    for (int64_t i = n; i % LANES; i++) {
        row[i] = -INFINITY;
    }
    VEC totals = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        FN(store_wide)(row + i, FN(exponential)(FN(load_wide)(row + i) - most));
    }
    for (int64_t i = n; i % LANES; i++) {
        row[i] = 0;
    }
    for (int64_t i = 0; i < n; i += LANES) {
        totals += FN(load_wide)(row + i);
    }
    const A total = FN(sum)(totals), share = 1 / total;
    for (int64_t i = 0; i < n; i++) {
        row[i] *= share;
    }
    return most + (A)log((double)total);
}

/* The softmax of one (query, token, head), whose logits stand in row[0..sources). */
INLINE A FN(routed)(const attend_read *read, A *row, int64_t query, int64_t token, int64_t head) {
    int64_t count = read->sources;
    if (read->carry_logit) {
        const A *logit = read->carry_logit;
        row[count++] = logit[read->carry_steps ? token * read->heads + head : query];
    }
    return FN(softmax)(row, count);
}

/* The weights from the softmax. A carry is scaled and never centred. */
INLINE void FN(weighted)(const attend_read *read, A *row) {
    const A scale = (A)read->scale, centre = read->centred ? 1 / (A)read->sources : 0;
    if (read->scale != 1 || read->centred) {
        for (int64_t i = 0; i < read->sources; i++) {
            row[i] = scale * row[i] - centre;
        }
        row[read->sources] *= scale;
    }
}

INLINE A FN(rms_inverse)(const attend_read *read, A square) {
    return (A)1 / (A)sqrt((double)(square / (A)read->width + (A)read->eps));
}

INLINE VEC FN(rms_inverses)(const attend_read *read, VEC squares) {
    return (A)1 / FN(root)(squares / (A)read->width + (A)read->eps);
}

INLINE void FN(mix_step)(const int vectors, const T *const *rows, int64_t count, const A *weights, const A *carried,
                         T *out, int64_t at, int64_t d, int64_t n) {
    VEC sum[8] = {0};
    for (int64_t i = 0; i < count; i++) {
        const VEC weight = FN(splat)(weights[i]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            sum[v] += weight * FN(load_some)(rows[i] + at + d + v * LANES, n);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        if (carried) {
            sum[v] += weights[count] * FN(load_some_wide)(carried + at + d + v * LANES, n);
        }
        FN(store_some)(out + at + d + v * LANES, sum[v], n);
    }
}

/* out = sum_i weights[i] rows[i], numbers at..at+width of each, with one more row that is carried, or NULL. */
NOINLINE void FN(mix_one)(const T *const *rows, int64_t count, const A *weights, const A *carried, T *out, int64_t at,
                          int64_t width) {
    enum { MOST = BYTES == 64 ? 4 : 8 };
    int64_t d = 0;
    for (; d + MOST * LANES <= width; d += MOST * LANES) {
        FN(mix_step)(MOST, rows, count, weights, carried, out, at, d, LANES);
    }
    for (; d < width; d += LANES) {
        FN(mix_step)(1, rows, count, weights, carried, out, at, d, width - d < LANES ? width - d : LANES);
    }
}

/* The gradient of the logits of one (query, token, head) from dots[i] = out_gradient . value_i.
 *
 * row holds the softmax and becomes the weights; dots becomes d logit / rms; pull takes what acts along the value
 * itself, through its norm. carried is out_gradient . carry value times the carry's share of the softmax. Returns the
 * gradient of the carry's logit. */
NOINLINE A FN(route_gradient)(const attend_read *read, A *row, const A *logit, A *dots, const A *inverse, A *pull,
                              A carried) {
    const A scale = (A)read->scale;
    A mean = carried;
    for (int64_t i = 0; i < read->sources; i++) {
        mean += row[i] * dots[i];
    }
    A carry = 0;
    if (read->carry_logit) {
        const A share = row[read->sources];
        carry = scale * (carried - share * mean);
    }
    for (int64_t i = 0; i < read->sources; i++) {
        const A slope = row[i] * scale * (dots[i] - mean) * inverse[i];
        dots[i] = slope;
        pull[i] -= slope * logit[i] * inverse[i] / (A)read->width;
    }
    FN(weighted)(read, row);
    return carry;
}

INLINE void FN(pull_step)(const int rows, const int vectors, const int streamed, const T *const *value,
                          const A *const *above, const A *query, const VEC *weight, const VEC *slope, const VEC *pull,
                          T *const *gradient, A *query_gradient, int64_t d, int64_t n) {
    VEC sum[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        sum[v] = FN(load_some_wide)(query_gradient + d + v * LANES, n);
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        VEC y[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            const int64_t at = d + v * LANES;
            const VEC x = FN(load_some)(value[r] + at, n);
            y[v] = weight[r] * FN(load_some_wide)(above[r] + at, n) +
                   (slope[r] * FN(load_some_wide)(query + at, n) + pull[r] * x);
            sum[v] += slope[r] * x;
        }
        if (vectors == 2) {
            FN(store_two)(streamed, gradient[r] + d, y[0], y[1]);
        } else {
            FN(store_some)(gradient[r] + d, y[0], n);
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        FN(store_some_wide)(query_gradient + d + v * LANES, sum[v], n);
    }
}

/* gradient[r] = weight[r] above[r] + slope[r] query + pull[r] value[r] and query_gradient += slope[r] value[r], for one
 * or two rows; meanwhile what lies eight rows on is on its way. */
INLINE void FN(pull_rows)(const int rows, const int streamed, const T *const *values, const A *const *aboves,
                          const A *query, const A *weights, const A *slopes, const A *pulls, T *const *gradients,
                          A *query_gradient, int64_t width) {
    const T *const value[2] = {values[0], values[rows - 1]}; /* copies that no store can alias */
    const A *const above[2] = {aboves[0], aboves[rows - 1]};
    T *const gradient[2] = {gradients[0], gradients[rows - 1]};
    const VEC weight[2] = {FN(splat)(weights[0]), FN(splat)(weights[rows - 1])};
    const VEC slope[2] = {FN(splat)(slopes[0]), FN(splat)(slopes[rows - 1])};
    const VEC pull[2] = {FN(splat)(pulls[0]), FN(splat)(pulls[rows - 1])};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            __builtin_prefetch(value[r] + 8 * width + d, 0, 2);
        }
        FN(pull_step)(rows, 2, streamed, value, above, query, weight, slope, pull, gradient, query_gradient, d, LANES);
    }
    for (; d < width; d += LANES) {
        FN(pull_step)(rows, 1, 0, value, above, query, weight, slope, pull, gradient, query_gradient, d,
                      width - d < LANES ? width - d : LANES);
    }
}

#define PULLER(name, rows, streamed)                                                                                  \
    NOINLINE void name(const T *const *value, const A *const *above, const A *query, const A *weight, const A *slope, \
                       const A *pull, T *const *gradient, A *query_gradient, int64_t width) {                         \
        FN(pull_rows)(rows, streamed, value, above, query, weight, slope, pull, gradient, query_gradient, width);     \
    }
PULLER(FN(pull_2_streamed), 2, 1)
PULLER(FN(pull_2), 2, 0)
PULLER(FN(pull_1), 1, 0)
#undef PULLER

/* Adds a tile's sums to those of the whole range: float32 would lose digits over many tokens. */
INLINE void FN(settle)(double *total, A *tile, int64_t n) {
    for (int64_t d = 0; d < n; d++) {
        total[d] += tile[d];
        tile[d] = 0;
    }
}

INLINE void FN(copy_wide)(A *wide, const T *rows, int64_t count) {
    int64_t d = 0;
    for (; d + LANES <= count; d += LANES) {
        FN(store_wide)(wide + d, FN(load_some)(rows + d, LANES));
    }
    if (d < count) {
        FN(store_wide_part)(wide + d, FN(load_part)(rows + d, count - d), count - d);
    }
}

/* Rows as numbers: themselves, or a wide copy in scratch. */
INLINE const A *FN(wide_rows)(A *scratch, const T *rows, int64_t count) {
#ifdef USE_BFLOAT16
    FN(copy_wide)(scratch, rows, count);
    return scratch;
#else
    (void)scratch, (void)count;
    return rows;
#endif
}

#include "attend_one.h"
#include "attend_stream.h"
#include "attend_many.h"

#undef NOINLINE
