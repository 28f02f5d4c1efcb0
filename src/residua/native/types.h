/* Includes KERNEL for each element type T, with A to accumulate in and vectors of BYTES, which are LANES
 * numbers of type A.
 *
 * bfloat16 is the upper half of a float32: stored as uint16_t, computed in float32, rounded to nearest even.
 */
#define T float
#define A float
#define TYPE f32
#define LANES (BYTES / 4)
#include "vector.h"
#include KERNEL
#undef LANES
#undef TYPE
#undef A
#undef T

#define T double
#define A double
#define TYPE f64
#define LANES (BYTES / 8)
#define USE_DOUBLE 1
#include "vector.h"
#include KERNEL
#undef USE_DOUBLE
#undef LANES
#undef TYPE
#undef A
#undef T

#define T uint16_t
#define A float
#define TYPE bf16
#define LANES (BYTES / 4)
#define USE_BFLOAT16 1
#include "vector.h"
#include KERNEL
#undef USE_BFLOAT16
#undef LANES
#undef TYPE
#undef A
#undef T
