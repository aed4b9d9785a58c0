/* The loops over runs that cost too much in Python: copying them, and giving them to UCX one by one.
 *
 * Plain C without any library: functions of UCX come in as pointers, so that one build serves whichever UCX is chosen.
 * Called through ctypes, which leaves Python's other threads running meanwhile. pdtx/native/__init__.py describes the
 * functions; VERSION there and here change together with any signature. */
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define VERSION 3
#define MAX_THREADS 16

/* UCX returns no request for what is done already, and an error as one of the last hundred addresses. */
#define IS_ERROR(request) ((uintptr_t)(request) >= (uintptr_t)-100)
#define IN_PROGRESS 1
#define BUSY (-15)

typedef void *(*post_function)(void *endpoint, void *local, size_t nbytes, uint64_t remote, void *key,
                               const void *param);
typedef signed char (*check_function)(void *request); /* UCX keeps a status in one byte */
typedef void (*free_function)(void *request);
typedef unsigned (*progress_function)(void *worker);
typedef signed char (*arm_function)(void *worker);

int64_t pdtx_version(void) { return VERSION; }

static int inside(int64_t offset, int64_t nbytes, int64_t size) {
    return nbytes >= 0 && offset >= 0 && nbytes <= size && offset <= size - nbytes;
}

/* memcpy that leaves the caches alone: the processor need not fetch what is overwritten, a third of the traffic. */
static void copy_past_caches(char *dst, const char *src, size_t nbytes) {
#ifdef __SSE2__
    size_t head = -(uintptr_t)dst & 15;
    if (nbytes >= 128) {
        memcpy(dst, src, head);
        dst += head, src += head, nbytes -= head;
        for (; nbytes >= 64; dst += 64, src += 64, nbytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
            _mm_stream_si128((__m128i *)dst, a), _mm_stream_si128((__m128i *)(dst + 16), b);
            _mm_stream_si128((__m128i *)(dst + 32), c), _mm_stream_si128((__m128i *)(dst + 48), d);
        }
    }
#endif
    memcpy(dst, src, nbytes);
}

/* A part of the runs, for one thread. */
typedef struct {
    char *dst_base;
    const char *src_base;
    const int64_t *dst, *src, *nbytes;
    int64_t first, stop;
    int past_caches;
} share;

static void *copy_share(void *argument) {
    const share *own = argument;
    for (int64_t i = own->first; i < own->stop; i++) {
        if (own->past_caches)
            copy_past_caches(own->dst_base + own->dst[i], own->src_base + own->src[i], (size_t)own->nbytes[i]);
        else
            memcpy(own->dst_base + own->dst[i], own->src_base + own->src[i], (size_t)own->nbytes[i]);
    }
#ifdef __SSE2__
    if (own->past_caches)
        _mm_sfence(); /* whoever is told of the bytes from now on sees them */
#endif
    return NULL;
}

/* Copy runs; return how many, which is less than count if the next one leaves a region. In their order with one thread;
 * with more, each takes a share of about as many bytes, whole runs, and what overlaps may come in any order.
 * past_caches: whether the runs are too many bytes to be found in a cache afterwards. */
int64_t pdtx_copy_runs(char *dst_base, int64_t dst_size, const char *src_base, int64_t src_size, const int64_t *dst,
                       const int64_t *src, const int64_t *nbytes, int64_t count, int past_caches, int threads) {
    share shares[MAX_THREADS];
    pthread_t others[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    int64_t good = 0, total = 0, next = 0, given = 0;
    for (; good < count && inside(dst[good], nbytes[good], dst_size) && inside(src[good], nbytes[good], src_size); good++)
        total += nbytes[good];
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    for (int t = 0; t < threads; t++) {
        int64_t first = next, until = t == threads - 1 ? total : total / threads * (t + 1);
        while (next < good && (t == threads - 1 || given < until))
            given += nbytes[next++];
        shares[t] = (share){dst_base, src_base, dst, src, nbytes, first, next, past_caches};
    }
    for (int t = 1; t < threads; t++)
        started[t] = shares[t].first < shares[t].stop && pthread_create(&others[t], NULL, copy_share, &shares[t]) == 0;
    copy_share(&shares[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t])
            pthread_join(others[t], NULL);
        else
            copy_share(&shares[t]); /* there was no thread to be had */
    }
    return good;
}

/* Post runs in their order; return how many. Requests that are not done at once go to pending, *num_pending of them.
 * Ends early where posting fails: the error stands in pending behind the requests, which has room for count. */
int64_t pdtx_post_runs(post_function post, void *endpoint, uint64_t local_base, uint64_t remote_base,
                       const int64_t *local, const int64_t *remote, const int64_t *nbytes, int64_t count, void *key,
                       const void *param, uint64_t *pending, int64_t *num_pending) {
    int64_t waiting = 0, i;
    for (i = 0; i < count; i++) {
        void *request = post(endpoint, (void *)(uintptr_t)(local_base + (uint64_t)local[i]), (size_t)nbytes[i],
                             remote_base + (uint64_t)remote[i], key, param);
        if (request == NULL)
            continue;
        pending[waiting] = (uint64_t)(uintptr_t)request;
        if (IS_ERROR(request))
            break;
        waiting++;
    }
    *num_pending = waiting;
    return i;
}

/* Free the requests that have ended and keep the others, in their order; return how many are kept.
 * *first_error: set to the first status that is an error, unless it was one before; 0 for none. */
int64_t pdtx_reap(check_function check, free_function free_request, uint64_t *pending, int64_t num_pending,
                  int64_t *first_error) {
    int64_t kept = 0;
    for (int64_t i = 0; i < num_pending; i++) {
        void *request = (void *)(uintptr_t)pending[i];
        int status = check(request);
        if (status == IN_PROGRESS) {
            pending[kept++] = pending[i];
            continue;
        }
        if (status < 0 && *first_error == 0)
            *first_error = status;
        free_request(request);
    }
    return kept;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait for one of two descriptors, of which the second may be -1; whether it is the second that can be read. */
static int second_readable(int first, int second, int timeout_ms) {
    struct pollfd descriptors[2] = {{first, POLLIN, 0}, {second, POLLIN, 0}};
    return poll(descriptors, 2, timeout_ms) > 0 && descriptors[1].revents != 0;
}

/* Let a UCX worker make progress until a request has ended or a descriptor can be read: 1 then, else 0 after timeout_ns
 * or when *interrupted is found set, and a status below 0 if the worker cannot be waited for. Sleeps once the worker
 * has had nothing to do for spin_ns; event wakes it. request: NULL for none. descriptor: -1 for none. */
int64_t pdtx_pump(progress_function progress, arm_function arm, void *worker, int event, int descriptor,
                  check_function check, void *request, volatile int64_t *interrupted, int64_t spin_ns,
                  int64_t timeout_ns) {
    const int64_t begun = now_ns();
    int64_t quiet_since = -1;
    for (;;) {
        int busy = 0;
        /* A turn is short enough for a control message to be seen soon in the middle of a stream. */
        for (int i = 0; i < 16 && progress(worker); i++)
            busy = 1;
        if (request != NULL && check(request) != IN_PROGRESS)
            return 1;
        if (descriptor >= 0 && second_readable(-1, descriptor, 0))
            return 1;
        const int64_t now = now_ns();
        if (now - begun >= timeout_ns || *interrupted)
            return 0;
        if (busy) {
            quiet_since = -1;
        } else if (quiet_since < 0) {
            quiet_since = now;
        } else if (now - quiet_since >= spin_ns) {
            const int status = arm(worker);
            if (status == BUSY)
                continue;
            if (status < 0)
                return status;
            /* What came before this was seen by the turn, and what comes from now on wakes event. */
            if (second_readable(event, descriptor, (int)((timeout_ns - (now - begun)) / 1000000) + 1))
                return 1;
            quiet_since = -1;
        }
    }
}
