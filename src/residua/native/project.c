/* y = W x for few rows x, and y = D (silu(G x) * U x): the projections and the MLP of few tokens. */
#include "products.h"
#ifdef T

static void FN(take)(const void *x, void *wide, int64_t count) {
    FN(widened)(x, wide, count);
}

static void FN(give)(const void *wide, void *x, int64_t count) {
    FN(narrowed)(wide, x, count);
}

/* silu(a) b in the place of a. */
static void FN(gate)(void *given, const void *by, int64_t count) {
    A *a = given;
    const A *b = by;
    SWEEP(count, {
        const VEC x = FN(load_some_wide)(a + d, n);
        const VEC power = FN(exponential)(-FN(larger)(x, -x));
        const VEC share = FN(either)(x > 0, 1 / (1 + power), power / (1 + power));
        FN(store_some_wide)(a + d, x * share * FN(load_some_wide)(b + d, n), n);
    });
}

#else

#define KERNEL "project.c"
#include "variants.h"

static const range_function products[] = VARIANTS(products);
static void (*const take[])(const void *, void *, int64_t) = VARIANTS(take);
static void (*const give[])(const void *, void *, int64_t) = VARIANTS(give);
static void (*const gate[])(void *, const void *, int64_t) = VARIANTS(gate);

EXPORT int residua_project(int type, int threads, const void *x, const void *weight, void *y, int64_t rows,
                           int64_t width, int64_t outputs) {
    const int variant = residua_variant(type);
    char *wide = malloc(wide_bytes(type, rows * width) + wide_bytes(type, rows * outputs));
    if (!wide) {
        return RESIDUA_NO_MEMORY;
    }
    char *result = wide + wide_bytes(type, rows * width);
    product_work product = {.x = {wide}, .weights = {weight}, .results = {result}, .outputs = {outputs}, .rows = rows,
                            .width = width};
    take[variant](x, wide, rows * width);
    all_products(products[variant], &product, threads);
    give[variant](result, y, rows * outputs);
    free(wide);
    return RESIDUA_OK;
}

EXPORT int residua_gated_mlp(int type, int threads, const void *x, const void *gates, const void *ups, const void *downs,
                             void *y, int64_t rows, int64_t width, int64_t hidden, int64_t outputs) {
    const int variant = residua_variant(type);
    const size_t for_x = wide_bytes(type, rows * width), for_hidden = wide_bytes(type, rows * hidden);
    char *wide = malloc(for_x + 2 * for_hidden + wide_bytes(type, rows * outputs));
    if (!wide) {
        return RESIDUA_NO_MEMORY;
    }
    char *a = wide + for_x, *b = a + for_hidden, *result = b + for_hidden;
    product_work up = {.x = {wide, wide}, .weights = {gates, ups}, .results = {a, b}, .outputs = {hidden, hidden},
                       .rows = rows, .width = width};
    product_work down = {.x = {a}, .weights = {downs}, .results = {result}, .outputs = {outputs}, .rows = rows,
                         .width = hidden};
    take[variant](x, wide, rows * width);
    all_products(products[variant], &up, threads);
    gate[variant](a, b, rows * hidden);
    all_products(products[variant], &down, threads);
    give[variant](result, y, rows * outputs);
    free(wide);
    return RESIDUA_OK;
}

#endif
