/* A pool of threads that share out the tasks of one call at a time.
 *
 * A call publishes (generation, tasks left) in one 64-bit word; threads take ranges off it by compare-and-swap, so a
 * thread that wakes late, or never gets a core, takes nothing and holds nobody up. Waiting spins for some microseconds
 * and then sleeps in the kernel, which gives the core to whoever has work. */
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

typedef void (*task_fn)(void *arg, int64_t begin, int64_t end, int thread);

static struct {
    pthread_mutex_t lock;              /* one call at a time */
    _Alignas(64) _Atomic uint64_t word; /* generation << 32 | tasks left */
    _Alignas(64) _Atomic int64_t done;
    _Alignas(64) task_fn fn;
    void *arg;
    int64_t total;
    _Atomic int32_t wake;              /* what idle threads sleep on: changes with every call that finds sleepers */
    _Atomic int32_t sleepers;
    _Atomic int32_t caller_sleeps;     /* what the caller sleeps on: 1 while it does */
    _Atomic int wanted;
    int started;
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

static void sleep_while(_Atomic int32_t *word, int32_t value)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool.sleep_lock);
    while (atomic_load(word) == value) pthread_cond_wait(&pool.sleep_cond, &pool.sleep_lock);
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

/* Takes ranges of generation `word >> 32` until none is left: large ones first, so that a stream of weights is read
 * in few pieces, then small ones, so that all threads finish together. */
static void pool_work(uint64_t word, int thread)
{
    const uint32_t generation = (uint32_t)(word >> 32);
    while ((uint32_t)(word >> 32) == generation && (uint32_t)word) {
        /* The fields are those of this generation if the swap succeeds: the caller changes them only when no task
         * of it is left. */
        task_fn fn = *(volatile task_fn *)&pool.fn;
        void *arg = *(void *volatile *)&pool.arg;
        int64_t total = *(volatile int64_t *)&pool.total;
        uint32_t left = (uint32_t)word, take = left / (uint32_t)(4 * pool.wanted) + 1;
        if (!atomic_compare_exchange_weak(&pool.word, &word, word - take)) continue;
        int64_t begin = total - left;
        fn(arg, begin, begin + take, thread);
        if (atomic_fetch_add(&pool.done, take) + take == total && atomic_load(&pool.caller_sleeps)) {
            atomic_store(&pool.caller_sleeps, 0);
            wake_all(&pool.caller_sleeps);
        }
        word = atomic_load(&pool.word);
    }
}

static void *pool_thread(void *index)
{
    const int thread = (int)(intptr_t)index;
    for (;;) {
        int64_t start = 0;
        uint64_t word;
        for (int spins = 1; !(uint32_t)(word = atomic_load(&pool.word)) || thread >= pool.wanted; spins++) {
            cpu_relax();
            if (spins & 63) continue;
            int64_t now = now_ns();
            if (!start) start = now;
            if (now - start < SPIN_IDLE_NS) continue;
            int32_t ticket = atomic_load(&pool.wake);
            atomic_fetch_add(&pool.sleepers, 1);
            word = atomic_load(&pool.word);
            if (!(uint32_t)word || thread >= pool.wanted) sleep_while(&pool.wake, ticket);
            atomic_fetch_sub(&pool.sleepers, 1);
            start = 0;
        }
        pool_work(word, thread);
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
        if (failed) { /* fewer threads do the same work */
            pool.wanted = pool.started + 1;
            return;
        }
        pool.started++;
    }
}

/* Runs fn over [0, total) on all threads; the caller holds pool.lock. fn must not depend on how ranges are cut. */
static void pool_run(task_fn fn, void *arg, int64_t total)
{
    if (total <= 0) return;
    if (pool.wanted == 1 || total == 1) {
        fn(arg, 0, total, 0);
        return;
    }
    if (pool.started < pool.wanted - 1) pool_start();
    pool.fn = fn;
    pool.arg = arg;
    pool.total = total;
    atomic_store(&pool.done, 0);
    uint64_t word = ((atomic_load(&pool.word) >> 32) + 1) << 32 | (uint64_t)total;
    atomic_store(&pool.word, word);
    if (atomic_load(&pool.sleepers)) {
        atomic_fetch_add(&pool.wake, 1);
        wake_all(&pool.wake);
    }
    pool_work(word, 0);
    int64_t start = 0;
    for (int spins = 1; atomic_load(&pool.done) != total; spins++) {
        cpu_relax();
        if (spins & 63) continue;
        int64_t now = now_ns();
        if (!start) start = now;
        if (now - start < SPIN_DONE_NS) continue;
        atomic_store(&pool.caller_sleeps, 1);
        if (atomic_load(&pool.done) != total) sleep_while(&pool.caller_sleeps, 1);
        atomic_store(&pool.caller_sleeps, 0);
        start = 0;
    }
}

static void pool_after_fork(void)
{
    /* only the forking thread lives on in the child */
    pthread_mutex_init(&pool.lock, NULL);
#if !defined(__linux__)
    pthread_mutex_init(&pool.sleep_lock, NULL);
    pthread_cond_init(&pool.sleep_cond, NULL);
#endif
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.word, 0);
    pool.started = 0;
}

__attribute__((constructor)) static void pool_setup(void) { pthread_atfork(NULL, NULL, pool_after_fork); }

/* Sets how many threads, the caller included, work on a call; returns what it is now. 0 only asks. */
int64_t ll_threads(int64_t n)
{
    pthread_mutex_lock(&pool.lock);
    if (n > 0) pool.wanted = (int)(n > MAX_THREADS ? MAX_THREADS : n);
    n = pool.wanted;
    pthread_mutex_unlock(&pool.lock);
    return n;
}

#endif
