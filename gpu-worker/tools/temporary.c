#define _GNU_SOURCE
#include "gpu-worker/tools/temporary.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { TRIES = 20, BETWEEN_TRIES_US = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *held;
static void (*remove_held)(const char *path);
static sem_t arrived;
static volatile sig_atomic_t arrived_signal;

static void on_signal(int number)
{
    int saved = errno;
    arrived_signal = number;
    sem_post(&arrived);
    errno = saved;
}

/* Removing takes calls that a handler must not make. The lock is not given back: nothing gets a name after this. */
static void *wait_for_signal(void *unused)
{
    (void)unused;
    while (sem_wait(&arrived) != 0)
        ;
    int number = arrived_signal;
    pthread_mutex_lock(&lock);
    /* The run goes on until the end of the process, and may just then make another file in a folder. */
    for (int i = 0; held && i < TRIES && access(held, F_OK) == 0; i++) {
        remove_held(held);
        usleep(i ? BETWEEN_TRIES_US : 0);
    }
    if (held)
        fprintf(stderr, "\nkvgate-quantize: interrupted: nothing is left of %s\n", held);
    signal(number, SIG_DFL);
    kill(getpid(), number);
    pause();
    return NULL;
}

int temporary_watch(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    pthread_t thread;
    if (sem_init(&arrived, 0, 0) != 0 || pthread_create(&thread, NULL, wait_for_signal, NULL) != 0)
        return -1;
    pthread_detach(thread);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
    return 0;
}

void temporary_hold(const char *path, void (*remove_it)(const char *path))
{
    pthread_mutex_lock(&lock);
    held = path;
    remove_held = remove_it;
    pthread_mutex_unlock(&lock);
}

int temporary_finish(const char *to)
{
    pthread_mutex_lock(&lock);
    int failed = renameat2(AT_FDCWD, held, AT_FDCWD, to, RENAME_NOREPLACE);
    if (failed && (errno == EINVAL || errno == ENOSYS)) /* not on every file system */
        failed = rename(held, to);
    if (!failed)
        held = NULL;
    pthread_mutex_unlock(&lock);
    return failed ? -1 : 0;
}

void temporary_drop(void)
{
    pthread_mutex_lock(&lock);
    if (held)
        remove_held(held);
    held = NULL;
    pthread_mutex_unlock(&lock);
}
