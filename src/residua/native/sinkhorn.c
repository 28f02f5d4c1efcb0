/* exp(logits) with its columns and then its rows divided by their sums, `rounds` times, for many small matrices.
 *
 * LANES matrices go at once, one in each lane, so that a sum over columns is a few vector additions. The backward
 * pass repeats the rounds, keeps the matrix P after each division and undoes them; in logarithms a division is
 *
 *     dlog = dlog' - P sum(dlog')        the sum along the axis that was divided by
 *
 * and starts from dlog' = P dP. A matrix whose sums come close to underflow is done again, alone and in logarithms.
 */
#ifdef USE_BFLOAT16
/* logits come in an accumulation type */
#elif defined T

/* What is further below the largest of its column counts as nothing: `exponential` has no smaller numbers. */
#undef LEAST
#define LEAST ((A)(sizeof(A) == sizeof(float) ? -87.0 : -745.0))

INLINE VEC FN(at)(const A *matrix, int64_t i) {
    return FN(load_wide)(matrix + i * LANES);
}

/* Divide columns (rows = 0) or rows by their sums: from one matrix to another, or in place. 0 where a sum is tiny or no number. */
INLINE int FN(divide)(const A *from, A *to, int64_t size, int rows) {
    const int64_t along = rows ? 1 : size, across = rows ? size : 1;
    VEC shares = {0};
    for (int64_t i = 0; i < size; i++) {
        VEC total = {0};
        for (int64_t j = 0; j < size; j++) {
            total += FN(at)(from, i * across + j * along);
        }
        const VEC share = 1 / total;
        shares += share;
        for (int64_t j = 0; j < size; j++) {
            const int64_t place = i * across + j * along;
            FN(store_wide)(to + place * LANES, FN(at)(from, place) * share);
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (!(shares[lane] < (A)LARGEST)) {
            return 0;
        }
    }
    return 1;
}

/* The rounds for up to LANES matrices; the last state is left at the answer's place. With `keep`, every state is. */
static int FN(rounds)(const T *logits, int64_t count, int64_t size, int64_t rounds, A *states, int keep, A **last) {
    const int64_t entries = size * size;
    for (int64_t lane = 0; lane < LANES; lane++) {
        const T *one = logits + (lane < count ? lane : 0) * entries;
        for (int64_t i = 0; i < entries; i++) {
            states[i * LANES + lane] = one[i];
        }
    }
    for (int64_t j = 0; j < size; j++) {
        VEC most = FN(at)(states, j);
        for (int64_t i = 1; i < size; i++) {
            most = FN(larger)(FN(at)(states, i * size + j), most);
        }
        for (int64_t i = j; i < entries; i += size) {
            const VEC gap = FN(at)(states, i) - most;
            FN(store_wide)(states + i * LANES, FN(either)(gap < LEAST, (VEC){0}, FN(exponential)(gap)));
        }
    }
    A *state = states;
    for (int64_t half = 0; half < 2 * rounds; half++) {
        A *next = keep && half ? state + entries * LANES : state;
        if (!FN(divide)(state, next, size, half & 1)) {
            return 0;
        }
        state = next;
    }
    *last = state;
    return 1;
}

/* One matrix in logarithms: every state in double, as rounds() keeps them. */
static void FN(rounds_log)(const T *logits, int64_t size, int64_t rounds, double *states) {
    const int64_t entries = size * size;
    double *log_state = states + 2 * rounds * entries;
    for (int64_t i = 0; i < entries; i++) {
        log_state[i] = (double)logits[i];
    }
    for (int64_t half = 0; half < 2 * rounds; half++) {
        const int64_t along = half & 1 ? 1 : size, across = half & 1 ? size : 1;
        for (int64_t i = 0; i < size; i++) {
            double *line = log_state + i * across, most = line[0], total = 0;
            for (int64_t j = 1; j < size; j++) {
                most = line[j * along] > most ? line[j * along] : most;
            }
            for (int64_t j = 0; j < size; j++) {
                total += exp(line[j * along] - most);
            }
            for (int64_t j = 0; j < size; j++) {
                line[j * along] -= most + log(total);
                states[half * entries + i * across + j * along] = exp(line[j * along]);
            }
        }
    }
}

static void FN(undo_log)(const double *states, int64_t size, int64_t rounds, const T *gradient, T *out) {
    const int64_t entries = size * size;
    double *g = (double *)states + 2 * rounds * entries;
    for (int64_t i = 0; i < entries; i++) {
        g[i] = states[(2 * rounds - 1) * entries + i] * (double)gradient[i];
    }
    for (int64_t half = 2 * rounds - 1; half >= 0; half--) {
        const int64_t along = half & 1 ? 1 : size, across = half & 1 ? size : 1;
        for (int64_t i = 0; i < size; i++) {
            double total = 0;
            for (int64_t j = 0; j < size; j++) {
                total += g[i * across + j * along];
            }
            for (int64_t j = 0; j < size; j++) {
                g[i * across + j * along] -= states[half * entries + i * across + j * along] * total;
            }
        }
    }
    for (int64_t i = 0; i < entries; i++) {
        out[i] = (T)g[i];
    }
}

static void FN(sinkhorn)(void *argument, int64_t begin, int64_t end, int part) {
    const sinkhorn_work *work = argument;
    const int64_t size = work->size, entries = size * size;
    double *scratch = work->scratch + part * work->each;
    for (int64_t top = begin; top < end; top += LANES) {
        const int64_t count = end - top < LANES ? end - top : LANES;
        const T *logits = (const T *)work->logits + top * entries;
        T *out = (T *)work->out + top * entries;
        A *last;
        const int plain = FN(rounds)(logits, count, size, work->rounds, (A *)scratch, 0, &last);
        for (int64_t lane = 0; lane < count; lane++) {
            if (!plain) {
                FN(rounds_log)(logits + lane * entries, size, work->rounds, scratch);
            }
            for (int64_t i = 0; i < entries; i++) {
                out[lane * entries + i] =
                    plain ? (T)last[i * LANES + lane] : (T)scratch[(2 * work->rounds - 1) * entries + i];
            }
        }
    }
}

static void FN(sinkhorn_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const sinkhorn_work *work = argument;
    const int64_t size = work->size, entries = size * size;
    double *scratch = work->scratch + part * work->each;
    for (int64_t top = begin; top < end; top += LANES) {
        const int64_t count = end - top < LANES ? end - top : LANES;
        const T *logits = (const T *)work->logits + top * entries;
        const T *gradient = (const T *)work->gradient + top * entries;
        T *out = (T *)work->out + top * entries;
        A *state, *g = (A *)scratch + 2 * work->rounds * entries * LANES;
        if (!FN(rounds)(logits, count, size, work->rounds, (A *)scratch, 1, &state)) {
            for (int64_t lane = 0; lane < count; lane++) {
                FN(rounds_log)(logits + lane * entries, size, work->rounds, scratch);
                FN(undo_log)(scratch, size, work->rounds, gradient + lane * entries, out + lane * entries);
            }
            continue;
        }
        for (int64_t i = 0; i < entries; i++) {
            for (int64_t lane = 0; lane < LANES; lane++) {
                g[i * LANES + lane] = lane < count ? (A)gradient[lane * entries + i] * state[i * LANES + lane] : 0;
            }
        }
        for (int64_t half = 2 * work->rounds - 1; half >= 0; half--, state -= entries * LANES) {
            const int64_t along = half & 1 ? 1 : size, across = half & 1 ? size : 1;
            for (int64_t i = 0; i < size; i++) {
                VEC total = {0};
                for (int64_t j = 0; j < size; j++) {
                    total += FN(at)(g, i * across + j * along);
                }
                for (int64_t j = 0; j < size; j++) {
                    const int64_t place = i * across + j * along;
                    FN(store_wide)(g + place * LANES, FN(at)(g, place) - FN(at)(state, place) * total);
                }
            }
        }
        for (int64_t lane = 0; lane < count; lane++) {
            for (int64_t i = 0; i < entries; i++) {
                out[lane * entries + i] = (T)g[i * LANES + lane];
            }
        }
    }
}

#else

#include "kernels.h"

/* A sum below the inverse of this has lost digits to underflow in float32, or soon will. */
#define LARGEST 1e20

typedef struct {
    const void *logits, *gradient; /* [matrices, size, size] */
    void *out;                     /* the same */
    double *scratch;               /* `each` numbers for each part */
    int64_t size, rounds, each;
} sinkhorn_work;

#define KERNEL "sinkhorn.c"
#include "variants.h"

static const range_function forward[] = WIDE_VARIANTS(sinkhorn);
static const range_function backward[] = WIDE_VARIANTS(sinkhorn_backward);

static int run(const range_function *table, int type, int threads, const void *logits, const void *gradient, void *out,
               int64_t matrices, int64_t size, int64_t rounds) {
    sinkhorn_work work = {logits, gradient, out, NULL, size, rounds, 8 * (2 * rounds + 1) * size * size};
    work.scratch = malloc((size_t)(threads * work.each + 1) * sizeof(double));
    if (!work.scratch) {
        return RESIDUA_NO_MEMORY;
    }
    residua_parallel(table[residua_variant(type)], &work, matrices, threads);
    free(work.scratch);
    return RESIDUA_OK;
}

EXPORT int residua_sinkhorn(int type, int threads, const void *logits, void *out, int64_t matrices, int64_t size,
                            int64_t rounds) {
    return run(forward, type, threads, logits, NULL, out, matrices, size, rounds);
}

EXPORT int residua_sinkhorn_backward(int type, int threads, const void *logits, const void *gradient, void *out,
                                     int64_t matrices, int64_t size, int64_t rounds) {
    return run(backward, type, threads, logits, gradient, out, matrices, size, rounds);
}

#endif
