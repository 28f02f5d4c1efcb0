/* y = xhat W + bias,   xhat = (x - mean) r,   r = 1 / sqrt(<x - mean, x - mean> / d + eps), for rows x of d numbers.
 *
 * The mean is that of a layer norm, or 0. A few rows are normalised at a time and stay in the cache for the product:
 * neither xhat nor its gradient is written out. W is turned into rows first, of which there are few and long ones.
 *
 *     h = g W'     dx = r (h - xhat <h, xhat> / d - mean(h))     dW = sum over rows of xhat' g     dbias = sum of g
 */
#ifdef USE_BFLOAT16
/* rows come in an accumulation type */
#elif defined T
#include "mixtures.h"

/* to[j, i] = from[i, j], of rows so many numbers apart. */
static void FN(turn)(const void *from, int64_t from_step, void *to, int64_t to_step, int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 8) {
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = j; k < columns && k < j + 8; k++) {
                ((T *)to)[k * to_step + i] = ((const T *)from)[i * from_step + k];
            }
        }
    }
}

/* Four sums at once: an addition waits for the one before it. */
INLINE A FN(total)(const T *x, int64_t width) {
    VEC sums[4] = {{0}, {0}, {0}, {0}};
    int64_t done = 0;
    for (; done + 4 * LANES <= width; done += 4 * LANES) {
        for (int i = 0; i < 4; i++) {
            sums[i] += FN(load)(x + done + i * LANES);
        }
    }
    SWEEP(width - done, { sums[0] += FN(load_some)(x + done + d, n); });
    return FN(sum)((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* xhat of one row; r is returned. */
INLINE A FN(normalised)(const T *x, T *to, const normed_work *work) {
    const int64_t width = work->width, next = ROWS * width;
    if (work->centered) {
        const VEC mean = FN(splat)(FN(total)(x, width) / (A)width);
        SWEEP(width, {
            __builtin_prefetch(x + d + next, 0, 2);
            FN(store_some)(to + d, FN(load_some)(x + d, n) - mean, n);
        });
        x = to;
    }
    const A r = (A)(1 / sqrt((double)FN(dot)(x, x, width) / (double)width + work->eps));
    SWEEP(width, {
        if (x != to) {
            __builtin_prefetch(x + d + next, 0, 2);
        }
        FN(store_some)(to + d, FN(load_some)(x + d, n) * FN(splat)(r), n);
    });
    return r;
}

/* The weight as the forward pass takes it: every row of it filled up to whole vectors. */
static void FN(fill)(const void *weight, void *to, int64_t rows, int64_t columns, int64_t filled) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy((T *)to + i * filled, (const T *)weight + i * columns, (size_t)columns * sizeof(T));
        memset((T *)to + i * filled + columns, 0, (size_t)(filled - columns) * sizeof(T));
    }
}

INLINE void FN(add)(T *to, const T *more, int64_t count) {
    SWEEP(count, { FN(store_some)(to + d, FN(load_some)(to + d, n) + FN(load_some)(more + d, n), n); });
}

static void FN(normed_project)(void *argument, int64_t begin, int64_t end, int part) {
    const normed_work *work = argument;
    const int64_t width = work->width, columns = work->columns, step = work->step, filled = work->filled;
    T *xhat = (T *)work->scratch + part * work->each, *made = xhat + ROWS * step, *more = made + ROWS * filled;
    for (int64_t top = begin; top < end; top += ROWS) {
        const int64_t rows = end - top < ROWS ? end - top : ROWS;
        T *out = (T *)work->out + top * columns;
        for (int64_t i = 0; i < rows; i++) {
            FN(normalised)((const T *)work->x + (top + i) * width, xhat + i * step, work);
        }
        memset(made, 0, (size_t)(ROWS * filled) * sizeof(T));
        for (int64_t d = 0; d < width; d += SUMMED) { /* sums of sums: of a long one the rounding adds up */
            FN(combine)((FN(mixture)){
                .from = (const T *)work->weight + d * filled, .count = width - d < SUMMED ? width - d : SUMMED,
                .to = more, .rows = rows, .w = xhat + d, .by_to = step, .by_from = 1, .width = filled,
                .from_step = filled, .to_step = filled});
            FN(add)(made, more, rows * filled);
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < columns; j++) {
                out[i * columns + j] = made[i * filled + j] + (work->bias ? ((const T *)work->bias)[j] : 0);
            }
        }
    }
}

/* dx of one row from h, which is in its place. */
INLINE void FN(normed_pull)(T *dx, const T *xhat, A r, const normed_work *work) {
    const int64_t width = work->width;
    const VEC share = FN(splat)(FN(dot)(dx, xhat, width) / (A)width), scale = FN(splat)(r);
    const VEC mean = FN(splat)(work->centered ? FN(total)(dx, width) / (A)width : 0);
    SWEEP(width, {
        const VEC h = FN(load_some)(dx + d, n);
        FN(store_some)(dx + d, scale * (h - FN(load_some)(xhat + d, n) * share - mean), n);
    });
}

static void FN(normed_project_backward)(void *argument, int64_t begin, int64_t end, int part) {
    const normed_work *work = argument;
    const int64_t width = work->width, columns = work->columns, step = work->step;
    const int64_t numbers = (step + 1) * columns;
    T *xhat = (T *)work->scratch + part * work->each, *sums = xhat + ROWS * step, *totals = sums + numbers;
    for (int64_t top = begin; top < end; top += ROWS) {
        const int64_t rows = end - top < ROWS ? end - top : ROWS;
        const T *g = (const T *)work->out + top * columns;
        A r[ROWS];
        for (int64_t i = 0; i < rows; i++) {
            r[i] = FN(normalised)((const T *)work->x + (top + i) * width, xhat + i * step, work);
        }
        if (work->grad_x) {
            T *dx = (T *)work->grad_x + top * width;
            for (int64_t d = 0; d < width; d += PANEL) {
                FN(combine)((FN(mixture)){
                    .from = (const T *)work->weight + d, .count = columns, .to = dx + d, .rows = rows, .w = g,
                    .by_to = columns, .by_from = 1, .width = width - d < PANEL ? width - d : PANEL, .from_step = step,
                    .to_step = width, .to_next = ROWS * width});
            }
            for (int64_t i = 0; i < rows; i++) {
                FN(normed_pull)(dx + i * width, xhat + i * step, r[i], work);
            }
        }
        if (work->grad_weight) {
            for (int64_t d = 0; d < width; d += PANEL) {
                FN(combine)((FN(mixture)){
                    .from = xhat + d, .count = rows, .onto = sums + d, .to = sums + d, .rows = columns, .w = g,
                    .by_to = 1, .by_from = columns, .width = width - d < PANEL ? width - d : PANEL, .from_step = step,
                    .to_step = step});
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < columns; j++) {
                sums[columns * step + j] += g[i * columns + j];
            }
        }
        if ((top - begin) / ROWS % SUMMED == SUMMED - 1 || top + ROWS >= end) {
            FN(add)(totals, sums, numbers);
            memset(sums, 0, (size_t)numbers * sizeof(T));
        }
    }
}

/* The gradients of W and of the bias, from those of all parts. */
static void FN(normed_project_collect)(const normed_work *work, int parts) {
    const int64_t step = work->step, columns = work->columns, numbers = (step + 1) * columns;
    T *sums = (T *)work->scratch + ROWS * step + numbers;
    for (int part = 1; part < parts; part++) {
        FN(add)(sums, sums + part * work->each, numbers);
    }
    if (work->grad_weight) {
        FN(turn)(sums, step, work->grad_weight, columns, columns, work->width);
    }
    if (work->grad_bias) {
        memcpy(work->grad_bias, sums + columns * step, (size_t)columns * sizeof(T));
    }
}

#else

#include "kernels.h"

/* Rows that are normalised at a time; the part of them that a product is made of, which fits a first-level cache; and
 * numbers between rows of scratch, without which all would have the same places there. */
enum { ROWS = 16, PANEL = 256, PAD = 16 };

enum { SUMMED = 128 }; /* numbers of a row, or groups of rows, that are added up before sums are */

typedef struct {
    const void *x;      /* [rows, width] */
    const void *bias;   /* [columns], or NULL */
    const void *weight; /* forward [width, filled], backward [columns, step]: turned */
    void *out;          /* [rows, columns]: the result, or its gradient */
    void *grad_x, *grad_weight, *grad_bias; /* grad_weight [width, columns]; NULL where not wanted */
    void *scratch;                          /* `each` numbers for each part */
    int64_t width, columns, filled, each;
    int64_t step; /* numbers from one row of scratch to the next */
    int centered;
    double eps;
} normed_work;

/* The bytes of so many numbers. */
static size_t bytes(int type, int64_t numbers) {
    return (size_t)numbers * (type == RESIDUA_FLOAT64 ? sizeof(double) : sizeof(float));
}

#define KERNEL "normed_project.c"
#include "variants.h"

static const range_function forward[] = WIDE_VARIANTS(normed_project);
static const range_function backward[] = WIDE_VARIANTS(normed_project_backward);
static void (*const fill[])(const void *, void *, int64_t, int64_t, int64_t) = WIDE_VARIANTS(fill);
static void (*const turn[])(const void *, int64_t, void *, int64_t, int64_t, int64_t) = WIDE_VARIANTS(turn);
static void (*const collect[])(const normed_work *, int) = WIDE_VARIANTS(normed_project_collect);

EXPORT int residua_normed_project(int type, int threads, const void *x, const void *weight, const void *bias, void *out,
                                  int64_t rows, int64_t width, int64_t columns, int64_t centered, double eps) {
    const int variant = residua_variant(type);
    const int64_t filled = columns <= 16 ? 16 : (columns + 7) / 8 * 8; /* two vectors of eight or more */
    normed_work work = {.x = x, .bias = bias, .out = out, .width = width, .columns = columns, .filled = filled,
                        .step = width + PAD, .each = ROWS * (width + PAD + 2 * filled), .centered = centered != 0,
                        .eps = eps};
    char *memory = malloc(bytes(type, width * filled + threads * work.each));
    if (!memory) {
        return RESIDUA_NO_MEMORY;
    }
    fill[variant](weight, memory, width, columns, filled);
    work.weight = memory;
    work.scratch = memory + bytes(type, width * filled);
    residua_parallel(forward[variant], &work, rows, threads);
    free(memory);
    return RESIDUA_OK;
}

EXPORT int residua_normed_project_backward(int type, int threads, const void *x, const void *weight,
                                           const void *gradient, void *grad_x, void *grad_weight, void *grad_bias,
                                           int64_t rows, int64_t width, int64_t columns, int64_t centered, double eps) {
    const int variant = residua_variant(type);
    const int64_t step = width + PAD;
    normed_work work = {.x = x, .out = (void *)gradient, .grad_x = grad_x, .grad_weight = grad_weight,
                        .grad_bias = grad_bias, .width = width, .columns = columns, .step = step,
                        .each = ROWS * step + 2 * (step + 1) * columns, .centered = centered != 0, .eps = eps};
    const size_t turned = bytes(type, step * columns), scratch = bytes(type, threads * work.each);
    char *memory = malloc(turned + scratch);
    if (!memory) {
        return RESIDUA_NO_MEMORY;
    }
    turn[variant](weight, columns, memory, step, width, columns);
    work.weight = memory;
    work.scratch = memset(memory + turned, 0, scratch); /* sums; of parts there may be fewer than threads */
    residua_parallel(backward[variant], &work, rows, threads);
    collect[variant](&work, threads);
    free(memory);
    return RESIDUA_OK;
}

#endif
