/* Several queries over the same sources, bound by arithmetic: token by token, as products of small matrices.
 *
 * The rows of a token are copied, which makes them wide, puts them where their places in the cache differ, and costs a
 * hundredth of what is then done with them. With V [sources, width] the copies, Q [queries, width] the queries and G
 * the gradients of the reads:
 *
 *     forward    logits = V Q', reads = weights' V
 *     backward   logits = V Q', dots = V G', gradients of V = weights G + slopes Q + pull V, of Q = slopes' V
 */
#include "attend_tiles.h"

INLINE void FN(copy_step)(A *to, int64_t length, const T *const *rows, VEC *square, int64_t d, int64_t n) {
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        const VEC x = FN(load_some)(rows[r] + d, n);
        square[r] += x * x;
        FN(store_some_wide)(to + r * length + d, x, n);
    }
}

/* Eight rows as numbers, a wide copy of each, and their sums of squares. */
NOINLINE void FN(copy_eight)(A *to, int64_t length, const T *const *eight, int64_t width, A *squares) {
    const T *const rows[8] = {eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7]};
    VEC square[8] = {0};
    SWEEP(width, FN(copy_step)(to, length, rows, square, d, n););
    FN(sums_of_8)(square, squares);
}

/* The rows of a token, and 1 / rms of each. */
INLINE void FN(copy_token)(const attend_read *read, int64_t token, A *rows, int64_t length, A *inverse) {
    const T *const *source = (const T *const *)read->source;
    const int64_t width = read->width, last = read->sources - 1;
    for (int64_t i = 0; i <= last; i += 8) {
        const T *eight[8];
        A squares[EIGHT] = {0};
        for (int64_t r = 0; r < 8; r++) {
            eight[r] = source[i + r < last ? i + r : last] + token * width;
        }
        FN(copy_eight)(rows + i * length, length, eight, width, squares);
        for (int64_t r = 0; r < 8; r += LANES) {
            FN(store_wide)(squares + r, FN(rms_inverses)(read, FN(load_wide)(squares + r)));
        }
        memcpy(inverse + i, squares, 8 * sizeof(A));
    }
}

/* The next token's part of rows of such elements; none after the last token. */
INLINE attend_soon FN(next_of)(const attend_read *read, const void *const *rows, int64_t count, int64_t token,
                                     int64_t end, int64_t element) {
    return (attend_soon){.rows = rows, .count = token + 1 < end ? count : 0,
                               .from = (token + 1) * read->width * element, .bytes = read->width * element};
}

/* columns[d][k] = queries[k][d]; `rows`, eight of them, are scratch and left as zeros. */
INLINE void FN(turn_queries)(const attend_read *read, A *columns, int64_t stride, A *rows, int64_t length) {
    const int64_t width = read->width;
    for (int64_t k = 0; k < read->queries; k += 8) {
        memset(rows, 0, (size_t)(8 * length) * sizeof(A));
        for (int64_t r = 0; r < 8 && k + r < read->queries; r++) {
            memcpy(rows + r * length, (const A *)read->query + (k + r) * width, (size_t)width * sizeof(A));
        }
        SHARED(turn)(columns + k, stride, rows, length, 8, width);
    }
    memset(rows, 0, (size_t)(8 * length) * sizeof(A));
}

INLINE void FN(read_tile)(const int vectors, const int wide, const A *weights, int64_t stride, const A *rows,
                          int64_t length, int64_t count, void *const *out, int64_t at, int64_t n, int64_t ahead) {
    VEC sum[4][4] = {0};
    SHARED(sums_tile)(vectors, weights, 1, stride, rows, length, count, sum);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (wide) {
                __builtin_prefetch((A *)out[k] + ahead + at + v * LANES, 1, 2);
                FN(store_some_wide)((A *)out[k] + at + v * LANES, sum[k][v], n);
            } else {
                __builtin_prefetch((T *)out[k] + ahead + at + v * LANES, 1, 2);
                FN(store_some)((T *)out[k] + at + v * LANES, sum[k][v], n);
            }
        }
    }
}

/* out[k] = sum_i weights[i][k] rows[i] for every four of the queries; `ahead` numbers on, the next token's follow. */
INLINE void FN(read_rows)(const int wide, const A *weights, int64_t stride, int64_t queries, const A *rows,
                          int64_t length, int64_t count, void *const *out, int64_t width, int64_t ahead) {
#define TILE_OF_READS(vectors, n)                                                                                     \
    for (int64_t k = 0; k < queries; k += 4) {                                                                        \
        FN(read_tile)(vectors, wide, weights + k, stride, rows + d, length, count, out + k, d, n, ahead);             \
    }
    TILES(width, TILE_OF_READS);
#undef TILE_OF_READS
}

NOINLINE void FN(read_wide)(const A *weights, int64_t stride, int64_t queries, const A *rows, int64_t length,
                            int64_t count, void *const *out, int64_t width, int64_t ahead) {
    FN(read_rows)(1, weights, stride, queries, rows, length, count, out, width, ahead);
}

#ifdef USE_BFLOAT16
NOINLINE void FN(read_narrow)(const A *weights, int64_t stride, int64_t queries, const A *rows, int64_t length,
                              int64_t count, void *const *out, int64_t width, int64_t ahead) {
    FN(read_rows)(0, weights, stride, queries, rows, length, count, out, width, ahead);
}
#endif

static void FN(attend_many)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const attend_room room = attend_room_of(read);
    const int64_t width = read->width, heads = read->heads, slice = width / heads, queries = read->queries;
    const int64_t length = room.length, stride = room.stride;
    A *rows = (A *)(read->scratch + part * read->scratch_bytes); /* [room.rows, length] */
    A *columns = rows + room.rows * length;                      /* [length, stride] */
    A *logits = columns + length * stride;                       /* [room.rows, stride], as the next */
    A *weights = logits + room.rows * stride;
    A *inverse = weights + room.rows * stride; /* [room.rows] */
    A *unwanted = inverse + room.rows;         /* a row for reads that are there to make four */
    A lse[ATTEND_QUERIES], nothing[ATTEND_QUERIES];
    void *out[ATTEND_QUERIES];
    memset(rows, 0, (size_t)read->scratch_bytes);
    FN(turn_queries)(read, columns, stride, rows, length);
    for (int64_t token = begin; token < end; token++) {
        attend_soon soon = FN(next_of)(read, read->source, read->sources, token, end, sizeof(T));
        FN(copy_token)(read, token, rows, length, inverse);
        for (int64_t head = 0; head < heads; head++) {
            const int64_t first = head * slice;
            SHARED(dots_of_columns)(rows + first, read->sources, length, columns + first * stride, stride, queries,
                                    slice, logits, &soon);
            SHARED(route_many)(read, logits, inverse, weights, stride, lse, nothing);
            for (int64_t k = 0; k < queries; k++) {
                if (read->lse) {
                    ((A *)read->lse)[(k * read->tokens + token) * heads + head] = lse[k];
                }
                const A gate = read->gate ? ((const A *)read->gate)[k] : 1;
                const A scale = (A)read->scale, centre = read->centred ? 1 / (A)read->sources : 0;
                for (int64_t i = 0; (read->gate || scale != 1 || read->centred) && i < read->sources; i++) {
                    weights[i * stride + k] = gate * (scale * weights[i * stride + k] - centre);
                }
            }
            for (int64_t k = 0; k < (queries + 3) / 4 * 4; k++) {
                const int64_t element = read->wide ? (int64_t)sizeof(A) : (int64_t)sizeof(T);
                out[k] = k < queries ? (char *)read->out[k] + (token * width + first) * element : (char *)unwanted;
            }
#ifdef USE_BFLOAT16
            (read->wide ? FN(read_wide) : FN(read_narrow))(weights, stride, queries, rows + first, length,
                                                           read->sources, out, slice, width);
#else
            FN(read_wide)(weights, stride, queries, rows + first, length, read->sources, out, slice, width);
#endif
        }
    }
}

/* Numbers of all rows whose gradients are made at once: those of the reads' gradients and of the queries then stay in
 * the first-level cache. Whole tiles, and whole lines where they are streamed. */
#undef GRADIENT_BLOCK
#define GRADIENT_BLOCK ((BYTES == 64 ? 2 : 4) * SUM_VECTORS * LANES)

/* The gradients of four sources: what is to be added to them, where they go, and what makes them. */
typedef struct {
    const A *weights, *slopes, *pull; /* [4, stride] and [4] */
    const A *value;                   /* [4, length] */
    const T *before[4];               /* rows, each may be NULL */
    const T *soon[4];                 /* rows that are added next, to be fetched */
    T *made[4];
} FN(four_gradients);

INLINE void FN(gradient_tile)(const int vectors, const int streamed, const attend_read *read, int64_t stride,
                              int64_t length, const FN(four_gradients) * four, const A *out_gradient, const A *query,
                              int64_t d, int64_t n) {
    VEC sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sum[r][v] = four->pull[r] * FN(load_wide)(four->value + r * length + d + v * LANES);
            if (four->before[r]) {
                sum[r][v] += FN(load_some)(four->before[r] + d + v * LANES, n);
            }
        }
    }
    SHARED(sums_tile)(vectors, four->weights, stride, 1, out_gradient + d, length, read->queries, sum);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            __builtin_prefetch(four->soon[r] + d + v * LANES, 0, 3);
        }
    }
    SHARED(sums_tile)(vectors, four->slopes, stride, 1, query + d, length, read->queries, sum);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (streamed) {
                FN(stream)(four->made[r] + d + v * LANES, sum[r][v]);
            } else {
                FN(store_some)(four->made[r] + d + v * LANES, sum[r][v], n);
            }
        }
    }
}

NOINLINE void FN(four_rows)(const attend_read *read, int64_t stride, int64_t length, const FN(four_gradients) * four,
                            const A *out_gradient, const A *query, int64_t width) {
#define TILE_OF_GRADIENTS(vectors, n)                                                                                 \
    FN(gradient_tile)(vectors, 0, read, stride, length, four, out_gradient, query, d, n)
    TILES(width, TILE_OF_GRADIENTS);
#undef TILE_OF_GRADIENTS
}

NOINLINE void FN(four_rows_streamed)(const attend_read *read, int64_t stride, int64_t length,
                                     const FN(four_gradients) * four, const A *out_gradient, const A *query,
                                     int64_t width) {
#define TILE_OF_GRADIENTS(vectors, n)                                                                                 \
    FN(gradient_tile)(vectors, 1, read, stride, length, four, out_gradient, query, d, LANES)
    TILES(width, TILE_OF_GRADIENTS);
#undef TILE_OF_GRADIENTS
}

static void FN(attend_many_gradient)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const attend_room room = attend_room_of(read);
    const int64_t width = read->width, heads = read->heads, slice = width / heads, sources = read->sources;
    const int64_t queries = read->queries, length = room.length, stride = room.stride, block = room.rows * stride;
    const T *const *before = (const T *const *)read->before;
    T *const *gradient = (T *const *)read->gradient;
    A *rows = (A *)(read->scratch + part * read->scratch_bytes); /* [room.rows, length] */
    A *columns = rows + room.rows * length, *turned = columns + length * stride; /* [length, stride] */
    A *out_gradient = turned + length * stride;                                  /* [stride, length], as the next two */
    A *query = out_gradient + stride * length, *query_gradient = query + stride * length;
    A *logits = query_gradient + stride * length;                   /* [room.rows, stride] */
    A *weights = logits + block, *slopes = weights + heads * block; /* [heads, room.rows, stride] */
    A *inverse = slopes + heads * block, *pull = inverse + room.rows;
    T *unwanted = (T *)(pull + room.rows);
    double *totals = read->totals + part * queries * (width + 1);
    const A *lse_gradient = read->lse_gradient;
    A lse[ATTEND_QUERIES], nothing[ATTEND_QUERIES], above[ATTEND_QUERIES] = {0};
    int streamed = read->streamed && slice % LANES == 0;
    for (int64_t i = 0; i < sources; i++) {
        streamed = streamed && gradient[i] && FN(can_stream)(gradient[i]);
    }
    memset(rows, 0, (size_t)read->scratch_bytes);
    FN(turn_queries)(read, columns, stride, rows, length);
    for (int64_t k = 0; k < queries; k++) {
        memcpy(query + k * length, (const A *)read->query + k * width, (size_t)width * sizeof(A));
    }
    const int64_t element = read->wide ? (int64_t)sizeof(A) : (int64_t)sizeof(T); /* of a read's gradient */
    const int64_t fours = (sources + 3) / 4 * 4, ahead = (64 / queries + 3) / 4 * 4; /* rows, some 300 ns of them */
    for (int64_t token = begin; token < end; token++) {
        attend_soon soon = FN(next_of)(read, read->source, sources, token, end, sizeof(T));
        attend_soon above_soon = FN(next_of)(read, read->out_gradient, queries, token, end, element);
        FN(copy_token)(read, token, rows, length, inverse);
        for (int64_t k = 0; k < queries; k++) {
            const int64_t at = token * width;
            if (read->wide) {
                memcpy(out_gradient + k * length, (const A *)read->out_gradient[k] + at, (size_t)width * sizeof(A));
            } else {
                FN(copy_wide)(out_gradient + k * length, (const T *)read->out_gradient[k] + at, width);
            }
        }
        SHARED(turn)(turned, stride, out_gradient, length, queries, width);
        memset(pull, 0, (size_t)room.rows * sizeof(A));
        for (int64_t head = 0; head < heads; head++) {
            const int64_t first = head * slice;
            A *const weight = weights + head * block, *const slope = slopes + head * block;
            for (int64_t k = 0; lse_gradient && k < queries; k++) {
                above[k] = lse_gradient[(k * read->tokens + token) * heads + head];
            }
            SHARED(dots_of_columns)(rows + first, read->sources, length, columns + first * stride, stride, queries,
                                    slice, logits, &soon);
            SHARED(dots_of_columns)(rows + first, sources, length, turned + first * stride, stride, queries, slice,
                                    slope, &above_soon);
            SHARED(route_many)(read, logits, inverse, weight, stride, lse, nothing);
            SHARED(route_many_gradient)(read, logits, inverse, weight, slope, stride, above, nothing, pull);
            for (int64_t k = 0; k < queries; k++) {
                totals[k * (width + 1) + width] += nothing[k];
            }
            SHARED(query_gradients)(slope, stride, queries, rows + first, length, sources, query_gradient + first,
                                    slice);
        }
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t begun = 0; begun < slice; begun += GRADIENT_BLOCK) {
                const int64_t first = head * slice + begun, at = token * width + first;
                const int64_t some = slice - begun < GRADIENT_BLOCK ? slice - begun : GRADIENT_BLOCK;
                for (int64_t i = 0; i < sources; i += 4) {
                    const int64_t place = head * block + i * stride;
                    FN(four_gradients) four = {.weights = weights + place, .slopes = slopes + place, .pull = pull + i,
                                               .value = rows + i * length + first};
                    for (int64_t r = 0; r < 4; r++) {
                        const int here = i + r < sources;
                        four.made[r] = here && gradient[i + r] ? gradient[i + r] + at : unwanted;
                        four.before[r] = here && before && before[i + r] ? before[i + r] + at : NULL;
                        const int64_t next = i + ahead + r, again = next < fours ? 0 : fours, j = next - again;
                        four.soon[r] = before && j < sources && before[j] ? before[j] + at + (again ? some : 0)
                                                                          : unwanted;
                    }
                    (streamed && i + 4 <= sources ? FN(four_rows_streamed) : FN(four_rows))(
                        read, stride, length, &four, out_gradient + first, query + first, some);
                }
            }
        }
        if ((token - begin) % 64 == 63 || token + 1 == end) {
            for (int64_t k = 0; k < queries; k++) {
                FN(settle)(totals + k * (width + 1), query_gradient + k * length, width);
            }
        }
    }
    if (streamed) {
        FN(stream_end)();
    }
}
