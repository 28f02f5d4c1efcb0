/* out[r, m, :] = onto[r, m, :] + sum_s w[r, s, m] H[r, s, :]: the streams of each token recombined.
 *
 *     dH[r, s] = sum_m w[r, s, m] g[r, m]        dw[r, s, m] = <H[r, s], g[r, m]>
 *
 * A read x[r, :] = sum_s read[r, s] H[r, s, :] may go with it: one more mixture, at a place of its own.
 * Weights and their gradients are of the accumulation type. A token's streams fit the first-level cache, so that the
 * loops may pass over them again.
 */
#ifdef T
#include "mixtures.h"

static void FN(remix)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const remix_work *work = argument;
    const int64_t streams = work->streams, made = work->made, width = work->width;
    for (int64_t row = begin; row < end; row++) {
        const T *H = (const T *)work->H + row * streams * width;
        if (work->x) {
            FN(combine)((FN(mixture)){
                .from = H, .count = streams, .to = (T *)work->x + row * width, .rows = 1,
                .w = (const A *)work->read + row * work->read_row, .by_from = work->read_stream, .width = width,
                .from_step = width, .to_step = width, .from_next = streams * width, .to_next = width});
        }
        FN(combine)((FN(mixture)){
            .from = H, .count = streams, .to = (T *)work->out + row * made * width, .rows = made,
            .onto = work->onto ? (const T *)work->onto + row * work->onto_step : NULL,
            .w = (const A *)work->weights + row * work->by_row, .by_to = work->by_made, .by_from = work->by_stream,
            .width = width, .from_step = width, .to_step = width, .from_next = streams * width,
            .onto_next = work->onto_step, .to_next = made * width});
    }
}

static void FN(remix_backward)(void *argument, int64_t begin, int64_t end, int part) {
    (void)part;
    const remix_work *work = argument;
    const int64_t streams = work->streams, made = work->made, width = work->width;
    for (int64_t row = begin; row < end; row++) {
        const T *H = (const T *)work->H + row * streams * width;
        const T *g = (const T *)work->out + row * made * width;
        const T *g_x = work->x ? (const T *)work->x + row * width : NULL;
        if (work->grad_H) {
            FN(combine)((FN(mixture)){
                .from = g, .count = made, .to = (T *)work->grad_H + row * streams * width, .rows = streams,
                .also = g_x, .share = g_x ? (const A *)work->read + row * work->read_row : NULL,
                .by_share = work->read_stream, .w = (const A *)work->weights + row * work->by_row,
                .by_to = work->by_stream, .by_from = work->by_made, .width = width, .from_step = width,
                .to_step = width, .from_next = made * width, .to_next = streams * width});
        }
        if (work->grad_weights) {
            FN(dots)(H, streams, streams * width, g, made, (A *)work->grad_weights + row * streams * made,
                     work->grad_stream, work->grad_made, width, width);
        }
        if (work->grad_read) {
            FN(dots)(H, streams, streams * width, g_x, 1, (A *)work->grad_read + row * streams, 1, 1, width, width);
        }
    }
}

#else

#include "kernels.h"

typedef struct {
    const void *H;       /* [rows, streams, width] */
    const void *read;    /* [rows, streams], or NULL */
    const void *weights; /* [rows, streams, made]; both by the strides below */
    const void *onto;    /* [rows, made, width], or NULL */
    void *x;             /* [rows, width]: what `read` reads, or its gradient */
    void *out;           /* [rows, made, width]: the result, or its gradient */
    void *grad_H, *grad_read, *grad_weights; /* NULL where not wanted */
    int64_t streams, made, width;
    int64_t onto_step; /* numbers from one row of onto to the next */
    int64_t read_row, read_stream, by_row, by_stream, by_made;
    int64_t grad_stream, grad_made; /* of grad_weights, whose rows follow each other */
} remix_work;

#define KERNEL "remix.c"
#include "variants.h"

static const range_function forward[] = VARIANTS(remix);
static const range_function backward[] = VARIANTS(remix_backward);

EXPORT int residua_remix(int type, int threads, const void *H, const void *weights, const void *onto, void *out,
                         int64_t rows, int64_t streams, int64_t made, int64_t width, int64_t onto_step) {
    remix_work work = {.H = H, .weights = weights, .out = out, .streams = streams, .made = made, .width = width,
                       .by_row = streams * made, .by_stream = made, .by_made = 1, .onto = onto, .onto_step = onto_step};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_remix_backward(int type, int threads, const void *H, const void *weights, const void *gradient,
                                  void *grad_H, void *grad_weights, int64_t rows, int64_t streams, int64_t made,
                                  int64_t width) {
    remix_work work = {.H = H, .weights = weights, .out = (void *)gradient, .grad_H = grad_H,
                       .grad_weights = grad_weights, .streams = streams, .made = made, .width = width,
                       .by_row = streams * made, .by_stream = made, .by_made = 1, .grad_stream = made, .grad_made = 1};
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_read_remix(int type, int threads, const void *H, const void *read, const void *weights, void *x,
                              void *out, int64_t rows, int64_t streams, int64_t made, int64_t width, int64_t read_row,
                              int64_t read_stream, int64_t by_row, int64_t by_stream, int64_t by_made) {
    remix_work work = {.H = H, .read = read, .weights = weights, .x = x, .out = out, .streams = streams, .made = made,
                       .width = width, .read_row = read_row, .read_stream = read_stream, .by_row = by_row,
                       .by_stream = by_stream, .by_made = by_made};
    residua_parallel(forward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

EXPORT int residua_read_remix_backward(int type, int threads, const void *H, const void *read, const void *weights,
                                       const void *gradient_x, const void *gradient, void *grad_H, void *grad_read,
                                       void *grad_weights, int64_t rows, int64_t streams, int64_t made, int64_t width,
                                       int64_t read_row, int64_t read_stream, int64_t by_row, int64_t by_stream,
                                       int64_t by_made, int64_t grad_stream, int64_t grad_made) {
    remix_work work = {.H = H, .read = read, .weights = weights, .x = (void *)gradient_x, .out = (void *)gradient,
                       .grad_H = grad_H, .grad_read = grad_read, .grad_weights = grad_weights, .streams = streams,
                       .made = made, .width = width, .read_row = read_row, .read_stream = read_stream,
                       .by_row = by_row, .by_stream = by_stream, .by_made = by_made, .grad_stream = grad_stream,
                       .grad_made = grad_made};
    residua_parallel(backward[residua_variant(type)], &work, rows, threads);
    return RESIDUA_OK;
}

#endif
