/* What the sources, or GCC 12's libstdc++, call and glibc 2.28 lacks. A wheel's programs and modules contain it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden"))) /* other libraries of the process keep the system's */

/* glibc has it since 2.32. False is always right: there may be other threads. */
HIDDEN char __libc_single_threaded = 0;

/* glibc has it since 2.30. With an older glibc, a change of the system's clock shortens or lengthens the wait. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* until) {
  typedef int (*Wait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static Wait cached; /* every thread would store the same */
  Wait wait = __atomic_load_n(&cached, __ATOMIC_RELAXED);
  if (!wait) {
    wait = (Wait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    __atomic_store_n(&cached, wait, __ATOMIC_RELAXED);
  }
  if (wait) return wait(cond, mutex, clock, until);
  const long second = 1000000000;
  struct timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - now.tv_sec;
  real.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) real.tv_nsec += second, --real.tv_sec;
  if (real.tv_nsec >= second) real.tv_nsec -= second, ++real.tv_sec;
  return pthread_cond_timedwait(cond, mutex, &real);
}

/* glibc 2.29 has new versions of these, which differ only in how they report errors. */
#define OLD_VERSION(name, parameters, arguments)          \
  double old_##name parameters;                           \
  __asm__(".symver old_" #name "," #name "@GLIBC_2.2.5"); \
  HIDDEN double name parameters { return old_##name arguments; }
OLD_VERSION(exp, (double x), (x))
OLD_VERSION(exp2, (double x), (x))
OLD_VERSION(log, (double x), (x))
OLD_VERSION(log2, (double x), (x))
OLD_VERSION(pow, (double x, double y), (x, y))
