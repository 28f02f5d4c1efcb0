/* out = sum_j p_j v_j,   p = softmax_j(<R q, k_j> / sqrt(e)), for one new token a sequence over all that a cache holds.
 *
 * Its own key R k and value v are put into the cache first. q is [sequences, heads, e]; k and v have `shared` heads, each for
 * heads / shared of q's in a row; the cache is [sequences, shared, room, e], of which `before` tokens are there. A row of
 * work is one head of k and v of one sequence. `attention_step` has the projections in the same call: q = Q x, k = K x',
 * v = V x'' and O out.
 */
#include "products.h"
#ifdef T

/* One head, rotated and times a scale. */
INLINE void FN(turn)(const cached_work *work, const A *x, A scale, A *row) {
    const int64_t half = work->width / 2;
    const VEC by = FN(splat)(scale);
    if (work->cosine) {
        const A *cosine = work->cosine, *sine = work->sine;
        SWEEP(half, {
            const VEC left = FN(load_some_wide)(x + d, n), right = FN(load_some_wide)(x + half + d, n);
            const VEC c = FN(load_some_wide)(cosine + d, n) * by, s = FN(load_some_wide)(sine + d, n) * by;
            FN(store_some_wide)(row + d, left * c - right * s, n);
            FN(store_some_wide)(row + half + d, right * c + left * s, n);
        });
    } else {
        SWEEP(work->width, { FN(store_some_wide)(row + d, FN(load_some_wide)(x + d, n) * by, n); });
    }
}

/* Logits to exp(logit - the largest), and the sum of these. */
INLINE A FN(powers)(A *logits, int64_t count) {
    VEC most = FN(splat)(logits[0]), total = {0};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        most = FN(larger)(FN(load_wide)(logits + j), most);
    }
    A largest = FN(most)(most), rest = 0;
    for (; j < count; j++) {
        largest = logits[j] > largest ? logits[j] : largest;
    }
    for (j = 0; j + LANES <= count; j += LANES) {
        const VEC power = FN(exponential)(FN(load_wide)(logits + j) - largest);
        FN(store_wide)(logits + j, power);
        total += power;
    }
    if (j < count) {
        const VEC power = FN(exponential)(FN(load_wide_part)(logits + j, count - j) - largest);
        FN(store_wide_part)(logits + j, power, count - j);
        for (; j < count; j++) {
            rest += logits[j];
        }
    }
    return FN(sum)(total) + rest;
}

/* share sum_j p_j v_j over so many vectors of columns, the last of n numbers; tokens alternate between chains of sums. */
INLINE void FN(gathered)(const int vectors, const int chains, const A *p, const T *v, int64_t width, int64_t count,
                         int64_t n, A share, A *out) {
    VEC sums[4][4];
#pragma GCC unroll 4
    for (int c = 0; c < chains; c++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            sums[c][i] = (VEC){0};
        }
    }
    int64_t j = 0;
    for (; j + chains <= count; j += chains) {
#pragma GCC unroll 4
        for (int c = 0; c < chains; c++) {
            const VEC weight = FN(splat)(p[j + c]);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) {
                sums[c][i] += weight * FN(load_some)(v + (j + c) * width + i * LANES, n);
            }
        }
    }
    for (; j < count; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            sums[0][i] += FN(splat)(p[j]) * FN(load_some)(v + j * width + i * LANES, n);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) {
#pragma GCC unroll 4
        for (int c = 1; c < chains; c++) {
            sums[0][i] += sums[c][i];
        }
        FN(store_some_wide)(out + i * LANES, sums[0][i] * share, n);
    }
}

static void FN(cached_attend)(void *argument, int64_t begin, int64_t end, int part) {
    const cached_work *work = argument;
    const int64_t width = work->width, turns = work->heads / work->shared, count = work->before + 1;
    A *q = (A *)(work->scratch + part * work->scratch_bytes), *weights = q + (width + 15) / 16 * 16;
    for (int64_t row = begin; row < end; row++) {
        T *keys = (T *)work->keys + row * work->room * width, *values = (T *)work->values + row * work->room * width;
        FN(turn)(work, (const A *)work->k + row * width, 1, q);
        FN(narrowed)(q, keys + work->before * width, width);
        FN(narrowed)((const A *)work->v + row * width, values + work->before * width, width);
        for (int64_t head = row * turns; head < (row + 1) * turns; head++) {
            A *out = (A *)work->out + head * width;
            FN(turn)(work, (const A *)work->q + head * width, (A)work->scale, q);
            FN(some_products)(q, keys, width, count, weights);
            const A share = 1 / FN(powers)(weights, count);
            int64_t d = 0;
            for (; d + 4 * LANES <= width; d += 4 * LANES) {
                FN(gathered)(4, 2, weights, values + d, width, count, LANES, share, out + d);
            }
            for (; d + LANES <= width; d += LANES) {
                FN(gathered)(1, 4, weights, values + d, width, count, LANES, share, out + d);
            }
            if (d < width) {
                FN(gathered)(1, 1, weights, values + d, width, count, width - d, share, out + d);
            }
        }
    }
}

static void FN(take)(const void *x, void *wide, int64_t count) {
    FN(widened)(x, wide, count);
}

static void FN(give)(const void *wide, void *x, int64_t count) {
    FN(narrowed)(wide, x, count);
}

#else

typedef struct {
    const void *q, *k, *v;     /* [sequences, heads or shared, width] of the accumulation type */
    const void *cosine, *sine; /* [width / 2] of the accumulation type, or NULL */
    void *keys, *values;       /* [sequences, shared, room, width] */
    void *out;                 /* as q */
    char *scratch;
    size_t scratch_bytes; /* of each part */
    int64_t before, room, heads, shared, width;
    double scale;
} cached_work;

#define KERNEL "cached_attend.c"
#include "variants.h"

static const range_function cached_attend[] = VARIANTS(cached_attend);
static const range_function products[] = VARIANTS(products);
static void (*const take[])(const void *, void *, int64_t) = VARIANTS(take);
static void (*const give[])(const void *, void *, int64_t) = VARIANTS(give);

EXPORT int residua_cached_attend(int type, int threads, const void *q, const void *k, const void *v, const void *cosine,
                                 const void *sine, void *keys, void *values, void *out, int64_t sequences,
                                 int64_t before, int64_t room, int64_t heads, int64_t shared, int64_t width) {
    const int variant = residua_variant(type);
    const int64_t queries = sequences * heads * width, held = sequences * shared * width;
    const size_t own = wide_bytes(type, width) + wide_bytes(type, before + 1);
    char *wide = malloc(2 * wide_bytes(type, queries) + 2 * wide_bytes(type, held) + (size_t)threads * own);
    if (!wide) {
        return RESIDUA_NO_MEMORY;
    }
    char *wide_out = wide + wide_bytes(type, queries), *wide_k = wide_out + wide_bytes(type, queries);
    char *wide_v = wide_k + wide_bytes(type, held);
    take[variant](q, wide, queries);
    take[variant](k, wide_k, held);
    take[variant](v, wide_v, held);
    cached_work work = {.q = wide, .k = wide_k, .v = wide_v, .cosine = cosine, .sine = sine, .keys = keys,
                        .values = values, .out = wide_out, .scratch = wide_v + wide_bytes(type, held), .scratch_bytes = own,
                        .before = before, .room = room, .heads = heads, .shared = shared, .width = width,
                        .scale = 1 / sqrt((double)width)};
    residua_parallel(cached_attend[variant], &work, sequences * shared, threads);
    give[variant](wide_out, out, queries);
    free(wide);
    return RESIDUA_OK;
}

/* Sequences of one token, `channels` wide; x_k and x_v may be x_q. y is [sequences, outputs]. */
EXPORT int residua_attention_step(int type, int threads, const void *x_q, const void *x_k, const void *x_v,
                                  const void *of_q, const void *of_k, const void *of_v, const void *of_out,
                                  const void *cosine, const void *sine, void *keys, void *values, void *y,
                                  int64_t sequences, int64_t before, int64_t room, int64_t heads, int64_t shared,
                                  int64_t width, int64_t channels, int64_t outputs) {
    const int variant = residua_variant(type);
    const int64_t queries = heads * width, held = shared * width, given = sequences * channels;
    const size_t own = wide_bytes(type, width) + wide_bytes(type, before + 1);
    const size_t for_x = wide_bytes(type, given), for_q = wide_bytes(type, sequences * queries);
    const size_t for_k = wide_bytes(type, sequences * held), for_y = wide_bytes(type, sequences * outputs);
    char *wide = malloc(3 * for_x + 2 * for_q + 2 * for_k + for_y + (size_t)threads * own);
    if (!wide) {
        return RESIDUA_NO_MEMORY;
    }
    char *q = wide + 3 * for_x, *out = q + for_q, *k = out + for_q, *v = k + for_k, *result = v + for_k;
    product_work before_heads = {.x = {wide, wide, wide}, .weights = {of_q, of_k, of_v}, .results = {q, k, v},
                                 .outputs = {queries, held, held}, .rows = sequences, .width = channels};
    take[variant](x_q, wide, given);
    if (x_k != x_q) {
        before_heads.x[1] = wide + for_x;
        take[variant](x_k, wide + for_x, given);
    }
    if (x_v != x_q) {
        before_heads.x[2] = wide + 2 * for_x;
        take[variant](x_v, wide + 2 * for_x, given);
    }
    all_products(products[variant], &before_heads, threads);
    cached_work work = {.q = q, .k = k, .v = v, .cosine = cosine, .sine = sine, .keys = keys, .values = values,
                        .out = out, .scratch = result + for_y, .scratch_bytes = own,
                        .before = before, .room = room, .heads = heads, .shared = shared, .width = width,
                        .scale = 1 / sqrt((double)width)};
    residua_parallel(cached_attend[variant], &work, sequences * shared, threads);
    product_work behind_heads = {.x = {out}, .weights = {of_out}, .results = {result}, .outputs = {outputs},
                                 .rows = sequences, .width = queries};
    all_products(products[variant], &behind_heads, threads);
    give[variant](result, y, sequences * outputs);
    free(wide);
    return RESIDUA_OK;
}

#endif
