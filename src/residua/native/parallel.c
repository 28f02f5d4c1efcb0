/* Ranges of rows on threads of their own, made for one call.
 *
 * A standing pool would save some 20 microseconds a call and cost a pool that must survive fork, exit and two Python
 * threads at once. The caller asks for threads only where the work dwarfs that.
 */
#include "kernels.h"
#include <pthread.h>

enum { MOST = 64 };

typedef struct {
    range_function function;
    void *work;
    int64_t begin, end;
    int part;
    pthread_t thread;
    int started;
} range;

static void *run(void *argument) {
    range *one = argument;
    one->function(one->work, one->begin, one->end, one->part);
    return NULL;
}

void residua_parallel(range_function function, void *work, int64_t rows, int threads) {
    range ranges[MOST];
    int64_t parts = threads < 1 ? 1 : threads > MOST ? MOST : threads;
    if (parts > rows) {
        parts = rows > 0 ? rows : 1;
    }
    for (int64_t part = 0; part < parts; part++) {
        ranges[part] = (range){function, work, rows * part / parts, rows * (part + 1) / parts, (int)part, 0, 0};
    }
    for (int64_t part = 1; part < parts; part++) {
        ranges[part].started = pthread_create(&ranges[part].thread, NULL, run, &ranges[part]) == 0;
    }
    run(&ranges[0]);
    for (int64_t part = 1; part < parts; part++) {
        if (ranges[part].started) {
            pthread_join(ranges[part].thread, NULL);
        } else {
            run(&ranges[part]); /* no thread to be had: the answer comes later, not never */
        }
    }
}
