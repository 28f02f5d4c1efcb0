/* y = W x for few rows x, in the accumulation type, and up to three matrices: the time is that of reading the matrices once.
 *
 * A row of work is eight outputs of one matrix, as eight sums over its rows, which are read side by side. A library's
 * product of matrices is made for many rows, and reads them at two thirds of this rate.
 */
#ifdef T

/* n numbers of x times as many of each of eight rows from w on, added to eight sums. */
INLINE void FN(add_eight)(VEC x, const T *w, int64_t width, int64_t n, VEC *sums) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        sums[i] += x * FN(load_some)(w + i * width, n);
    }
}

/* <x, w_i> for the eight rows w_i from w on. */
INLINE void FN(eight_products)(const A *x, const T *w, int64_t width, A *y) {
    VEC sums[8] = {{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}};
    SWEEP(width, { FN(add_eight)(FN(load_some_wide)(x + d, n), w + d, width, n, sums); });
    FN(sums_of_8)(sums, y);
}

/* <x, w_i> for so many rows w_i. */
INLINE void FN(some_products)(const A *x, const T *w, int64_t width, int64_t count, A *y) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        FN(eight_products)(x, w + i * width, width, y + i);
    }
    for (; i < count; i++) {
        VEC sums = {0};
        SWEEP(width, { sums += FN(load_some_wide)(x + d, n) * FN(load_some)(w + i * width + d, n); });
        y[i] = FN(sum)(sums);
    }
}

static void FN(products)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const product_work *work = argument;
    const int64_t width = work->width;
    for (int64_t eight = begin; eight < end; eight++) {
        int64_t first = 8 * eight, which = 0;
        for (; first >= whole_eights(work->outputs[which]); which++) {
            first -= whole_eights(work->outputs[which]);
        }
        const int64_t outputs = work->outputs[which], count = outputs - first < 8 ? outputs - first : 8;
        const T *w = (const T *)work->weights[which] + first * width;
        for (int64_t row = 0; row < work->rows; row++) {
            const A *x = (const A *)work->x[which] + row * width;
            FN(some_products)(x, w, width, count, (A *)work->results[which] + row * outputs + first);
        }
    }
}

/* Numbers to the accumulation type, and back. */
INLINE void FN(widened)(const T *x, A *wide, int64_t count) {
    SWEEP(count, { FN(store_some_wide)(wide + d, FN(load_some)(x + d, n), n); });
}

INLINE void FN(narrowed)(const A *wide, T *x, int64_t count) {
    SWEEP(count, { FN(store_some)(x + d, FN(load_some_wide)(wide + d, n), n); });
}

#elif !defined(RESIDUA_PRODUCTS)
#define RESIDUA_PRODUCTS

#include "kernels.h"

typedef struct {
    const void *x[3];       /* [rows, width] each, of the accumulation type */
    const void *weights[3]; /* [outputs, width] each */
    void *results[3];       /* [rows, outputs] each, of the accumulation type */
    int64_t outputs[3];     /* 0 where there is no matrix */
    int64_t rows, width;
} product_work;

/* Whole lines of the cache for so many numbers of the accumulation type. */
static inline size_t wide_bytes(int type, int64_t numbers) {
    return (size_t)((numbers + 15) / 16 * 16) * (type == RESIDUA_FLOAT64 ? sizeof(double) : sizeof(float));
}

static inline int64_t whole_eights(int64_t count) {
    return (count + 7) / 8 * 8;
}

static inline void all_products(range_function products, product_work *work, int threads) {
    int64_t room = 0;
    for (int which = 0; which < 3; which++) {
        room += whole_eights(work->outputs[which]);
    }
    residua_parallel(products, work, room / 8, threads);
}

#endif
