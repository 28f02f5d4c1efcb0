/* One query and one head, in one pass over the sources, each read as one long stream.
 *
 * Forward: softmax online. A tile of running sums stays in the cache; a token's rows of four sources are dotted, and added
 * to its sum while they are in the first-level cache. Backward: with the log-sum and what was read, sum_n a_n p_n is
 * known beforehand, so that eight rows of a source are dotted, weighted and pulled back at once. (Walking a few tokens of all
 * sources instead, to find them in the cache the second time, fails where sources are a power of two apart: they share
 * its sets.)
 */
INLINE void FN(eight_exponentials)(A *x) {
#if LANES == 8
    FN(store_wide)(x, FN(exponential)(FN(load_wide)(x)));
#else
    for (int t = 0; t < 8; t++) {
        x[t] = exp(x[t]);
    }
#endif
}

/* As dots; fetches two of the rows that are wanted soon, and add_rows the other two: the memory never rests. */
NOINLINE void FN(dots_of_4_sources)(const T *const *four, const A *vector, int64_t width, int64_t ahead, A *dot,
                                    A *square) {
    const T *const rows[4] = {four[0], four[1], four[2], four[3]};
    VEC sum[4][4] = {0}, squares[4] = {0};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        __builtin_prefetch(rows[0] + d + ahead, 0, 2);
        FN(dots_step)(4, rows, 1, &vector, d, LANES, sum, squares);
        __builtin_prefetch(rows[1] + d + ahead, 0, 2);
        FN(dots_step)(4, rows, 1, &vector, d + LANES, LANES, sum, squares);
    }
    for (; d < width; d += LANES) {
        FN(dots_step)(4, rows, 1, &vector, d, width - d < LANES ? width - d : LANES, sum, squares);
    }
    for (int s = 0; s < 4; s++) {
        dot[s] = FN(sum)(sum[s][0]);
        square[s] = FN(sum)(squares[s]);
    }
}

INLINE void FN(add_step)(A *sum, VEC keep, const T *const *rows, const VEC *share, int64_t d, int64_t n) {
    VEC x = keep * FN(take_wide)(sum + d, n);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
        x += share[s] * FN(take)(rows[s] + d, n);
    }
    FN(give_wide)(sum + d, x, n);
}

/* sum = keep sum + share[s] rows[s]; meanwhile the rows that are wanted soon are on their way. */
NOINLINE void FN(add_rows)(A *sum, A kept, const T *const *four, const A *shares, int64_t width, int64_t ahead) {
    const VEC keep = FN(splat)(kept);
    const T *const rows[4] = {four[0], four[1], four[2], four[3]}; /* copies that no store can alias */
    const VEC share[4] = {FN(splat)(shares[0]), FN(splat)(shares[1]), FN(splat)(shares[2]), FN(splat)(shares[3])};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        __builtin_prefetch(rows[2] + d + ahead, 0, 2);
        FN(add_step)(sum, keep, rows, share, d, LANES);
        __builtin_prefetch(rows[3] + d + ahead, 0, 2);
        FN(add_step)(sum, keep, rows, share, d + LANES, LANES);
    }
    for (; d < width; d += LANES) {
        FN(add_step)(sum, keep, rows, share, d, width - d < LANES ? width - d : LANES);
    }
}

static void FN(attend_stream)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, sources = read->sources, ahead = attend_ahead(width, sizeof(T));
    const T *const *source = (const T *const *)read->source;
    const A *query = read->query, *carry = read->carry_logit;
    A *most = (A *)(read->scratch + part * read->scratch_bytes), *total = most + read->tile; /* [tile] */
    A *sums = total + read->tile;                                                            /* [tile, width] */
    for (int64_t first = begin; first < end; first += read->tile) {
        const int64_t count = end - first < read->tile ? end - first : read->tile;
        for (int64_t t = 0; t < count; t++) {
            most[t] = carry ? carry[read->carry_steps ? first + t : 0] : -INFINITY;
            total[t] = carry != NULL;
            if (read->carry_value) {
                FN(copy_wide)(sums + t * width, (const T *)read->carry_value + (first + t) * width, width);
            } else {
                memset(sums + t * width, 0, (size_t)width * sizeof(A));
            }
        }
        for (int64_t i = 0; i < sources; i += 4) {
            const int64_t some = sources - i < 4 ? sources - i : 4;
            for (int64_t t = 0; t < count; t++) {
                const T *rows[4];
                A square[4], dot[4], power[8] = {0}; /* of the four sources, then of the sum so far */
                for (int64_t s = 0; s < 4; s++) {
                    rows[s] = source[i + (s < some ? s : 0)] + (first + t) * width;
                }
                FN(dots_of_4_sources)(rows, query, width, ahead, dot, square);
                A large = most[t];
                for (int64_t s = 0; s < some; s++) {
                    power[s] = dot[s] * FN(rms_inverse)(read, square[s]);
                    large = power[s] > large ? power[s] : large;
                }
                for (int64_t s = 0; s < some; s++) {
                    power[s] -= large;
                }
                power[4] = most[t] - large;
                most[t] = large;
                FN(eight_exponentials)(power);
                for (int64_t s = some; s < 4; s++) {
                    power[s] = 0;
                }
                total[t] = total[t] * power[4] + ((power[0] + power[1]) + (power[2] + power[3]));
                FN(add_rows)(sums + t * width, power[4], rows, power, width, ahead);
            }
        }
        for (int64_t t = 0; t < count; t++) {
            FN(scale_row)((T *)read->out[0] + (first + t) * width, sums + t * width, (A)read->scale / total[t], width);
            if (read->lse) {
                ((A *)read->lse)[first + t] = most[t] + (A)log((double)total[t]);
            }
        }
    }
}

INLINE void FN(pull_step)(const int rows, const int vectors, const int streamed, const T *value, const A *out_gradient,
                          const A *query, const VEC *weight, const VEC *slope, const VEC *pull, T *gradient,
                          A *query_gradient, int64_t width, int64_t d, int64_t n) {
    VEC sum[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        sum[v] = FN(take_wide)(query_gradient + d + v * LANES, n);
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * width + d + v * LANES;
            const VEC x = FN(take)(value + at, n);
            const VEC y = weight[r] * FN(take_wide)(out_gradient + at, n) +
                          (slope[r] * FN(take_wide)(query + d + v * LANES, n) + pull[r] * x);
            sum[v] += slope[r] * x;
            if (streamed) {
                FN(stream)(gradient + at, y);
            } else {
                FN(give)(gradient + at, y, n);
            }
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        FN(give_wide)(query_gradient + d + v * LANES, sum[v], n);
    }
}

/* gradient = weight out_gradient + slope query + pull value and query_gradient += slope value, for one or two rows that
 * follow each other; meanwhile the row that is wanted eight rows from now is on its way. */
INLINE void FN(pull_rows)(const int rows, const int streamed, const T *value, const A *out_gradient, const A *query,
                          const A *weights, const A *slopes, const A *pulls, T *gradient, A *query_gradient,
                          int64_t width) {
    const int line = 64 / (LANES * sizeof(T)); /* vectors: a store past the cache wants whole lines */
    VEC weight[2], slope[2], pull[2];
    int64_t d = 0;
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        weight[r] = FN(splat)(weights[r]), slope[r] = FN(splat)(slopes[r]), pull[r] = FN(splat)(pulls[r]);
    }
    for (; d + line * LANES <= width; d += line * LANES) {
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            __builtin_prefetch(value + (8 + r) * width + d, 0, 2);
        }
        FN(pull_step)(rows, line, streamed, value, out_gradient, query, weight, slope, pull, gradient, query_gradient,
                      width, d, LANES);
    }
    for (; d < width; d += LANES) {
        FN(pull_step)(rows, 1, 0, value, out_gradient, query, weight, slope, pull, gradient, query_gradient, width, d,
                      width - d < LANES ? width - d : LANES);
    }
}

NOINLINE void FN(pull_2_rows_streamed)(const T *value, const A *out_gradient, const A *query, const A *weight,
                                         const A *slope, const A *pull, T *gradient, A *query_gradient, int64_t width) {
    FN(pull_rows)(2, 1, value, out_gradient, query, weight, slope, pull, gradient, query_gradient, width);
}

NOINLINE void FN(pull_2_rows)(const T *value, const A *out_gradient, const A *query, const A *weight, const A *slope,
                                const A *pull, T *gradient, A *query_gradient, int64_t width) {
    FN(pull_rows)(2, 0, value, out_gradient, query, weight, slope, pull, gradient, query_gradient, width);
}

NOINLINE void FN(pull_1_row)(const T *value, const A *out_gradient, const A *query, const A *weight, const A *slope,
                                const A *pull, T *gradient, A *query_gradient, int64_t width) {
    FN(pull_rows)(1, 0, value, out_gradient, query, weight, slope, pull, gradient, query_gradient, width);
}

static void FN(attend_stream_gradient)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width;
    const T *const *source = (const T *const *)read->source;
    const A *query = read->query, *lse = read->lse, *carry = read->carry_logit;
    const A scale = (A)read->scale;
    A *mean = (A *)(read->scratch + part * read->scratch_bytes), *explained = mean + read->tile; /* [tile] */
    A *query_gradient = explained + read->tile, *scratch = query_gradient + width; /* the second [tile, width] */
    T *unwanted = (T *)(scratch + read->tile * width);                             /* [2, width] */
    double *totals = read->totals + part * (width + 1);
    memset(query_gradient, 0, (size_t)width * sizeof(A));
    for (int64_t first = begin; first < end; first += read->tile) {
        const int64_t count = end - first < read->tile ? end - first : read->tile;
        const A *out_gradient =
            FN(wide_rows)(scratch, (const T *)read->out_gradient[0] + first * width, count * width);
        for (int64_t t = 0; t < count; t++) {
            const T *out = (const T *)read->read + (first + t) * width;
            FN(dot_and_square)(out, out_gradient + t * width, width, mean + t);
            mean[t] /= scale;
        }
        memset(explained, 0, (size_t)count * sizeof(A));
        for (int64_t i = 0; i < read->sources; i++) {
            T *const made = read->gradient[i] ? (T *)read->gradient[i] + first * width : NULL;
            const int streamed = read->streamed && made && width % LANES == 0 && FN(can_stream)(made);
            for (int64_t t = 0; t < count; t += 8) {
                const int64_t rows = count - t < 8 ? count - t : 8;
                const T *row = source[i] + (first + t) * width;
                A logit[8] = {0}, inverse[8], dot[2], dots[8] = {0}, weight[8] = {0}, slope[8], pull[8];
                for (int64_t r = 0; r < rows; r++) {
                    inverse[r] = FN(dots_and_square)(row + r * width, query, out_gradient + (t + r) * width, width, dot);
                    logit[r] = dot[0];
                    dots[r] = dot[1];
                }
                for (int64_t r = 0; r < rows; r++) {
                    inverse[r] = FN(rms_inverse)(read, inverse[r]);
                    logit[r] *= inverse[r];
                    weight[r] = logit[r] - lse[first + t + r];
                }
                FN(eight_exponentials)(weight);
                for (int64_t r = 0; r < rows; r++) {
                    explained[t + r] += weight[r] * dots[r];
                    weight[r] *= scale;
                    slope[r] = weight[r] * (dots[r] - mean[t + r]) * inverse[r];
                    pull[r] = -slope[r] * logit[r] * inverse[r] / (A)width;
                }
                for (int64_t r = 0; r < rows; r += 2) {
                    T *out = made ? made + (t + r) * width : unwanted;
                    (r + 1 == rows ? FN(pull_1_row) : streamed ? FN(pull_2_rows_streamed) : FN(pull_2_rows))(
                        row + r * width, out_gradient + (t + r) * width, query, weight + r, slope + r, pull + r, out,
                        query_gradient, width);
                }
            }
            FN(settle)(totals, query_gradient, width);
        }
        for (int64_t t = 0; carry && t < count; t++) {
            /* mean is made of every entry of the softmax: what the sources leave of it is the carry's, 0 for a null */
            A share[8] = {carry[read->carry_steps ? first + t : 0] - lse[first + t]};
            FN(eight_exponentials)(share);
            if (read->carry_steps) {
                const A slope = scale * (mean[t] - explained[t] - share[0] * mean[t]);
                ((A *)read->carry_logit_gradient)[first + t] = slope;
                FN(scale_row)((T *)read->carry_gradient + (first + t) * width, out_gradient + t * width,
                              scale * share[0], width);
            } else {
                totals[width] -= scale * share[0] * mean[t];
            }
        }
    }
    if (read->streamed) {
        FN(stream_end)();
    }
}
