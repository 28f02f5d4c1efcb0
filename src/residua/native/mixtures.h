/* Mixtures of rows, and dots between them, for the current T, A and ISA: products with their sums in registers. */

INLINE A FN(dot)(const T *x, const T *y, int64_t width) {
    VEC sums[4] = {{0}, {0}, {0}, {0}}; /* four at once: an addition waits for the one before it */
    int64_t done = 0;
    for (; done + 4 * LANES <= width; done += 4 * LANES) {
        for (int i = 0; i < 4; i++) {
            sums[i] += FN(load)(x + done + i * LANES) * FN(load)(y + done + i * LANES);
        }
    }
    SWEEP(width - done, { sums[0] += FN(load_some)(x + done + d, n) * FN(load_some)(y + done + d, n); });
    return FN(sum)((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* to[i] = onto[i] + share[i] also + sum_j w[i by_to + j by_from] from[j]: one token. */
typedef struct {
    const T *from, *also, *onto; /* the last two may be NULL */
    T *to;
    const A *w, *share;
    int64_t count, rows, by_to, by_from, by_share, width; /* rows there are of `from` and of `to` */
    int64_t from_step, to_step;                           /* numbers from one row to the next: `onto` as `to` */
    int64_t from_next, onto_next, to_next;                /* numbers to the same row of the next token, or 0 */
} FN(mixture);

/* A few rows `i` of it and one to three vectors of them, what a weight is spread for. Rows of the next token are sent
 * for: a processor that is shown the rows of one side by side does not guess them. */
INLINE void FN(combine_step)(const int rows, const int vectors, const FN(mixture) *m, int64_t i0, int64_t d,
                             int64_t n) {
    T *to = m->to + i0 * m->to_step + d;
    const T *onto = m->onto ? m->onto + i0 * m->to_step + d : NULL;
    VEC total[4][3];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        if (m->to_next) {
            __builtin_prefetch(to + i * m->to_step + m->to_next, 1, 2);
        }
        if (onto && m->onto_next) {
            __builtin_prefetch(onto + i * m->to_step + m->onto_next, 0, 2);
        }
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            total[i][v] = onto ? FN(load_some)(onto + i * m->to_step + v * LANES, n) : (VEC){0};
        }
    }
    if (m->also) {
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) {
                total[i][v] += FN(splat)(m->share[(i0 + i) * m->by_share]) * FN(load_some)(m->also + d + v * LANES, n);
            }
        }
    }
    for (int64_t j = 0; j < m->count; j++) {
        const T *from = m->from + j * m->from_step + d;
        VEC value[3];
        if (m->from_next) {
            __builtin_prefetch(from + m->from_next, 0, 2);
        }
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            value[v] = FN(load_some)(from + v * LANES, n);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const VEC weight = FN(splat)(m->w[(i0 + i) * m->by_to + j * m->by_from]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) {
                total[i][v] += weight * value[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            FN(store_some)(to + i * m->to_step + v * LANES, total[i][v], n);
        }
    }
}

INLINE void FN(combine_rows)(const int rows, const FN(mixture) *m, int64_t i0) {
    int64_t d = 0;
    for (; d + 2 * LANES <= m->width && d + 3 * LANES != m->width; d += 2 * LANES) {
        FN(combine_step)(rows, 2, m, i0, d, LANES);
    }
    if (d + 3 * LANES == m->width) { /* one alone would wait for its own sums */
        FN(combine_step)(rows, 3, m, i0, d, LANES);
        d = m->width;
    }
    for (; d < m->width; d += LANES) {
        FN(combine_step)(rows, 1, m, i0, d, m->width - d < LANES ? m->width - d : LANES);
    }
}

static __attribute__((unused)) void FN(combine)(FN(mixture) m) {
    int64_t i = 0;
    for (; i + 4 <= m.rows; i += 4) {
        FN(combine_rows)(4, &m, i);
    }
    for (; i < m.rows; i++) {
        FN(combine_rows)(1, &m, i);
    }
}

/* Dots of one or two streams with one or four gradients. */
INLINE void FN(dots_of)(const int streams, const int made, const T *x, int64_t step, int64_t next, const T *g, A *out,
                        int64_t by_stream, int64_t by_made, int64_t width) {
    VEC total[8] = {{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}};
    SWEEP(width, {
        VEC slope[4];
        for (int i = 0; i < made; i++) {
            slope[i] = FN(load_some)(g + i * step + d, n);
        }
        for (int s = 0; s < streams; s++) {
            const VEC value = FN(load_some)(x + s * step + d, n);
            if (next) {
                __builtin_prefetch(x + s * step + d + next, 0, 2);
            }
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
            out[s * by_stream + i * by_made] = sums[s * made + i];
        }
    }
}

/* out[s, m] = <x[s], g[m]>, of rows `step` apart, in tiles; the same x of the next token is `next` away, or 0. */
static __attribute__((unused)) void FN(dots)(const T *x, int64_t streams, int64_t next, const T *g, int64_t made,
                                             A *out, int64_t by_stream, int64_t by_made, int64_t width, int64_t step) {
    for (int64_t s = 0; s < streams; s += 2) {
        const int two = s + 2 <= streams;
        const T *value = x + s * step;
        A *to = out + s * by_stream;
        int64_t m = 0;
        for (; m + 4 <= made; m += 4) {
            if (two) {
                FN(dots_of)(2, 4, value, step, next, g + m * step, to + m * by_made, by_stream, by_made, width);
            } else {
                FN(dots_of)(1, 4, value, step, next, g + m * step, to + m * by_made, by_stream, by_made, width);
            }
        }
        for (; m < made; m++) {
            if (two) {
                FN(dots_of)(2, 1, value, step, next, g + m * step, to + m * by_made, by_stream, by_made, width);
            } else {
                FN(dots_of)(1, 1, value, step, next, g + m * step, to + m * by_made, by_stream, by_made, width);
            }
        }
    }
}
