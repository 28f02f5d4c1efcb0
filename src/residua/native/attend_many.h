/* Several queries over the same sources, bound by arithmetic: token by token, every number loaded used many times. */
enum { FN(ROWS) = 16 }; /* that stay in the first-level cache while four vectors after four go by */

NOINLINE void FN(dots_of_2_by_4)(const T *const *rows, const A *const *vectors, int64_t width, A dot[2][4]) {
    FN(dots)(rows, vectors, width, dot, NULL);
}

NOINLINE void FN(dots_of_2_by_4_and_squares)(const T *const *rows, const A *const *vectors, int64_t width, A dot[2][4],
                                             A *square) {
    FN(dots)(rows, vectors, width, dot, square);
}

NOINLINE void FN(mix_four)(const T *const *rows, int64_t count, const A *const *weights, T *const *out, int64_t at,
                           int64_t width) {
    FN(mix)(4, rows, count, weights, out, at, width);
}

/* place(v)[i] = rows[i] . vectors[v] for v, .., v + 3 of `count` and the rows first..last of one head; squares of the
 * rows are added up with the first vectors, and the rows of the next token called if it is not the last. */
INLINE void FN(dots_of_rows)(const attend_read *read, int64_t first, int64_t last, int64_t at, int64_t slice,
                             const A *const *vectors, int64_t v, int64_t count, int64_t offset, A *places,
                             A *squares, int more) {
    const T *const *source = (const T *const *)read->source;
    const A *some[4];
    for (int64_t k = 0; k < 4; k++) {
        some[k] = vectors[v + k < count ? v + k : v] + offset;
    }
    for (int64_t i = first; i < last; i += 2) {
        const int two = i + 1 < last;
        const T *rows[2] = {source[i] + at, source[i + two] + at};
        A dot[2][4];
        if (v == 0) {
            if (more) {
                attend_prefetch(rows[0] + read->width, slice * (int64_t)sizeof(T));
                attend_prefetch(rows[1] + read->width, slice * (int64_t)sizeof(T));
            }
            FN(dots_of_2_by_4_and_squares)(rows, some, slice, dot, squares + i - first);
        } else {
            FN(dots_of_2_by_4)(rows, some, slice, dot);
        }
        for (int64_t k = v; k < v + 4 && k < count; k++) {
            for (int r = 0; r <= two; r++) {
                places[k * read->stride + i + r] = dot[r][k - v];
            }
        }
    }
}

/* The logits of every query and 1 / rms of every source for one token; `vectors` are the queries, and more vectors
 * whose dots are wanted beside theirs. */
INLINE void FN(token_dots)(const attend_read *read, int64_t token, int64_t end, const A *const *vectors, int64_t count,
                           A *places, A *inverse) {
    const int64_t width = read->width, heads = read->heads, slice = width / heads, stride = read->stride;
    for (int64_t first = 0; first < read->sources; first += FN(ROWS)) {
        const int64_t last = first + FN(ROWS) < read->sources ? first + FN(ROWS) : read->sources;
        A squares[FN(ROWS)] = {0};
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t v = 0; v < count; v += 4) {
                FN(dots_of_rows)(read, first, last, token * width + head * slice, slice, vectors, v, count,
                                 head * slice, places + head * count * stride, squares, token + 1 < end);
            }
        }
        for (int64_t i = first; i < last; i++) {
            inverse[i] = FN(rms_inverse)(read, squares[i - first]);
        }
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t k = 0; k < read->queries; k++) {
            A *row = places + (head * count + k) * stride;
            for (int64_t i = 0; i < read->sources; i++) {
                row[i] *= inverse[i];
            }
        }
    }
}

static void FN(attend_many)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, heads = read->heads, slice = width / heads;
    const int64_t stride = read->stride, queries = read->queries;
    const T *const *source = (const T *const *)read->source;
    A *inverse = (A *)(read->scratch + part * read->scratch_bytes), *logits = inverse + stride;
    const A *vectors[ATTEND_QUERIES];
    for (int64_t k = 0; k < queries; k++) {
        vectors[k] = (const A *)read->query + k * width;
    }
    for (int64_t token = begin; token < end; token++) {
        FN(token_dots)(read, token, end, vectors, queries, logits, inverse);
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = token * width + head * slice;
            const A *weights[ATTEND_QUERIES];
            for (int64_t k = 0; k < queries; k++) {
                A *row = logits + (head * queries + k) * stride;
                const A sum = FN(routed)(read, row, k, token, head);
                if (read->lse) {
                    ((A *)read->lse)[(k * read->tokens + token) * heads + head] = sum;
                }
                FN(weighted)(read, row);
                for (int64_t i = 0; read->gate && i < read->sources; i++) {
                    row[i] *= ((const A *)read->gate)[k];
                }
                weights[k] = row;
            }
            int64_t k = 0;
            for (; k + 4 <= queries; k += 4) {
                FN(mix_four)(source, read->sources, weights + k, (T *const *)read->out + k, at, slice);
            }
            for (; k < queries; k++) {
                FN(mix_one)(source, read->sources, weights[k], read->out[k], at, slice);
            }
        }
    }
}

/* gradient[r] = before[r] + sum_k (weight[k][r] out_gradient[k] + slope[k][r] query[k]) + pull[r] value[r], for
 * `vectors` times n numbers. */
INLINE void FN(gather)(const int rows, const int vectors, const int streamed, const attend_read *read,
                       const T *const *value, const T *const *before, const A *const *out_gradient, const A *query,
                       const A *weight, const A *slope, const A *pull, T *const *gradient, int64_t d, int64_t n) {
    VEC sum[2][4];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sum[r][v] = pull[r] * FN(load_some)(value[r] + d + v * LANES, n);
            if (before[r]) {
                sum[r][v] += FN(load_some)(before[r] + d + v * LANES, n);
            }
        }
    }
    for (int64_t k = 0; k < read->queries; k++) {
        const A *g = out_gradient[k] + d, *w = query + k * read->width + d;
        const A *ours = weight + k * read->stride, *theirs = slope + k * read->stride;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const VEC x = FN(load_some_wide)(g + v * LANES, n), y = FN(load_some_wide)(w + v * LANES, n);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                sum[r][v] += ours[r] * x;
                sum[r][v] += theirs[r] * y;
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (streamed) {
                FN(stream)(gradient[r] + d + v * LANES, sum[r][v]);
            } else {
                FN(store_some)(gradient[r] + d + v * LANES, sum[r][v], n);
            }
        }
    }
}

INLINE void FN(gather_rows)(const int rows, const int streamed, const attend_read *read, const T *const *value,
                            const T *const *before, const A *const *out_gradient, const A *query, const A *weight,
                            const A *slope, const A *pull, T *const *gradient, int64_t width) {
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES) {
        FN(gather)(rows, 4, streamed, read, value, before, out_gradient, query, weight, slope, pull, gradient, d, LANES);
    }
    for (; d + LANES <= width; d += LANES) {
        FN(gather)(rows, 1, streamed, read, value, before, out_gradient, query, weight, slope, pull, gradient, d, LANES);
    }
    if (d < width) {
        FN(gather)(rows, 1, 0, read, value, before, out_gradient, query, weight, slope, pull, gradient, d, width - d);
    }
}

NOINLINE void FN(gather_2_streamed)(const attend_read *read, const T *const *value, const T *const *before,
                                    const A *const *out_gradient, const A *query, const A *weight, const A *slope,
                                    const A *pull, T *const *gradient, int64_t width) {
    FN(gather_rows)(2, 1, read, value, before, out_gradient, query, weight, slope, pull, gradient, width);
}

NOINLINE void FN(gather_2)(const attend_read *read, const T *const *value, const T *const *before,
                           const A *const *out_gradient, const A *query, const A *weight, const A *slope,
                           const A *pull, T *const *gradient, int64_t width) {
    FN(gather_rows)(2, 0, read, value, before, out_gradient, query, weight, slope, pull, gradient, width);
}

INLINE void FN(query_step)(const int queries, const int vectors, const attend_read *read, const A *slope, A *total,
                           int64_t at, int64_t d, int64_t n) {
    const T *const *source = (const T *const *)read->source;
    VEC sum[4][2];
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            sum[k][v] = FN(load_some_wide)(total + k * read->width + d + v * LANES, n);
        }
    }
    for (int64_t i = 0; i < read->sources; i++) {
        VEC x[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            x[v] = FN(load_some)(source[i] + at + d + v * LANES, n);
        }
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++) {
            const VEC weight = FN(splat)(slope[k * read->stride + i]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                sum[k][v] += weight * x[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            FN(store_some_wide)(total + k * read->width + d + v * LANES, sum[k][v], n);
        }
    }
}

/* total[k] += sum_i slope[k][i] value_i, for 1 or 4 queries. */
INLINE void FN(query_gradient)(const int queries, const attend_read *read, const A *slope, A *total, int64_t at,
                               int64_t width) {
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        FN(query_step)(queries, 2, read, slope, total, at, d, LANES);
    }
    for (; d < width; d += LANES) {
        FN(query_step)(queries, 1, read, slope, total, at, d, width - d < LANES ? width - d : LANES);
    }
}

NOINLINE void FN(query_gradient_of_4)(const attend_read *read, const A *slope, A *total, int64_t at, int64_t width) {
    FN(query_gradient)(4, read, slope, total, at, width);
}

NOINLINE void FN(query_gradient_of_1)(const attend_read *read, const A *slope, A *total, int64_t at, int64_t width) {
    FN(query_gradient)(1, read, slope, total, at, width);
}

static void FN(attend_many_gradient)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, heads = read->heads, slice = width / heads, sources = read->sources;
    const int64_t stride = read->stride, queries = read->queries, block = queries * stride;
    const T *const *source = (const T *const *)read->source, *const *before = (const T *const *)read->before;
    T *const *gradient = (T *const *)read->gradient;
    A *places = (A *)(read->scratch + part * read->scratch_bytes); /* [heads, logits and dots, queries, stride] */
    A *rows = places + 2 * heads * block;                          /* [heads, queries, stride] */
    A *inverse = rows + heads * block, *pull = inverse + stride;
    A *query_gradient = pull + stride, *scratch = query_gradient + queries * width;
    T *unwanted = (T *)(scratch + queries * width);
    double *totals = read->totals + part * queries * (width + 1);
    const A *vectors[2 * ATTEND_QUERIES], *lse_gradient = read->lse_gradient;
    int streamed = read->streamed && slice % LANES == 0;
    for (int64_t i = 0; i < sources; i++) {
        streamed = streamed && gradient[i] && FN(can_stream)(gradient[i]);
    }
    memset(query_gradient, 0, (size_t)(queries * width) * sizeof(A));
    for (int64_t token = begin; token < end; token++) {
        for (int64_t k = 0; k < queries; k++) {
            const T *row = (const T *)read->out_gradient[k] + token * width;
            vectors[k] = (const A *)read->query + k * width;
            vectors[queries + k] = FN(wide_rows)(scratch + k * width, row, width);
            if (token + 1 < end) {
                attend_prefetch(row + width, width * (int64_t)sizeof(T));
            }
        }
        FN(token_dots)(read, token, end, vectors, 2 * queries, places, inverse);
        memset(pull, 0, (size_t)sources * sizeof(A));
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t k = 0; k < queries; k++) {
                A *row = rows + head * block + k * stride, *logit = places + 2 * head * block + k * stride;
                memcpy(row, logit, (size_t)sources * sizeof(A));
                FN(routed)(read, row, k, token, head);
                totals[k * (width + 1) + width] += FN(route_gradient)(
                    read, row, logit, logit + block, inverse, pull, 0,
                    lse_gradient ? lse_gradient[(k * read->tokens + token) * heads + head] : 0);
            }
        }
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = token * width + head * slice;
            const A *query = (const A *)read->query + head * slice;
            const A *weight = rows + head * block, *slope = places + (2 * head + 1) * block;
            const A *out_gradient[ATTEND_QUERIES];
            for (int64_t k = 0; k < queries; k++) {
                out_gradient[k] = vectors[queries + k] + head * slice;
            }
            for (int64_t i = 0; i < sources; i += 2) {
                const int two = i + 1 < sources;
                const T *value[2] = {source[i] + at, source[i + two] + at}, *added[2] = {NULL, NULL};
                T *made[2] = {unwanted, unwanted};
                for (int r = 0; r <= two; r++) {
                    made[r] = gradient[i + r] ? gradient[i + r] + at : unwanted;
                    added[r] = before && before[i + r] ? before[i + r] + at : NULL;
                }
                (streamed && two ? FN(gather_2_streamed) : FN(gather_2))(
                    read, value, added, out_gradient, query, weight + i, slope + i, pull + i, made, slice);
            }
            int64_t k = 0;
            for (; k + 4 <= queries; k += 4) {
                FN(query_gradient_of_4)(read, slope + k * stride, query_gradient + k * width + head * slice, at, slice);
            }
            for (; k < queries; k++) {
                FN(query_gradient_of_1)(read, slope + k * stride, query_gradient + k * width + head * slice, at, slice);
            }
        }
        if ((token - begin) % 64 == 63 || token + 1 == end) {
            for (int64_t k = 0; k < queries; k++) {
                FN(settle)(totals + k * (width + 1), query_gradient + k * width, width);
            }
        }
    }
    if (streamed) {
        FN(stream_end)();
    }
}
