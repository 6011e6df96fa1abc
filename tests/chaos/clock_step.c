/* A wall clock that can be stepped while a program runs: preloaded into it, this adds the number of
   seconds that the file $CHAOS_CLOCK holds (eight bytes, mapped) to what the program is told.

   libfaketime 0.9.10 does the same but cannot leave the monotonic clock alone: Python's sleep then
   fails with EINVAL. Only waits until a moment of the wall clock are translated back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static const int CONDITION_IS_MONOTONIC = 2; /* glibc: a bit of __wrefs */

static volatile long nothing = 0, *shared = &nothing;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) shared = mapped;
    if (file >= 0) close(file);
}

static int is_wall(clockid_t id) { return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE; }

static const struct timespec *until(const struct timespec *told, struct timespec *real) {
    if (!told) return told;
    *real = *told;
    real->tv_sec = told->tv_sec > *shared ? told->tv_sec - *shared : 0;
    return real;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int status = real(id, now);
    if (status == 0 && is_wall(id)) now->tv_sec += *shared;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static __typeof__(&gettimeofday) real;
    if (!real) real = REAL(gettimeofday);
    int status = real(now, zone);
    if (status == 0 && now) now->tv_sec += *shared;
    return status;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict at) {
    struct timespec real;
    int monotonic = condition->__data.__wrefs & CONDITION_IS_MONOTONIC;
    return REAL(pthread_cond_timedwait)(condition, mutex, monotonic ? at : until(at, &real));
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           clockid_t id, const struct timespec *restrict at) {
    struct timespec real;
    return REAL(pthread_cond_clockwait)(condition, mutex, id, is_wall(id) ? until(at, &real) : at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict at) {
    struct timespec real;
    return REAL(sem_timedwait)(semaphore, until(at, &real));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t id, const struct timespec *restrict at) {
    struct timespec real;
    return REAL(sem_clockwait)(semaphore, id, is_wall(id) ? until(at, &real) : at);
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *at, struct timespec *left) {
    struct timespec real;
    int wall = is_wall(id) && (flags & TIMER_ABSTIME);
    return REAL(clock_nanosleep)(id, flags, wall ? until(at, &real) : at, left);
}

long syscall(long number, ...) { /* abseil waits so */
    va_list list;
    long a[6];
    struct timespec real;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3])
        a[3] = (long)until((const struct timespec *)a[3], &real);
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
