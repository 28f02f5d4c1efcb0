/* One call of the depth read. Numbers are of the accumulation type A, rows [tokens, width] of the element type T. */
#ifndef RESIDUA_ATTEND_H
#define RESIDUA_ATTEND_H

#include "kernels.h"

enum {
    ATTEND_QUERIES = 32, /* the most that share a pass */
    ATTEND_SPARE = 10    /* rows behind the sources that a tile of theirs may reach into */
};

typedef struct {
    int64_t tokens, width, heads, sources, queries;
    const void *const *source; /* [sources] rows */
    const void *query;         /* [queries, width] */
    double eps, scale;
    const void *gate; /* [queries] numbers that their reads are multiplied by, or NULL; for several queries */
    int centred;
    int wide; /* whether out and out_gradient are of type A: reads of several queries that will be carried */
    const void *carry_logit;         /* NULL; a null of each query [queries]; or [tokens, heads] if carry_steps */
    int carry_steps;                 /* whether the carry differs from token to token */
    const void *carry_value;         /* rows of type A, or NULL */
    const void *read;                /* the rows that the forward gave, for a backward pass in one pass */
    void *const *out;                /* [queries] rows; NULL if only the weights are wanted */
    void *lse, *weights; /* [queries, tokens, heads] and [sources, tokens, heads], or NULL; lse is read going back */
    const void *const *out_gradient; /* [queries] rows */
    const void *lse_gradient;        /* [queries, tokens, heads] or NULL; for several queries */
    const void *const *before;       /* NULL, or [sources] rows to add to the gradients, each may be NULL; as lse */
    void *const *gradient;           /* [sources] rows, each NULL if unwanted */
    void *carry_gradient, *carry_logit_gradient; /* rows of type A and [tokens, heads], or NULL */
    double *totals;                              /* [parts, queries, width + 1], zeros */
    int streamed;                                /* whether gradients are large enough to bypass the cache */
    int64_t tile, stride, scratch_bytes;         /* tokens a tile; numbers from one row of logits to the next */
    char *scratch;                               /* [parts, scratch_bytes] */
} attend_read;

/* How scratch for several queries is laid out, in numbers. */
typedef struct {
    int64_t rows;   /* the sources and those that tiles reach into */
    int64_t length; /* from one row to the next: a vector and more than the width, and no power of two */
    int64_t stride; /* the queries, up to a multiple of the widest vector */
} attend_room;

INLINE attend_room attend_room_of(const attend_read *read) {
    return (attend_room){.rows = read->sources + ATTEND_SPARE, .length = (read->width + 15) / 16 * 16 + 16,
                         .stride = (read->queries + 15) / 16 * 16};
}

/* How far ahead in its source a row is fetched: whole rows, 4 KiB or more. */
INLINE int64_t attend_ahead(int64_t width, int64_t element) {
    return (4096 / (width * element) + 1) * width;
}

/* Rows that are wanted soon: they are called a few lines at a time, in the midst of arithmetic, since the memory takes
 * no more at once. */
typedef struct {
    const void *const *rows;
    int64_t count, from, bytes; /* how many, and which part of each */
    int64_t row, at;            /* how far it is */
} attend_soon;

INLINE void attend_call(attend_soon *soon, int64_t lines) {
    for (; lines > 0 && soon->row < soon->count; lines--) {
        __builtin_prefetch((const char *)soon->rows[soon->row] + soon->from + soon->at, 0, 2);
        soon->at += 64;
        if (soon->at >= soon->bytes) {
            soon->at = 0;
            soon->row++;
        }
    }
}

#endif
