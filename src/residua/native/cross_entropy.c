/* loss = log(sum_i exp(z_i)) - z_target of every row of logits, and in their place its gradient exp(z_i - log ...) - [i = target].
 *
 * A target below zero does not count: loss and gradient are zero. Sums are of the accumulation type, the log is taken in
 * double. A row is read three times, out of the second-level cache.
 */
#if defined(T) && !defined(USE_BFLOAT16)

static void FN(cross_entropy)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const loss_work *work = argument;
    const int64_t width = work->width, whole = width / LANES * LANES;
    for (int64_t row = begin; row < end; row++) {
        T *z = (T *)work->logits + row * width;
        const int64_t target = work->targets[row];
        if (target < 0) {
            ((A *)work->losses)[row] = 0;
            if (work->slopes) {
                memset(z, 0, (size_t)width * sizeof(T));
            }
            continue;
        }
        VEC most = FN(splat)(-INFINITY), total = {0};
        for (int64_t d = 0; d < whole; d += LANES) {
            most = FN(larger)(FN(load)(z + d), most);
        }
        A top = FN(most)(most);
        if (whole < width) {
            const VEC rest = FN(load_part)(z + whole, width - whole);
            for (int64_t i = 0; i < width - whole; i++) {
                top = rest[i] > top ? rest[i] : top;
            }
        }
        for (int64_t d = 0; d < whole; d += LANES) {
            total += FN(exponential)(FN(load)(z + d) - top);
        }
        A sum = FN(sum)(total);
        if (whole < width) {
            const VEC rest = FN(exponential)(FN(load_part)(z + whole, width - whole) - top);
            for (int64_t i = 0; i < width - whole; i++) {
                sum += rest[i];
            }
        }
        const A behind = (A)log((double)sum), aim = FN(load_part)(z + target, 1)[0];
        ((A *)work->losses)[row] = behind - (aim - top);
        if (work->slopes) {
            const VEC lse = FN(splat)(top + behind);
            SWEEP(width, {
                const VEC share = FN(exponential)(FN(load_some)(z + d, n) - lse);
                FN(store_some)(z + d, share, n);
            });
            FN(store_part)(z + target, FN(splat)(FN(exponential)(FN(splat)(aim) - lse)[0] - 1), 1);
        }
    }
}

#elif !defined(T)

#include "kernels.h"

typedef struct {
    void *logits;           /* [rows, width]; their gradient afterwards, if wanted */
    const int64_t *targets; /* [rows]; below zero: the row does not count */
    void *losses;           /* [rows] of the accumulation type */
    int64_t width;
    int slopes; /* whether the gradient is wanted */
} loss_work;

#define KERNEL "cross_entropy.c"
#include "variants.h"

static const range_function forward[] = WIDE_VARIANTS(cross_entropy);

EXPORT int residua_cross_entropy(int type, int threads, void *logits, const void *targets, void *losses, int64_t rows,
                                 int64_t width, int64_t slopes) {
    loss_work work = {logits, targets, losses, width, (int)slopes};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

#endif
