/* A work-stealing thread pool that runs one call at a time.
 *
 * A call gives every thread a contiguous range of tasks (so that weights stream and prefetch) in one 64-bit word:
 * generation, begin, end. The thread takes tasks from the front by compare-and-swap; threads that have finished steal from
 * the back. A thread that wakes late or is preempted delays only the tasks it has already taken. Idle threads spin for some
 * microseconds, then sleep in the kernel; while they spin, they prefetch the memory that the next call will read
 * (`pool_hint`). A thread that keeps the caller waiting probably shares its core with another process, and is left out for
 * a while. */
#ifndef LL_POOL_H
#define LL_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define MAX_THREADS 256
#define SPIN_IDLE_NS 100000  /* a decode step calls again within some 20 us; its sampling takes longer */
#define SPIN_DONE_NS 20000
#define LATE_NS 200000       /* plus a quarter of the call's time so far: longer than any last range takes */
#define REST_NS 10000000     /* doubled if the thread is late again soon after, up to REST_MOST_NS */
#define REST_MOST_NS 160000000
#define HINT_BYTES 262144    /* maximum prefetch of a waiting thread: a quarter of the L2 */
#define HINT_STEP 512        /* bytes between checks for work */

typedef void (*task_fn)(void *arg, int64_t begin, int64_t end, int thread);

#define RANGE_BITS 20
#define RANGE_MAX ((1 << RANGE_BITS) - 1)
#define RANGE_BEGIN(word) ((int64_t)((word) >> RANGE_BITS & RANGE_MAX))
#define RANGE_END(word) ((int64_t)((word) & RANGE_MAX))
#define RANGE_LEFT(word) (RANGE_END(word) - RANGE_BEGIN(word))
#define GENERATION(word) ((word) >> 2 * RANGE_BITS)

typedef struct {
    _Alignas(64) _Atomic uint64_t word;
    _Atomic int32_t wake;     /* futex of the idle thread: changes with every call that finds it asleep */
    _Atomic int32_t asleep;
    _Atomic int32_t working;
    int64_t rests_until, rest; /* used by the caller: left out until this time; duration of the next rest */
} range;

static struct {
    pthread_mutex_t lock;    /* one call at a time */
    _Alignas(64) _Atomic int64_t done;
    _Atomic int32_t caller_sleeps; /* futex of the caller: 1 while it sleeps */
    _Alignas(64) task_fn fn; /* arguments of the call: written only when no task of the previous call is left */
    void *arg;
    int64_t total, grain;
    uint64_t generation;
    _Atomic int wanted;
    const uint8_t *hint;     /* memory that the next call will read, divided among threads by bytes */
    int64_t hint_bytes;
    _Atomic uint32_t hint_id;
    int started;
    range ranges[MAX_THREADS];
#if !defined(__linux__)
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_cond;
#endif
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wanted = 1,
#if !defined(__linux__)
          .sleep_lock = PTHREAD_MUTEX_INITIALIZER, .sleep_cond = PTHREAD_COND_INITIALIZER,
#endif
};

INLINE void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Sleeps while *word is `value`, for at most `most_ns` (0: until woken); may return early. */
static void sleep_while(_Atomic int32_t *word, int32_t value, int64_t most_ns)
{
#if defined(__linux__)
    struct timespec most = {most_ns / 1000000000, most_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, most_ns ? &most : NULL, NULL, 0);
#else
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += most_ns % 1000000000;
    until.tv_sec += most_ns / 1000000000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&pool.sleep_lock);
    for (int over = 0; atomic_load(word) == value && !over;)
        over = most_ns ? pthread_cond_timedwait(&pool.sleep_cond, &pool.sleep_lock, &until) != 0
                       : pthread_cond_wait(&pool.sleep_cond, &pool.sleep_lock) != 0;
    pthread_mutex_unlock(&pool.sleep_lock);
#endif
}

static void wake_all(_Atomic int32_t *word)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
#else
    (void)word;
    pthread_mutex_lock(&pool.sleep_lock);
    pthread_cond_broadcast(&pool.sleep_cond);
    pthread_mutex_unlock(&pool.sleep_lock);
#endif
}

/* Takes tasks from the front or back of range `of` of the generation and runs them. Returns the number of tasks, 0 if none
 * was left. */
static int64_t pool_take(int of, uint64_t generation, int thread)
{
    uint64_t word = atomic_load(&pool.ranges[of].word);
    for (;;) {
        const int64_t left = RANGE_LEFT(word);
        if (GENERATION(word) != generation || left <= 0) return 0;
        /* valid for this generation if the swap succeeds: the caller changes them only when no task is left */
        task_fn fn = *(volatile task_fn *)&pool.fn;
        void *arg = *(void *volatile *)&pool.arg;
        int64_t total = *(volatile int64_t *)&pool.total, grain = *(volatile int64_t *)&pool.grain;
        const int64_t take = (left + 7) / 8;
        const uint64_t rest = of == thread ? word + ((uint64_t)take << RANGE_BITS) : word - (uint64_t)take;
        if (!atomic_compare_exchange_weak(&pool.ranges[of].word, &word, rest)) continue;
        int64_t begin = (of == thread ? RANGE_BEGIN(word) : RANGE_END(word) - take) * grain, end = begin + take * grain;
        fn(arg, begin, end < total ? end : total, thread);
        return take;
    }
}

static void pool_work(uint64_t generation, int thread)
{
    const int threads = pool.wanted;
    int64_t ran = 0, total = *(volatile int64_t *)&pool.total, grain = *(volatile int64_t *)&pool.grain;
    atomic_store(&pool.ranges[thread].working, 1);
    for (int i = 0; i < threads; i++) {
        int of = thread + i < threads ? thread + i : thread + i - threads;
        for (int64_t n; (n = pool_take(of, generation, thread)) > 0;) ran += n;
    }
    atomic_store(&pool.ranges[thread].working, 0);
    if (!ran) return; /* the call may be over, and its arguments invalid */
    if (atomic_fetch_add(&pool.done, ran) + ran == (total + grain - 1) / grain && atomic_load(&pool.caller_sleeps)) {
        atomic_store(&pool.caller_sleeps, 0);
        wake_all(&pool.caller_sleeps);
    }
}

/* Tells waiting threads what the next call will read. A torn read of the hint is harmless: prefetches never fault. */
INLINE void pool_hint(const void *data, int64_t bytes)
{
    if (pool.wanted < 2) return;
    pool.hint = data;
    pool.hint_bytes = bytes;
    atomic_fetch_add_explicit(&pool.hint_id, 1, memory_order_release);
}

typedef struct {
    uint32_t id;
    const uint8_t *at, *end;
} hint_left;

/* Prefetches a little of the hinted memory; returns 0 when nothing is left. */
INLINE int pool_fetch(hint_left *h, int thread)
{
    const uint32_t id = atomic_load_explicit(&pool.hint_id, memory_order_acquire);
    if (id != h->id) {
        const int64_t bytes = *(volatile int64_t *)&pool.hint_bytes, threads = pool.wanted;
        const uint8_t *from = *(const uint8_t *volatile *)&pool.hint;
        h->id = id;
        h->at = from + (bytes * thread / threads & ~(int64_t)63);
        h->end = from + bytes * (thread + 1) / threads;
        if (h->end > h->at + HINT_BYTES) h->end = h->at + HINT_BYTES;
    }
    if (h->at >= h->end) return 0;
    for (const uint8_t *stop = h->at + HINT_STEP; h->at < stop && h->at < h->end; h->at += 64) __builtin_prefetch(h->at, 0, 2);
    return 1;
}

static void *pool_thread(void *index)
{
    const int thread = (int)(intptr_t)index;
    range *mine = &pool.ranges[thread];
    uint64_t seen = GENERATION(atomic_load(&mine->word));
    hint_left hint = {0};
    for (;;) {
        int64_t start = 0;
        uint64_t word;
        for (int spins = 1; word = atomic_load(&mine->word), GENERATION(word) == seen && !RANGE_LEFT(word); spins++) {
            if (!pool_fetch(&hint, thread)) cpu_relax();
            if (spins & 63) continue;
            int64_t now = now_ns();
            if (!start) start = now;
            if (now - start < SPIN_IDLE_NS) continue;
            int32_t ticket = atomic_load(&mine->wake);
            atomic_store(&mine->asleep, 1);
            word = atomic_load(&mine->word);
            if (GENERATION(word) == seen && !RANGE_LEFT(word)) sleep_while(&mine->wake, ticket, 0);
            atomic_store(&mine->asleep, 0);
            start = 0;
        }
        seen = GENERATION(word);
        pool_work(seen, thread);
    }
    return NULL;
}

static void pool_start(void)
{
    while (pool.started < pool.wanted - 1) {
        pthread_t id;
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attr, 1 << 20);
        int failed = pthread_create(&id, &attr, pool_thread, (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attr);
        if (failed) { /* continue with fewer threads */
            pool.wanted = pool.started + 1;
            return;
        }
        pool.started++;
    }
}

/* Leaves out the threads that are still working on this call, because they were preempted. */
static void pool_rest(int64_t now)
{
    for (int t = 1; t < pool.wanted; t++) {
        range *r = &pool.ranges[t];
        if (!atomic_load(&r->working)) continue;
        const int again = r->rest && now - r->rests_until < 10 * REST_NS;
        r->rest = !again ? REST_NS : r->rest < REST_MOST_NS ? 2 * r->rest : REST_MOST_NS;
        r->rests_until = now + r->rest;
    }
}

/* Runs fn over [0, total) on all threads; the caller holds pool.lock. fn must not depend on how ranges are split. */
static void pool_run(task_fn fn, void *arg, int64_t total)
{
    if (total <= 0) return;
    if (pool.wanted > 1 && pool.started < pool.wanted - 1) pool_start();
    int threads[MAX_THREADS], count = 1;
    const int64_t begun = pool.wanted > 1 && total > 1 ? now_ns() : 0;
    threads[0] = 0;
    for (int t = 1; begun && t < pool.wanted; t++)
        if (pool.ranges[t].rests_until <= begun) threads[count++] = t;
    if (count == 1) {
        fn(arg, 0, total, 0);
        return;
    }
    const int64_t grain = (total + RANGE_MAX - 1) / RANGE_MAX, units = (total + grain - 1) / grain;
    pool.fn = fn;
    pool.arg = arg;
    pool.total = total;
    pool.grain = grain;
    pool.generation = (pool.generation + 1) & (((uint64_t)1 << (64 - 2 * RANGE_BITS)) - 1);
    atomic_store(&pool.done, 0);
    for (int i = count - 1; i >= 0; i--) {
        range *r = &pool.ranges[threads[i]];
        uint64_t begin = (uint64_t)(units * i / count), end = (uint64_t)(units * (i + 1) / count);
        atomic_store(&r->word, pool.generation << 2 * RANGE_BITS | begin << RANGE_BITS | end);
        if (i && atomic_load(&r->asleep)) {
            atomic_fetch_add(&r->wake, 1);
            wake_all(&r->wake);
        }
    }
    pool_work(pool.generation, 0);
    int64_t start = 0, late_ns = LATE_NS + (begun ? (now_ns() - begun) / 4 : 0);
    for (int spins = 1; atomic_load(&pool.done) != units; spins++) {
        cpu_relax();
        if (spins & 63) continue;
        int64_t now = now_ns();
        if (!start) start = now;
        if (now - start < SPIN_DONE_NS) continue;
        if (late_ns && now - start >= late_ns) {
            pool_rest(now);
            late_ns = 0;
        }
        atomic_store(&pool.caller_sleeps, 1);
        if (atomic_load(&pool.done) != units) sleep_while(&pool.caller_sleeps, 1, late_ns);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

static void pool_after_fork(void)
{
    /* only the forking thread survives in the child */
    pthread_mutex_init(&pool.lock, NULL);
#if !defined(__linux__)
    pthread_mutex_init(&pool.sleep_lock, NULL);
    pthread_cond_init(&pool.sleep_cond, NULL);
#endif
    memset(pool.ranges, 0, sizeof pool.ranges);
    pool.generation = 0;
    pool.started = 0;
}

__attribute__((constructor)) static void pool_setup(void) { pthread_atfork(NULL, NULL, pool_after_fork); }

/* Sets the number of threads per call, including the caller; returns the current number. 0 only queries it. */
int64_t ll_threads(int64_t n)
{
    pthread_mutex_lock(&pool.lock);
    if (n > 0) pool.wanted = (int)(n > MAX_THREADS ? MAX_THREADS : n);
    n = pool.wanted;
    pthread_mutex_unlock(&pool.lock);
    return n;
}

#endif
