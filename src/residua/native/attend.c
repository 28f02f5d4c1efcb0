/* The depth read: x = sum_n a_n v_n, a = scale softmax_n(query . v_n / rms(v_n)) - centre, per token and head.
 *
 * A key is its value times one number per token, so no key is ever made; the backward pass computes the logits again. One more entry of the softmax, the carry, stands behind the sources: a logit
 * alone is a null, and a logit with a value is a read over other sources that is merged into this one.
 */
#include "attend.h"

#define KERNEL "attend_body.h"
#include "variants.h"

static const range_function stream_forward[] = VARIANTS(attend_stream);
static const range_function stream_backward[] = VARIANTS(attend_stream_gradient);
static const range_function one_forward[] = VARIANTS(attend_one);
static const range_function many_forward[] = VARIANTS(attend_many);
static const range_function one_backward[] = VARIANTS(attend_one_gradient);
static const range_function many_backward[] = VARIANTS(attend_many_gradient);

enum {
    PAD = 16,             /* numbers in the widest vector */
    TILE = 128 << 10,     /* bytes of a tile, well inside a second-level cache */
    STREAMED = 4 << 20    /* bytes of gradients that leave the cache before anyone reads them */
};

static int64_t element_bytes(int type) {
    return type == RESIDUA_FLOAT64 ? 8 : type == RESIDUA_FLOAT32 ? 4 : 2;
}

static int64_t at_most(int64_t value, int64_t limit) {
    return value < limit ? value : limit;
}

/* Whether one pass over the sources serves: only then are they read as streams. */
static int streams(const attend_read *read) {
    return read->queries == 1 && read->heads == 1 && !read->centred && !read->weights;
}

/* The variant for a read. AVX-512 is faster where tiles of several queries need its registers (a vector holds sixteen
 * of them in float32: where the last one holds eight or fewer, most of what it multiplies is nothing) and where a
 * vector of bfloat16 is made wide or narrow in fewer steps. */
static int variant_of(const attend_read *read, int type) {
    const int wide = read->queries == 1 ? type == RESIDUA_BFLOAT16 : (read->queries - 1) % 16 >= 8;
    return wide ? residua_wide_variant(type) : residua_variant(type);
}

/* Tokens of which `rows` rows fill a tile. */
static int64_t tile_of(const attend_read *read, int64_t rows, int64_t element) {
    int64_t tile = at_most(TILE / (rows * read->width * element), read->tokens);
    return tile < 1 ? 1 : tile;
}

/* Ranges that the tokens are cut into, each with scratch of its own. */
static int parts_of(const attend_read *read, int threads) {
    int64_t parts = at_most(at_most(threads, 64), read->tokens);
    return parts < 1 ? 1 : (int)parts;
}

static int64_t wide_bytes(int type) {
    return type == RESIDUA_FLOAT64 ? 8 : 4;
}

/* Memory that begins where a vector may, or NULL. */
static char *scratch_of(int64_t bytes) {
    void *found = NULL;
    return posix_memalign(&found, 64, (size_t)bytes) ? NULL : found;
}

/* Scratch of attend_many, in its order. */
static int64_t many_numbers(const attend_read *read) {
    const attend_room room = attend_room_of(read);
    return room.rows * room.length + room.length * room.stride + 2 * room.rows * room.stride + room.rows + room.length;
}

/* Scratch of attend_many_gradient, in its order. */
static int64_t many_gradient_numbers(const attend_read *read) {
    const attend_room room = attend_room_of(read);
    return room.rows * room.length + 5 * room.length * room.stride +
           (1 + 2 * read->heads) * room.rows * room.stride + 2 * room.rows + room.length;
}

static int forward(attend_read read, int type, int threads) {
    const int64_t wide = wide_bytes(type);
    const int parts = parts_of(&read, threads);
    read.stride = (read.sources + 1 + PAD - 1) / PAD * PAD;
    read.tile = streams(&read) ? tile_of(&read, 1, wide) : tile_of(&read, read.sources + 1, element_bytes(type));
    int64_t numbers = streams(&read)      ? read.tile * (read.width + 2)
                      : read.queries == 1 ? read.heads * read.tile * read.stride
                                          : many_numbers(&read);
    read.scratch_bytes = (numbers * wide + 63) / 64 * 64;
    read.scratch = scratch_of(parts * read.scratch_bytes);
    if (!read.scratch) {
        return RESIDUA_NO_MEMORY;
    }
    const range_function *run = streams(&read) ? stream_forward : read.queries == 1 ? one_forward : many_forward;
    residua_parallel(run[variant_of(&read, type)], &read, read.tokens, parts);
    free(read.scratch);
    return RESIDUA_OK;
}

/* x_k, one read a query; see attend_read. Those of several queries are to be carried, and of type A, as a carry is: a
 * read is rounded once, when it is complete. */
EXPORT int residua_attend(int type, int threads, int64_t tokens, int64_t width, int64_t heads, int64_t sources,
                          int64_t queries, const void *const *source, const void *query, double eps, double scale,
                          int centred, const void *carry_logit, int carry_steps, const void *carry_value,
                          void *const *out, void *lse, void *weights) {
    const attend_read read = {.tokens = tokens, .width = width, .heads = heads, .sources = sources, .queries = queries,
                              .source = source, .query = query, .eps = eps, .scale = scale, .centred = centred,
                              .carry_logit = carry_logit, .carry_steps = carry_steps, .carry_value = carry_value,
                              .out = out, .lse = lse, .weights = weights, .wide = queries > 1};
    return forward(read, type, threads);
}

/* from[i], of the accumulation type. */
static double number(int type, const void *from, int64_t i) {
    return type == RESIDUA_FLOAT64 ? ((const double *)from)[i] : ((const float *)from)[i];
}

/* to[i] = from[i] times, where there is one, by[i]; numbers of the accumulation type. */
static void times(int type, void *to, const void *from, const void *by, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (type == RESIDUA_FLOAT64) {
            ((double *)to)[i] = ((const double *)from)[i] * (by ? ((const double *)by)[i] : 1);
        } else {
            ((float *)to)[i] = ((const float *)from)[i] * (by ? ((const float *)by)[i] : 1);
        }
    }
}

/* to[i] = from[i], in the accumulation type. */
static void narrowed(int type, void *to, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (type == RESIDUA_FLOAT64) {
            ((double *)to)[i] = from[i];
        } else {
            ((float *)to)[i] = (float)from[i];
        }
    }
}

/* x_k = gate_k times the read of query_k gain_k, for two and more queries whose parameters lie apart, [width] each, as
 * do their nulls and gates, one number each; both may be NULL. */
EXPORT int residua_attend_together(int type, int threads, int64_t tokens, int64_t width, int64_t heads, int64_t sources,
                                   int64_t queries, const void *const *source, const void *const *query,
                                   const void *const *gain, const void *const *null, const void *const *gate,
                                   double eps, void *const *out) {
    const int64_t wide = wide_bytes(type);
    char *folded = malloc((size_t)(queries * (width + 2) * wide)); /* [queries, width], nulls, gates */
    if (!folded) {
        return RESIDUA_NO_MEMORY;
    }
    char *nulls = folded + queries * width * wide, *gates = nulls + queries * wide;
    for (int64_t k = 0; k < queries; k++) {
        times(type, folded + k * width * wide, query[k], gain[k], width);
        if (null) {
            times(type, nulls + k * wide, null[k], NULL, 1);
        }
        if (gate) {
            times(type, gates + k * wide, gate[k], NULL, 1);
        }
    }
    const attend_read read = {.tokens = tokens, .width = width, .heads = heads, .sources = sources, .queries = queries,
                              .source = source, .query = folded, .eps = eps, .scale = 1, .out = out,
                              .carry_logit = null ? nulls : NULL, .gate = gate ? gates : NULL};
    const int answer = forward(read, type, threads);
    free(folded);
    return answer;
}

/* Whether a backward pass in one pass would lose digits to large logits: it takes its weights as exp(logit - lse), with
 * a log-sum that is rounded, and with dots in another order of summation than the forward's. Both are off by an ulp or
 * so of the log-sum or of the query's length, 2e-6 where this begins. Two passes divide by what they find themselves. */
EXPORT int residua_attend_is_large(int type, int64_t tokens, int64_t width, const void *query, const void *lse) {
    const double large = 32;
    double square = 0, most = 0;
    for (int64_t d = 0; d < width; d++) {
        const double x = number(type, query, d);
        square += x * x;
    }
    for (int64_t t = 0; t < tokens; t++) {
        const double size = fabs(number(type, lse, t));
        most = size > most ? size : most;
    }
    return most > large || square > large * large;
}

/* The gradients of residua_attend from those of its reads. Given the read of a single query and its log-sum, was_read
 * and lse, one pass serves and a carry's value is not needed. query_gradient [queries, width] and, where it is not NULL,
 * null_gradient [queries] are of the accumulation type. */
EXPORT int residua_attend_gradient(int type, int threads, int64_t tokens, int64_t width, int64_t heads, int64_t sources,
                                   int64_t queries, const void *const *source, const void *query, double eps,
                                   double scale, int centred, const void *carry_logit, int carry_steps,
                                   const void *carry_value, const void *was_read, void *lse,
                                   const void *const *out_gradient, const void *lse_gradient,
                                   const void *const *before, void *const *gradient, void *carry_gradient,
                                   void *carry_logit_gradient, void *query_gradient, void *null_gradient) {
    attend_read read = {.tokens = tokens, .width = width, .heads = heads, .sources = sources, .queries = queries,
                        .source = source, .query = query, .eps = eps, .scale = scale, .centred = centred,
                        .carry_logit = carry_logit, .carry_steps = carry_steps, .carry_value = carry_value,
                        .read = was_read, .lse = lse, .wide = queries > 1,
                        .out_gradient = out_gradient, .lse_gradient = lse_gradient, .before = before,
                        .gradient = gradient, .carry_gradient = carry_gradient,
                        .carry_logit_gradient = carry_logit_gradient};
    const int64_t wide = wide_bytes(type), each = queries * (width + 1);
    const int streamed = was_read && lse && streams(&read); /* one pass needs both */
    const int parts = parts_of(&read, threads);
    read.stride = (sources + 1 + PAD - 1) / PAD * PAD;
    read.tile = streamed ? tile_of(&read, 1, wide) : tile_of(&read, sources + 1, element_bytes(type));
    read.streamed = tokens * width * sources * element_bytes(type) > STREAMED;
    int64_t numbers = streamed ? read.tile * (width + 2) + 3 * width
                      : queries == 1 ? (3 * heads + 2) * read.tile * read.stride + (read.tile + 2) * width
                                     : many_gradient_numbers(&read);
    read.scratch_bytes = (numbers * wide + 63) / 64 * 64;
    read.scratch = scratch_of(parts * read.scratch_bytes);
    read.totals = calloc((size_t)(parts * each), sizeof(double));
    if (!read.scratch || !read.totals) {
        free(read.scratch);
        free(read.totals);
        return RESIDUA_NO_MEMORY;
    }
    const range_function *run = streamed ? stream_backward : queries == 1 ? one_backward : many_backward;
    residua_parallel(run[variant_of(&read, type)], &read, tokens, parts);
    for (int64_t i = each; i < parts * each; i++) {
        read.totals[i % each] += read.totals[i];
    }
    for (int64_t k = 0; k < queries; k++) {
        const double *total = read.totals + k * (width + 1);
        narrowed(type, (char *)query_gradient + k * width * wide, total, width);
        if (null_gradient) {
            narrowed(type, (char *)null_gradient + k * wide, total + width, 1);
        }
    }
    free(read.scratch);
    free(read.totals);
    return RESIDUA_OK;
}
