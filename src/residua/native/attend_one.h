/* One query, in two passes over a tile of tokens: several heads, centred weights, or the weights themselves. */

/* The products of a row with one or two vectors and with itself, as vectors still to be summed: one row at a time, so
 * that the processor sees one stream, and several sums at a time, so that none waits for the other. */
INLINE void FN(products)(const int vectors, const T *row, const A *first, const A *second, int64_t width, VEC *dot,
                         VEC *other, VEC *square) {
    enum { WIDE = 4 };
    VEC squares[WIDE] = {0}, one[WIDE] = {0}, two[WIDE] = {0};
    int64_t d = 0;
    for (; d + WIDE * LANES <= width; d += WIDE * LANES) {
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            const VEC x = FN(load)(row + d + v * LANES);
            squares[v] += x * x;
            one[v] += x * FN(load_wide)(first + d + v * LANES);
            if (vectors == 2) {
                two[v] += x * FN(load_wide)(second + d + v * LANES);
            }
        }
    }
    for (; d < width; d += LANES) {
        const int64_t n = width - d < LANES ? width - d : LANES;
        const VEC x = FN(load_some)(row + d, n);
        squares[0] += x * x;
        one[0] += x * FN(load_some_wide)(first + d, n);
        if (vectors == 2) {
            two[0] += x * FN(load_some_wide)(second + d, n);
        }
    }
    *dot = (one[0] + one[1]) + (one[2] + one[3]);
    *square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    if (vectors == 2) {
        *other = (two[0] + two[1]) + (two[2] + two[3]);
    }
}

NOINLINE void FN(sums_of_row)(const T *row, const A *first, const A *second, int64_t width, VEC *dot, VEC *other,
                              VEC *square) {
    FN(products)(2, row, first, second, width, dot, other, square);
}

NOINLINE A FN(dot_and_square)(const T *row, const A *vector, int64_t width, A *dot) {
    VEC product, square;
    FN(products)(1, row, vector, NULL, width, &product, NULL, &square);
    *dot = FN(sum)(product);
    return FN(sum)(square);
}

static void FN(attend_one)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, heads = read->heads, slice = width / heads;
    const int64_t stride = read->stride, block = read->tile * stride;
    const T *const *source = (const T *const *)read->source;
    const A *query = read->query;
    A *logits = (A *)(read->scratch + part * read->scratch_bytes); /* [heads, tile, stride] */
    for (int64_t first = begin; first < end; first += read->tile) {
        const int64_t count = end - first < read->tile ? end - first : read->tile;
        for (int64_t i = 0; i < read->sources; i++) {
            for (int64_t t = 0; t < count; t++) {
                A square = 0, *place = logits + t * stride + i;
                for (int64_t head = 0; head < heads; head++) {
                    const T *row = source[i] + (first + t) * width + head * slice;
                    square += FN(dot_and_square)(row, query + head * slice,
                                                 slice, place + head * block);
                }
                const A inverse = FN(rms_inverse)(read, square);
                for (int64_t head = 0; head < heads; head++) {
                    place[head * block] *= inverse;
                }
            }
        }
        for (int64_t token = first; token < first + count; token++) {
            for (int64_t head = 0; head < heads; head++) {
                A *row = logits + head * block + (token - first) * stride;
                const A sum = FN(routed)(read, row, 0, token, head);
                FN(weighted)(read, row);
                if (read->lse) {
                    ((A *)read->lse)[token * heads + head] = sum;
                }
                for (int64_t i = 0; read->weights && i < read->sources; i++) {
                    ((A *)read->weights)[(i * read->tokens + token) * heads + head] = row[i];
                }
                if (read->out) {
                    FN(mix_one)(source, read->sources, row, read->carry_value, read->out[0],
                                token * width + head * slice, slice);
                }
            }
        }
    }
}

#ifndef USE_BFLOAT16
NOINLINE void FN(scale_row)(A *out, const A *row, A weight, int64_t width) {
    SWEEP(width, FN(store_some_wide)(out + d, weight * FN(load_some_wide)(row + d, n), n););
}
#endif

static void FN(attend_one_gradient)(void *work, int64_t begin, int64_t end, int part) {
    const attend_read *read = work;
    const int64_t width = read->width, heads = read->heads, slice = width / heads, sources = read->sources;
    const int64_t stride = read->stride, block = read->tile * stride;
    const T *const *source = (const T *const *)read->source;
    T *const *gradient = (T *const *)read->gradient;
    const A *query = read->query;
    A *logits = (A *)(read->scratch + part * read->scratch_bytes); /* [heads, tile, stride], as the two that follow */
    A *rows = logits + heads * block, *dots = rows + heads * block;
    A *inverse = dots + heads * block, *pull = inverse + block; /* [tile, stride] */
    A *query_gradient = pull + block, *scratch = query_gradient + width;
    T *unwanted = (T *)(scratch + read->tile * width);
    double *totals = read->totals + part * (width + 1);
    int streamed = read->streamed;
    for (int64_t i = 0; i < sources; i++) {
        streamed = streamed && gradient[i] && FN(can_stream_rows)(gradient[i], slice);
    }
    memset(query_gradient, 0, (size_t)width * sizeof(A));
    for (int64_t first = begin; first < end; first += read->tile) {
        const int64_t count = end - first < read->tile ? end - first : read->tile;
        const A *out_gradient =
            FN(wide_rows)(scratch, (const T *)read->out_gradient[0] + first * width, count * width);
        for (int64_t i = 0; i < sources; i++) {
            for (int64_t t = 0; t < count; t += 8) {
                const int64_t some = count - t < 8 ? count - t : 8, place = t * stride + i;
                VEC squares[8] = {0};
                A square[EIGHT] = {0};
                for (int64_t head = 0; head < heads; head++) {
                    VEC one[8] = {0}, two[8] = {0}, own;
                    A logit[8], dot[8];
                    for (int64_t r = 0; r < some; r++) {
                        const int64_t at = (t + r) * width + head * slice;
                        FN(sums_of_row)(source[i] + first * width + at, query + head * slice, out_gradient + at, slice,
                                        one + r, two + r, &own);
                        squares[r] += own;
                    }
                    FN(sums_of_8)(one, logit);
                    FN(sums_of_8)(two, dot);
                    for (int64_t r = 0; r < some; r++) {
                        logits[head * block + place + r * stride] = logit[r];
                        dots[head * block + place + r * stride] = dot[r];
                    }
                }
                FN(sums_of_8)(squares, square);
                for (int64_t r = 0; r < 8; r += LANES) {
                    FN(store_wide)(square + r, FN(rms_inverses)(read, FN(load_wide)(square + r)));
                }
                for (int64_t r = 0; r < some; r++) {
                    inverse[place + r * stride] = square[r];
                    pull[place + r * stride] = 0;
                    for (int64_t head = 0; head < heads; head++) {
                        logits[head * block + place + r * stride] *= square[r];
                    }
                }
            }
        }
        for (int64_t t = 0; t < count; t++) {
            for (int64_t head = 0; head < heads; head++) {
                const int64_t token = first + t, at = token * width + head * slice, place = head * block + t * stride;
                const A *g = out_gradient + t * width + head * slice;
                A *row = rows + place, *dot = dots + place, carried = 0;
                memcpy(row, logits + place, (size_t)sources * sizeof(A));
                FN(routed)(read, row, 0, token, head);
                if (read->carry_value) {
                    SHARED(dot_and_square)((const A *)read->carry_value + at, g, slice, &carried);
                    carried *= row[sources];
                }
                const A carry = FN(route_gradient)(read, row, logits + place, dot, inverse + t * stride,
                                                   pull + t * stride, carried);
                totals[width] += carry;
                if (read->carry_value) {
                    ((A *)read->carry_logit_gradient)[token * heads + head] = carry;
                    SHARED(scale_row)((A *)read->carry_gradient + at, g, row[sources], slice);
                }
            }
        }
        for (int64_t i = 0; i < sources; i += 2) {
            const int two = i + 1 < sources;
            for (int64_t t = 0; t < count; t++) {
                for (int64_t head = 0; head < heads; head++) {
                    const int64_t at = (first + t) * width + head * slice, place = head * block + t * stride + i;
                    const A *const g = out_gradient + t * width + head * slice, *const above[2] = {g, g};
                    const T *const value[2] = {source[i] + at, source[i + two] + at};
                    T *const made[2] = {gradient[i] ? gradient[i] + at : unwanted,
                                        gradient[i + two] ? gradient[i + two] + at : unwanted};
                    (!two ? FN(pull_1) : streamed ? FN(pull_2_streamed) : FN(pull_2))(
                        value, above, query + head * slice, rows + place, dots + place, pull + t * stride + i, made,
                        query_gradient + head * slice, slice);
                }
            }
        }
        FN(settle)(totals, query_gradient, width);
    }
    if (streamed) {
        FN(stream_end)();
    }
}
