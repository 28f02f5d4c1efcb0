/* Products of small matrices, for several queries over the same sources: what is summed stays in registers.
 *
 * All of it is in the accumulation type, over copies that lie in order, one row `length` numbers after the other;
 * bfloat16 takes the functions of float32. Behind a row are numbers that may be read, up to `length`.
 */
#ifndef USE_BFLOAT16
/* Rows of a tile of dots, one or two vectors wide, and vectors of a tile of sums, four rows high: with what they are
 * made from, they fill the registers, or are enough for no sum to wait for itself. */
#undef DOT_ROWS
#undef SUM_VECTORS
#define DOT_ROWS(vectors) (BYTES == 64 ? 8 : (vectors) == 1 ? 10 : 6)
#define DOT_TAIL(vectors) (DOT_ROWS(vectors) / 2) /* of a tile for as many rows or fewer */
#define SUM_VECTORS (BYTES == 64 ? 4 : 3)

INLINE void FN(dots_tile)(const int height, const int vectors, const A *rows, int64_t length, const A *columns, int64_t stride,
                          int64_t count, A *dots, attend_soon *soon, int64_t lines) {
    VEC sum[10][2] = {0};
    for (int64_t begin = 0; begin < count; begin += 16) {
        const int64_t end = count - begin < 16 ? count : begin + 16;
        attend_call(soon, lines);
        for (int64_t d = begin; d < end; d++) {
            VEC y[2];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                y[v] = FN(load_wide)(columns + d * stride + v * LANES);
            }
#pragma GCC unroll 10
            for (int r = 0; r < height; r++) {
                const VEC x = FN(splat)(rows[r * length + d]);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    sum[r][v] += x * y[v];
                }
            }
        }
    }
#pragma GCC unroll 10
    for (int r = 0; r < height; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            A *const at = dots + r * stride + v * LANES;
            FN(store_wide)(at, FN(load_wide)(at) + sum[r][v]);
        }
    }
}

typedef void FN(dots_maker)(const A *, int64_t, const A *, int64_t, int64_t, A *, attend_soon *, int64_t);

#define DOTS_MAKER(name, height, vectors)                                                                             \
    NOINLINE void name(const A *rows, int64_t length, const A *columns, int64_t stride, int64_t count, A *dots,       \
                       attend_soon *soon, int64_t lines) {                                                            \
        FN(dots_tile)(height, vectors, rows, length, columns, stride, count, dots, soon, lines);                      \
    }
DOTS_MAKER(FN(dots_1), DOT_ROWS(1), 1)
DOTS_MAKER(FN(dots_2), DOT_ROWS(2), 2)
DOTS_MAKER(FN(last_dots_1), DOT_TAIL(1), 1)
DOTS_MAKER(FN(last_dots_2), DOT_TAIL(2), 2)
#undef DOTS_MAKER

/* dots[i][k] = rows[i] . column k; behind rows and dots is room for what a tile has more. columns [count, stride] lie
 * with k innermost, so that no sum runs across a vector, and dots too. Numbers are taken 128 at a time: their columns
 * stay in the first-level cache, and no sum has many terms. Meanwhile `soon` is called, a few lines every 16 of them:
 * many at once would stop the loads of the tile. */
NOINLINE void FN(dots_of_columns)(const A *rows, int64_t row_count, int64_t length, const A *columns, int64_t stride,
                                  int64_t column_count, int64_t count, A *dots, attend_soon *soon) {
    const int64_t calls = (count + 15) / 16 * ((row_count + DOT_ROWS(1) - 1) / DOT_ROWS(1));
    const int64_t lines = (soon->count * ((soon->bytes + 63) / 64) + calls - 1) / calls;
    memset(dots, 0, (size_t)((row_count + ATTEND_SPARE) * stride) * sizeof(A));
    for (int64_t d = 0; d < count; d += 128) {
        const int64_t some = count - d < 128 ? count - d : 128;
        for (int64_t k = 0; k < column_count; k += 2 * LANES) {
            const int two = column_count - k > LANES;
            const int64_t high = two ? DOT_ROWS(2) : DOT_ROWS(1), low = two ? DOT_TAIL(2) : DOT_TAIL(1);
            FN(dots_maker) *const make = two ? FN(dots_2) : FN(dots_1);
            FN(dots_maker) *const last = two ? FN(last_dots_2) : FN(last_dots_1);
            for (int64_t i = 0; i < row_count; i += high) {
                (row_count - i > low ? make : last)(rows + i * length + d, length, columns + d * stride + k, stride,
                                                    some, dots + i * stride + k, soon, lines);
            }
        }
    }
}

/* sum[r][v] += sum_j weights[r apart + j step] rows[j], vectors v of rows that lie `length` apart. */
INLINE void FN(sums_tile)(const int vectors, const A *weights, int64_t apart, int64_t step, const A *rows,
                          int64_t length, int64_t count, VEC sum[4][4]) {
    for (int64_t j = 0; j < count; j++) {
        VEC y[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            y[v] = FN(load_wide)(rows + j * length + v * LANES);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const VEC x = FN(splat)(weights[r * apart + j * step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                sum[r][v] += x * y[v];
            }
        }
    }
}

/* Does a tile of `width` numbers after the other, as many vectors at once as there are registers for. */
#undef TILES
#define TILES(width, ...)                                                                                             \
    do {                                                                                                              \
        int64_t d = 0;                                                                                                \
        for (; d + SUM_VECTORS * LANES <= (width); d += SUM_VECTORS * LANES) {                                        \
            __VA_ARGS__(SUM_VECTORS, LANES);                                                                          \
        }                                                                                                             \
        for (; d + 2 * LANES <= (width); d += 2 * LANES) {                                                            \
            __VA_ARGS__(2, LANES);                                                                                    \
        }                                                                                                             \
        for (; d < (width); d += LANES) {                                                                             \
            __VA_ARGS__(1, (width) - d < LANES ? (width) - d : LANES);                                                \
        }                                                                                                             \
    } while (0)

INLINE void FN(query_tile)(const int vectors, const A *slope, int64_t stride, const A *rows, int64_t length,
                           int64_t count, A *total, int64_t n) {
    VEC sum[4][4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sum[k][v] = FN(load_some_wide)(total + k * length + v * LANES, n);
        }
    }
    FN(sums_tile)(vectors, slope, 1, stride, rows, length, count, sum);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            FN(store_some_wide)(total + k * length + v * LANES, sum[k][v], n);
        }
    }
}

/* total[k] += sum_i slope[i][k] rows[i], for every four of the queries. */
NOINLINE void FN(query_gradients)(const A *slope, int64_t stride, int64_t queries, const A *rows, int64_t length,
                                  int64_t count, A *total, int64_t width) {
#define TILE_OF_QUERIES(vectors, n)                                                                                   \
    for (int64_t k = 0; k < queries; k += 4) {                                                                        \
        FN(query_tile)(vectors, slope + k, stride, rows + d, length, count, total + k * length + d, n);               \
    }
    TILES(width, TILE_OF_QUERIES);
#undef TILE_OF_QUERIES
}

/* columns[d][k] = rows[k][d] for k below `count`, whose rows are eight or a multiple, the last of them zeros. */
NOINLINE void FN(turn)(A *columns, int64_t stride, const A *rows, int64_t length, int64_t count, int64_t width) {
    for (int64_t k = 0; k < count; k += 8) {
        for (int64_t d = 0; d < width; d += 8) {
            const A *const from = rows + k * length + d;
            A *const to = columns + d * stride + k;
#if (defined(USE_AVX2) || defined(USE_AVX512)) && !defined(USE_DOUBLE)
            __m256 x[8], y[8];
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                x[r] = _mm256_loadu_ps(from + r * length);
            }
#pragma GCC unroll 4
            for (int r = 0; r < 8; r += 2) { /* pairs of rows, mixed */
                y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]);
                y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
            }
#pragma GCC unroll 2
            for (int r = 0; r < 8; r += 4) { /* fours: columns r and r + 4 of each half */
                x[r] = _mm256_shuffle_ps(y[r], y[r + 2], 0x44);
                x[r + 1] = _mm256_shuffle_ps(y[r], y[r + 2], 0xee);
                x[r + 2] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0x44);
                x[r + 3] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0xee);
            }
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                _mm256_storeu_ps(to + r * stride, _mm256_permute2f128_ps(x[r], x[r + 4], 0x20));
                _mm256_storeu_ps(to + (r + 4) * stride, _mm256_permute2f128_ps(x[r], x[r + 4], 0x31));
            }
#else
            for (int r = 0; r < 8; r++) {
                for (int c = 0; c < 8; c++) {
                    to[c * stride + r] = from[r * length + c];
                }
            }
#endif
        }
    }
}

/* The softmaxes of all queries over the sources for one token and head: logits[i][k] times inverse[i] and exp of it.
 * Each is weighted by scale, less centre; null is the logit of one more entry of each, or NULL. lse [queries] takes the
 * logs of the sums, and nothing [queries] the shares of the nulls. */
NOINLINE void FN(route_many)(const attend_read *read, A *logits, const A *inverse, A *softmax, int64_t stride, A *lse,
                             A *nothing) {
    const A *const null = read->carry_logit;
    for (int64_t k = 0; k < read->queries; k += LANES) {
        const int64_t n = read->queries - k < LANES ? read->queries - k : LANES;
        VEC most = null ? FN(load_some_wide)(null + k, n) : FN(splat)(-INFINITY), total = {0};
        for (int64_t i = 0; i < read->sources; i++) {
            const VEC logit = FN(load_wide)(logits + i * stride + k) * inverse[i];
            FN(store_wide)(logits + i * stride + k, logit);
            most = FN(larger)(logit, most);
        }
        const VEC rest = null ? FN(exponential)(FN(load_some_wide)(null + k, n) - most) : total;
        for (int64_t i = 0; i < read->sources; i++) {
            const VEC power = FN(exponential)(FN(load_wide)(logits + i * stride + k) - most);
            FN(store_wide)(softmax + i * stride + k, power);
            total += power;
        }
        total += rest;
        const VEC share = (A)1 / total;
        for (int64_t i = 0; i < read->sources; i++) {
            FN(store_wide)(softmax + i * stride + k, FN(load_wide)(softmax + i * stride + k) * share);
        }
        FN(store_wide)(nothing + k, rest * share);
        for (int64_t j = 0; j < n; j++) {
            lse[k + j] = most[j] + (A)log((double)total[j]);
        }
    }
}

/* Gradients of the logits from dots[i][k] = out_gradient_k . value_i; `softmax` becomes the weights and dots d logit /
 * rms. pull[i] takes what acts along the value itself, through its norm; above [queries] is the gradient of the
 * log-sums, and nothing [queries], the nulls' shares, becomes the gradients of their logits. */
NOINLINE void FN(route_many_gradient)(const attend_read *read, const A *logits, const A *inverse, A *softmax, A *dots,
                                      int64_t stride, const A *above, A *nothing, A *pull) {
    const A scale = (A)read->scale, centre = read->centred ? 1 / (A)read->sources : 0;
    VEC mean[ATTEND_QUERIES / 4];
    for (int64_t k = 0; k < read->queries; k += LANES) {
        VEC sum = {0};
        for (int64_t i = 0; i < read->sources; i++) {
            sum += FN(load_wide)(softmax + i * stride + k) * FN(load_wide)(dots + i * stride + k);
        }
        mean[k / LANES] = sum;
        FN(store_wide)(nothing + k, FN(load_wide)(nothing + k) * (FN(load_wide)(above + k) - scale * sum));
    }
    for (int64_t i = 0; i < read->sources; i++) {
        VEC along = {0};
        for (int64_t k = 0; k < read->queries; k += LANES) {
            A *const share = softmax + i * stride + k, *const dot = dots + i * stride + k;
            const VEC x = FN(load_wide)(share);
            const VEC slope = x * (scale * (FN(load_wide)(dot) - mean[k / LANES]) + FN(load_wide)(above + k));
            along += slope * FN(load_wide)(logits + i * stride + k);
            FN(store_wide)(dot, slope * inverse[i]);
            FN(store_wide)(share, scale * x - centre);
        }
        pull[i] -= FN(sum)(along) * inverse[i] * inverse[i] / (A)read->width;
    }
}
#endif
