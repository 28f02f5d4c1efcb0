/* out_i = sum_j p_ij v_j,   p_i = softmax_j(<R_i q_i, R_j k_j> / sqrt(e)), over j <= i or over all j; R rotates positions.
 *
 *     dv_j = sum_i p_ij g_i     s_ij = p_ij (<g_i, v_j> - sum_j p_ij <g_i, v_j>)
 *     dq_i = R_i' sum_j s_ij R_j k_j / sqrt(e)     dk_j = R_j' sum_i s_ij R_i q_i / sqrt(e)
 *
 * q is [sequences, tokens, heads, e], k and v have `shared` heads, each for heads / shared of q's in a row. A row of work is
 * one head of k and v of one sequence, whose numbers are copied once, rotated, in the accumulation type and padded with
 * zeros to whole vectors and whole quads of tokens: what follows are products of four rows with no edges. Weights are kept
 * for one stretch of queries at a time and made again in the backward pass.
 */
#ifdef T

/* c[r] (+)= sum_k a[r * by_row + k * by_term] b[k] for four rows r and so many vectors of columns. */
INLINE void FN(tile)(const int vectors, const A *a, int64_t by_row, int64_t by_term, const A *b, int64_t b_width, A *c,
                     int64_t c_width, int64_t terms, int add) {
    VEC sums[4][3];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = add ? FN(load_wide)(c + r * c_width + v * LANES) : (VEC){0};
        }
    }
    for (int64_t k = 0; k < terms; k++) {
        VEC right[3];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            right[v] = FN(load_wide)(b + k * b_width + v * LANES);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const VEC left = FN(splat)(a[r * by_row + k * by_term]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) {
                sums[r][v] += left * right[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            FN(store_wide)(c + r * c_width + v * LANES, sums[r][v]);
        }
    }
}

/* The same for any number of vectors. */
static __attribute__((noinline)) void FN(quad)(int64_t vectors, const A *a, int64_t by_row, int64_t by_term, const A *b,
                                               int64_t b_width, A *c, int64_t c_width, int64_t terms, int add) {
    int64_t v = 0;
    for (; v + 3 <= vectors && vectors - v != 4; v += 3) { /* four are two and two */
        FN(tile)(3, a, by_row, by_term, b + v * LANES, b_width, c + v * LANES, c_width, terms, add);
    }
    for (; v + 2 <= vectors; v += 2) {
        FN(tile)(2, a, by_row, by_term, b + v * LANES, b_width, c + v * LANES, c_width, terms, add);
    }
    for (; v < vectors; v++) {
        FN(tile)(1, a, by_row, by_term, b + v * LANES, b_width, c + v * LANES, c_width, terms, add);
    }
}

/* One head of one token, rotated and scaled, as a padded row. */
INLINE void FN(take)(const token_work *work, const T *x, int64_t token, int turned, A scale, A *row) {
    const int64_t width = work->width, half = width / 2;
    const VEC by = FN(splat)(scale);
    if (turned && work->cosine) {
        const A *cosine = (const A *)work->cosine + token * half, *sine = (const A *)work->sine + token * half;
        SWEEP(half, {
            const VEC left = FN(load_some)(x + d, n), right = FN(load_some)(x + half + d, n);
            const VEC c = FN(load_some_wide)(cosine + d, n) * by, s = FN(load_some_wide)(sine + d, n) * by;
            FN(store_some_wide)(row + d, left * c - right * s, n);
            FN(store_some_wide)(row + half + d, right * c + left * s, n);
        });
    } else {
        SWEEP(width, { FN(store_some_wide)(row + d, FN(load_some)(x + d, n) * by, n); });
    }
}

/* The inverse: a row of gradients, turned back and scaled, to its place. */
INLINE void FN(give)(const token_work *work, const A *row, int64_t token, int turned, A scale, T *x) {
    const int64_t width = work->width, half = width / 2;
    const VEC by = FN(splat)(scale);
    if (turned && work->cosine) {
        const A *cosine = (const A *)work->cosine + token * half, *sine = (const A *)work->sine + token * half;
        SWEEP(half, {
            const VEC left = FN(load_some_wide)(row + d, n), right = FN(load_some_wide)(row + half + d, n);
            const VEC c = FN(load_some_wide)(cosine + d, n) * by, s = FN(load_some_wide)(sine + d, n) * by;
            FN(store_some)(x + d, left * c + right * s, n);
            FN(store_some)(x + half + d, right * c - left * s, n);
        });
    } else {
        SWEEP(width, { FN(store_some)(x + d, FN(load_some_wide)(row + d, n) * by, n); });
    }
}

/* All tokens of a head as rows of `padded` numbers, and if asked for as columns too. */
static __attribute__((noinline)) void FN(gather)(const token_work *work, const T *x, int64_t stride, int turned, A scale,
                                                 A *rows, A *columns) {
    for (int64_t t = 0; t < work->tokens; t++) {
        FN(take)(work, x + t * stride, t, turned, scale, rows + t * work->padded);
    }
    for (int64_t c = 0; columns && c < work->width; c++) {
        for (int64_t t = 0; t < work->tokens; t++) {
            columns[c * work->long_tokens + t] = rows[t * work->padded + c];
        }
    }
}

static __attribute__((noinline)) void FN(scatter)(const token_work *work, const A *rows, int64_t first, int64_t count,
                                                  int turned, A scale, T *x, int64_t stride) {
    for (int64_t t = 0; t < count; t++) {
        FN(give)(work, rows + t * work->padded, first + t, turned, scale, x + t * stride);
    }
}

/* Logits of four queries from `first` on, each over `reach` keys, to their weights times a sum whose inverse is a share.
 * `reach` is the least number of whole vectors with all keys that one of the four sees: only the last vector has others. */
INLINE void FN(weigh)(const token_work *work, A *logits, int64_t first, int64_t reach, A *shares) {
    const int64_t large = work->long_tokens, last = reach - LANES;
    VEC most[4], total[4] = {{0}, {0}, {0}, {0}}, place;
    FN(mask) seen[4];
    for (int i = 0; i < LANES; i++) {
        place[i] = (A)i;
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const int64_t all = work->causal && first + r + 1 < work->tokens ? first + r + 1 : work->tokens;
        seen[r] = place < FN(splat)((A)(all - last));
        most[r] = FN(either)(seen[r], FN(load_wide)(logits + r * large + last), FN(splat)(-INFINITY));
        FN(store_wide)(logits + r * large + last, most[r]);
    }
    for (int64_t j = 0; j < last; j += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            most[r] = FN(larger)(FN(load_wide)(logits + r * large + j), most[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        most[r] = FN(splat)(FN(most)(most[r]));
    }
    for (int64_t j = 0; j < last; j += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const VEC power = FN(exponential)(FN(load_wide)(logits + r * large + j) - most[r]);
            FN(store_wide)(logits + r * large + j, power);
            total[r] += power;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const VEC power = FN(exponential)(FN(load_wide)(logits + r * large + last) - most[r]);
        const VEC kept = FN(either)(seen[r], power, (VEC){0});
        FN(store_wide)(logits + r * large + last, kept);
        shares[r] = 1 / FN(sum)(total[r] + kept);
    }
}

/* Keys, in whole vectors, that the queries before `end` see. */
INLINE int64_t FN(reach)(const token_work *work, int64_t end) {
    const int64_t seen = work->causal && end < work->tokens ? end : work->tokens;
    return (seen + LANES - 1) / LANES * LANES;
}

static void FN(token_attend)(void *argument, int64_t begin, int64_t end, int part) {
    const token_work *work = argument;
    const int64_t width = work->width, padded = work->padded, large = work->long_tokens, turns = work->heads / work->shared;
    const int64_t room = large * padded;
    A *k = (A *)(work->scratch + part * work->scratch_bytes), *columns = k + room, *v = columns + room, *q = v + room;
    A *weights = q + 4 * padded, *result = weights + 4 * large, shares[4];
    for (int64_t row = begin; row < end; row++) {
        const int64_t sequence = row / work->shared, which = row % work->shared, by_key = work->shared * width;
        const int64_t at = sequence * work->tokens * by_key + which * width, by_query = work->heads * width;
        FN(gather)(work, (const T *)work->k + at, by_key, 1, 1, k, columns);
        FN(gather)(work, (const T *)work->v + at, by_key, 0, 1, v, NULL);
        for (int64_t head = which * turns; head < (which + 1) * turns; head++) {
            const T *queries = (const T *)work->q + sequence * work->tokens * by_query + head * width;
            T *out = (T *)work->out + sequence * work->tokens * by_query + head * width;
            for (int64_t first = 0; first < work->tokens; first += 4) {
                const int64_t count = work->tokens - first < 4 ? work->tokens - first : 4;
                const int64_t reach = FN(reach)(work, first + 4);
                for (int64_t r = 0; r < count; r++) {
                    FN(take)(work, queries + (first + r) * by_query, first + r, 1, (A)work->scale, q + r * padded);
                }
                FN(quad)(reach / LANES, q, padded, 1, columns, large, weights, large, width, 0);
                FN(weigh)(work, weights, first, reach, shares);
                const int64_t seen = work->causal && first + 4 < work->tokens ? first + 4 : work->tokens;
                FN(quad)(padded / LANES, weights, large, 1, v, padded, result, padded, seen, 0);
                for (int64_t r = 0; r < count; r++) {
                    FN(give)(work, result + r * padded, first + r, 0, shares[r], out + (first + r) * by_query);
                }
            }
        }
    }
}

/* Logits and <g, v> of four queries to their weights and slopes. */
INLINE void FN(slopes)(const token_work *work, int64_t first, int64_t reach, A *weights, A *slopes) {
    const int64_t large = work->long_tokens;
    VEC total[4] = {{0}, {0}, {0}, {0}};
    A shares[4];
    FN(weigh)(work, weights, first, reach, shares);
    for (int64_t j = 0; j < reach; j += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            total[r] += FN(load_wide)(weights + r * large + j) * FN(load_wide)(slopes + r * large + j);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const VEC mean = FN(splat)(FN(sum)(total[r]) * shares[r]), share = FN(splat)(shares[r]);
        A *p = weights + r * large, *s = slopes + r * large;
        for (int64_t j = 0; j < reach; j += LANES) {
            const VEC weight = FN(load_wide)(p + j) * share;
            FN(store_wide)(p + j, weight);
            FN(store_wide)(s + j, weight * (FN(load_wide)(s + j) - mean));
        }
    }
}

static void FN(token_attend_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const token_work *work = argument;
    const int64_t width = work->width, padded = work->padded, large = work->long_tokens, turns = work->heads / work->shared;
    const int64_t room = large * padded, vectors = padded / LANES;
    A *k = (A *)(work->scratch + part * work->scratch_bytes), *k_columns = k + room, *v = k_columns + room;
    A *v_columns = v + room, *q = v_columns + room, *g = q + room, *grad_k = g + room, *grad_v = grad_k + room;
    A *result = grad_v + room, *weights = result + 4 * padded, *slopes = weights + TOKEN_STRETCH * large;
    for (int64_t row = begin; row < end; row++) {
        const int64_t sequence = row / work->shared, which = row % work->shared, by_key = work->shared * width;
        const int64_t at = sequence * work->tokens * by_key + which * width, by_query = work->heads * width;
        FN(gather)(work, (const T *)work->k + at, by_key, 1, 1, k, k_columns);
        FN(gather)(work, (const T *)work->v + at, by_key, 0, 1, v, v_columns);
        memset(grad_k, 0, 2 * (size_t)room * sizeof(A));
        for (int64_t head = which * turns; head < (which + 1) * turns; head++) {
            const int64_t place = sequence * work->tokens * by_query + head * width;
            FN(gather)(work, (const T *)work->q + place, by_query, 1, (A)work->scale, q, NULL);
            FN(gather)(work, (const T *)work->out + place, by_query, 0, 1, g, NULL);
            for (int64_t top = 0; top < work->tokens; top += TOKEN_STRETCH) {
                const int64_t last = top + TOKEN_STRETCH < large ? top + TOKEN_STRETCH : large;
                const int64_t bottom = last < (work->tokens + 3) / 4 * 4 ? last : (work->tokens + 3) / 4 * 4;
                const int64_t reach = FN(reach)(work, bottom);
                for (int64_t first = top; first < bottom; first += 4) {
                    A *p = weights + (first - top) * large, *s = slopes + (first - top) * large;
                    const int64_t near = FN(reach)(work, first + 4);
                    FN(quad)(near / LANES, q + first * padded, padded, 1, k_columns, large, p, large, width, 0);
                    FN(quad)(near / LANES, g + first * padded, padded, 1, v_columns, large, s, large, width, 0);
                    FN(slopes)(work, first, near, p, s);
                    for (int r = 0; r < 4; r++) {
                        memset(p + r * large + near, 0, (size_t)(reach - near) * sizeof(A));
                        memset(s + r * large + near, 0, (size_t)(reach - near) * sizeof(A));
                    }
                    if (work->grad_q) {
                        const int64_t count = work->tokens - first < 4 ? work->tokens - first : 4;
                        const int64_t seen = work->causal && first + 4 < work->tokens ? first + 4 : work->tokens;
                        T *target = (T *)work->grad_q + place + first * by_query;
                        FN(quad)(vectors, s, large, 1, k, padded, result, padded, seen, 0);
                        FN(scatter)(work, result, first, count, 1, (A)work->scale, target, by_query);
                    }
                }
                const int64_t keys = work->causal ? bottom : (work->tokens + 3) / 4 * 4;
                for (int64_t j = 0; j < keys; j += 4) {
                    const int64_t from = work->causal && j > top ? j : top, skipped = (from - top) * large + j;
                    FN(quad)(vectors, slopes + skipped, 1, large, q + from * padded, padded, grad_k + j * padded, padded,
                             bottom - from, 1);
                    FN(quad)(vectors, weights + skipped, 1, large, g + from * padded, padded, grad_v + j * padded,
                             padded, bottom - from, 1);
                }
            }
        }
        if (work->grad_k) {
            FN(scatter)(work, grad_k, 0, work->tokens, 1, 1, (T *)work->grad_k + at, by_key);
        }
        if (work->grad_v) {
            FN(scatter)(work, grad_v, 0, work->tokens, 0, 1, (T *)work->grad_v + at, by_key);
        }
    }
}

#else

#include "kernels.h"

enum { TOKEN_STRETCH = 64 }; /* queries whose weights are kept at once, a multiple of four */

typedef struct {
    const void *q, *k, *v;      /* [sequences, tokens, heads or shared, width] */
    const void *cosine, *sine;  /* [tokens, width / 2] of the accumulation type, or NULL */
    void *out;                  /* as q: the result, or its gradient */
    void *grad_q, *grad_k, *grad_v; /* NULL where not wanted */
    char *scratch;
    size_t scratch_bytes; /* of each part */
    int64_t tokens, heads, shared, width;
    int64_t padded, long_tokens; /* width and tokens in whole vectors, the tokens also in fours */
    double scale;
    int causal;
} token_work;

#define KERNEL "token_attend.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(token_attend);
static const range_function backward[] = VARIANTS(token_attend_backward);

/* Scratch for every part, in whole lines of the cache; zero, because what pads a row is never written. */
static int prepare(token_work *work, int type, int threads, int again) {
    work->padded = (work->width + 15) / 16 * 16;
    work->long_tokens = (work->tokens + 15) / 16 * 16;
    const int64_t room = work->long_tokens * work->padded;
    const int64_t numbers = again ? 8 * room + 4 * work->padded + 2 * TOKEN_STRETCH * work->long_tokens
                                  : 3 * room + 8 * work->padded + 4 * work->long_tokens;
    work->scratch_bytes = (size_t)numbers * (type == RESIDUA_FLOAT64 ? sizeof(double) : sizeof(float));
    work->scratch = aligned_alloc(64, (size_t)threads * work->scratch_bytes);
    if (!work->scratch) {
        return RESIDUA_NO_MEMORY;
    }
    memset(work->scratch, 0, (size_t)threads * work->scratch_bytes);
    return RESIDUA_OK;
}

EXPORT int residua_token_attend(int type, int threads, const void *q, const void *k, const void *v, const void *cosine,
                                const void *sine, void *out, int64_t sequences, int64_t tokens, int64_t heads,
                                int64_t shared, int64_t width, int64_t causal) {
    token_work work = {.q = q, .k = k, .v = v, .cosine = cosine, .sine = sine, .out = out, .tokens = tokens,
                       .heads = heads, .shared = shared, .width = width, .scale = 1 / sqrt((double)width),
                       .causal = (int)causal};
    if (prepare(&work, type, threads, 0)) {
        return RESIDUA_NO_MEMORY;
    }
    residua_parallel(forward[residua_variant(type)], &work, sequences * shared, threads);
    free(work.scratch);
    return RESIDUA_OK;
}

EXPORT int residua_token_attend_backward(int type, int threads, const void *q, const void *k, const void *v,
                                         const void *cosine, const void *sine, const void *gradient, void *grad_q,
                                         void *grad_k, void *grad_v, int64_t sequences, int64_t tokens, int64_t heads,
                                         int64_t shared, int64_t width, int64_t causal) {
    token_work work = {.q = q, .k = k, .v = v, .cosine = cosine, .sine = sine, .out = (void *)gradient,
                       .grad_q = grad_q, .grad_k = grad_k, .grad_v = grad_v, .tokens = tokens, .heads = heads,
                       .shared = shared, .width = width, .scale = 1 / sqrt((double)width), .causal = (int)causal};
    if (prepare(&work, type, threads, 1)) {
        return RESIDUA_NO_MEMORY;
    }
    residua_parallel(backward[residua_variant(type)], &work, sequences * shared, threads);
    free(work.scratch);
    return RESIDUA_OK;
}

#endif
