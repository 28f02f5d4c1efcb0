/* One query and one head, in one pass over the sources, each read as one long stream.
 *
 * Forward: softmax online. A tile of running sums stays in the cache; a token's rows of four sources are dotted, and added
 * to its sum while they are in the first-level cache. Backward: with the log-sum and what was read, sum_n a_n p_n is
 * known beforehand, so that eight rows of a source are dotted, weighted and pulled back at once. (Walking a few tokens of all
 * sources instead, to find them in the cache the second time, fails where sources are a power of two apart: they share
 * its sets.)
 */
/* As dots, to eight: the dots, then the squares. Fetches two of the rows that are wanted soon, and add_rows the other
 * two: the memory never rests. */
NOINLINE void FN(dots_of_4_sources)(const T *const *four, const A *vector, int64_t width, int64_t ahead, A *eight) {
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
    const VEC all[8] = {sum[0][0], sum[1][0], sum[2][0], sum[3][0], squares[0], squares[1], squares[2], squares[3]};
    FN(sums_of_8)(all, eight);
}

/* power = exp of the first four, and of what is left of the sum so far; made in registers, since a vector cannot be
 * loaded before numbers that were just stored one by one. */
INLINE void FN(five_powers)(A *power, const A *logit, A large, A most) {
#if LANES >= 8
    const VEC x = {logit[0] - large, logit[1] - large, logit[2] - large, logit[3] - large, most - large};
#else
    const VEC x = {logit[0] - large, logit[1] - large, logit[2] - large, logit[3] - large};
    power[4] = exp(most - large);
#endif
    FN(store_wide)(power, FN(exponential)(x));
}

INLINE void FN(add_step)(const int first, const int last, A *sum, VEC keep, const T *const *rows, const VEC *share,
                         T *out, VEC scale, int64_t d, int64_t n) {
    VEC x = share[0] * FN(load_some)(rows[0] + d, n);
    if (!first) {
        x += keep * FN(load_some_wide)(sum + d, n);
    }
#pragma GCC unroll 4
    for (int s = 1; s < 4; s++) {
        x += share[s] * FN(load_some)(rows[s] + d, n);
    }
    if (last) {
        FN(store_some)(out + d, scale * x, n);
    } else {
        FN(store_some_wide)(sum + d, x, n);
    }
}

/* sum = power[4] sum + power[s] rows[s], the first without the old sum and the last to out, scaled; meanwhile the rows
 * that are wanted soon are on their way. */
INLINE void FN(add_rows)(const int first, const int last, A *sum, const T *const *four, const A *power, T *out, A scaled,
                         int64_t width, int64_t ahead) {
    const VEC keep = FN(splat)(power[4]), scale = FN(splat)(scaled);
    const T *const rows[4] = {four[0], four[1], four[2], four[3]}; /* copies that no store can alias */
    const VEC share[4] = {FN(splat)(power[0]), FN(splat)(power[1]), FN(splat)(power[2]), FN(splat)(power[3])};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        __builtin_prefetch(rows[2] + d + ahead, 0, 2);
        FN(add_step)(first, last, sum, keep, rows, share, out, scale, d, LANES);
        __builtin_prefetch(rows[3] + d + ahead, 0, 2);
        FN(add_step)(first, last, sum, keep, rows, share, out, scale, d + LANES, LANES);
    }
    for (; d < width; d += LANES) {
        FN(add_step)(first, last, sum, keep, rows, share, out, scale, d, width - d < LANES ? width - d : LANES);
    }
}

typedef void FN(adder)(A *, const T *const *, const A *, T *, A, int64_t, int64_t);

#define ADDER(name, first, last)                                                                                      \
    NOINLINE void name(A *sum, const T *const *rows, const A *power, T *out, A scale, int64_t width, int64_t ahead) { \
        FN(add_rows)(first, last, sum, rows, power, out, scale, width, ahead);                                        \
    }
ADDER(FN(add_first), 1, 0)
ADDER(FN(add_next), 0, 0)
ADDER(FN(add_last), 0, 1)
ADDER(FN(add_only), 1, 1)
#undef ADDER

static void FN(attend_stream)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, sources = read->sources, ahead = attend_ahead(width, sizeof(T));
    /* Dots of the next token, while the powers of this one are on their way: of rows so short that the first-level cache
     * holds those of both until they are added. */
    const int early = width * (int64_t)sizeof(T) <= 1024;
    const T *const *source = (const T *const *)read->source;
    const A *query = read->query, *carry = read->carry_logit;
    A *most = (A *)(read->scratch + part * read->scratch_bytes), *total = most + read->tile; /* [tile] */
    A *sums = total + read->tile;                                                            /* [tile, width] */
    for (int64_t start = begin; start < end; start += read->tile) {
        const int64_t count = end - start < read->tile ? end - start : read->tile;
        for (int64_t t = 0; t < count; t++) {
            most[t] = carry ? carry[read->carry_steps ? start + t : 0] : -INFINITY;
            total[t] = carry != NULL;
            if (read->carry_value) {
                memcpy(sums + t * width, (const A *)read->carry_value + (start + t) * width, (size_t)width * sizeof(A));
            }
        }
        for (int64_t i = 0; i < sources; i += 4) {
            const int64_t some = sources - i < 4 ? sources - i : 4;
            const int first = i == 0 && !read->carry_value, last = i + 4 >= sources;
            FN(adder) *add = first ? last ? FN(add_only) : FN(add_first) : last ? FN(add_last) : FN(add_next);
            const T *rows[4], *next[4];
            A eight[EIGHT] = {0};
            for (int64_t s = 0; s < 4; s++) {
                rows[s] = source[i + (s < some ? s : 0)] + start * width;
            }
            FN(dots_of_4_sources)(rows, query, width, ahead, eight);
            for (int64_t t = 0; t < count; t++) {
                A inverse[EIGHT], logit[4], power[EIGHT], large = most[t];
                const int squares = LANES < 8 ? 8 - LANES : 0; /* where a vector begins that holds all of them */
                FN(store_wide)(inverse + squares, FN(rms_inverses)(read, FN(load_wide)(eight + squares)));
                for (int64_t s = 0; s < 4; s++) {
                    logit[s] = s < some ? eight[s] * inverse[4 + s] : -INFINITY;
                    large = logit[s] > large ? logit[s] : large;
                }
                FN(five_powers)(power, logit, large, most[t]);
                for (int64_t s = some; s < 4; s++) {
                    power[s] = 0;
                }
                most[t] = large;
                total[t] = total[t] * power[4] + ((power[0] + power[1]) + (power[2] + power[3]));
                for (int64_t s = 0; s < 4; s++) {
                    next[s] = rows[s] + width;
                }
                if (early && t + 1 < count) {
                    FN(dots_of_4_sources)(next, query, width, ahead, eight);
                }
                add(sums + t * width, rows, power, (T *)read->out[0] + (start + t) * width, (A)read->scale / total[t],
                    width, ahead);
                if (!early && t + 1 < count) {
                    FN(dots_of_4_sources)(next, query, width, ahead, eight);
                }
                memcpy(rows, next, sizeof rows);
            }
        }
        for (int64_t t = 0; read->lse && t < count; t++) {
            ((A *)read->lse)[start + t] = most[t] + (A)log((double)total[t]);
        }
    }
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
            const int streamed = read->streamed && made && FN(can_stream_rows)(made, width);
            for (int64_t t = 0; t < count; t += 8) {
                const int64_t rows = count - t < 8 ? count - t : 8;
                const T *row = source[i] + (first + t) * width;
                VEC logits[8] = {0}, slopes[8] = {0}, squares[8] = {0};
                A logit[EIGHT] = {0}, dot[EIGHT] = {0}, square[EIGHT] = {0}, weight[EIGHT], slope[EIGHT], pull[EIGHT];
                for (int64_t r = 0; r < rows; r++) {
                    FN(sums_of_row)(row + r * width, query, out_gradient + (t + r) * width, width, logits + r,
                                    slopes + r, squares + r);
                }
                FN(sums_of_8)(logits, logit);
                FN(sums_of_8)(slopes, dot);
                FN(sums_of_8)(squares, square);
                for (int64_t r = 0; r < rows; r += LANES) {
                    const int64_t n = rows - r < LANES ? rows - r : LANES;
                    const VEC inverse = FN(rms_inverses)(read, FN(load_wide)(square + r));
                    const VEC x = FN(load_wide)(logit + r) * inverse, y = FN(load_wide)(dot + r);
                    VEC share = FN(exponential)(x - FN(load_some_wide)(lse + first + t + r, n));
                    FN(store_some_wide)(explained + t + r, FN(load_some_wide)(explained + t + r, n) + share * y, n);
                    share *= scale;
                    const VEC steep = share * (y - FN(load_some_wide)(mean + t + r, n)) * inverse;
                    FN(store_wide)(weight + r, share);
                    FN(store_wide)(slope + r, steep);
                    FN(store_wide)(pull + r, -steep * x * inverse / (A)width);
                }
                for (int64_t r = 0; r < rows; r += 2) {
                    const int64_t next = r + 1 < rows ? width : 0, at = (t + r) * width;
                    const T *const value[2] = {row + r * width, row + r * width + next};
                    const A *const above[2] = {out_gradient + at, out_gradient + at + next};
                    T *const out[2] = {made ? made + at : unwanted, made ? made + at + next : unwanted};
                    (!next ? FN(pull_1) : streamed ? FN(pull_2_streamed) : FN(pull_2))(
                        value, above, query, weight + r, slope + r, pull + r, out, query_gradient, width);
                }
            }
            FN(settle)(totals, query_gradient, width);
        }
        for (int64_t t = 0; carry && t < count; t++) {
            /* mean is made of every entry of the softmax: what the sources leave of it is the carry's, 0 for a null */
            const A logit = carry[read->carry_steps ? first + t : 0];
            const A share = FN(exponential)(FN(splat)(logit - lse[first + t]))[0];
            if (read->carry_steps) {
                const A slope = scale * (mean[t] - explained[t] - share * mean[t]);
                ((A *)read->carry_logit_gradient)[first + t] = slope;
                SHARED(scale_row)((A *)read->carry_gradient + (first + t) * width, out_gradient + t * width,
                                  scale * share, width);
            } else {
                totals[width] -= scale * share * mean[t];
            }
        }
    }
    if (read->streamed) {
        FN(stream_end)();
    }
}
