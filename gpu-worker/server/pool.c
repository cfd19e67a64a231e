#include <pthread.h>
#include <stdlib.h>
#include "gpu-worker/server/job.h"
#include "gpu-worker/server/loop.h"

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct job *first, **last; /* the queue, oldest first */
    unsigned n_queued;
    bool stop;
    unsigned n_threads;
    pthread_t threads[];
};

static struct job *take(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    while (!pool->first && !pool->stop)
        pthread_cond_wait(&pool->filled, &pool->lock);
    struct job *job = pool->first;
    if (job) {
        pool->first = job->next;
        if (!pool->first)
            pool->last = &pool->first;
        pool->n_queued--;
    }
    pthread_mutex_unlock(&pool->lock);
    return job;
}

static void *work(void *argument)
{
    struct pool *pool = argument;
    struct job *job;
    while ((job = take(pool))) {
        if (!atomic_load(&job->gone))
            job->ops->run(job);
        loop_post_done(job->loop, job);
    }
    return NULL;
}

int pool_open(struct pool **out, unsigned threads)
{
    struct pool *pool = calloc(1, sizeof *pool + threads * sizeof pool->threads[0]);
    if (!pool)
        return -1;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->filled, NULL);
    pool->last = &pool->first;
    for (; pool->n_threads < threads; pool->n_threads++)
        if (pthread_create(&pool->threads[pool->n_threads], NULL, work, pool) != 0) {
            pool_close(pool);
            return -1;
        }
    *out = pool;
    return 0;
}

void pool_close(struct pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->filled);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->filled);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void pool_add(struct pool *pool, struct job *job)
{
    job->next = NULL;
    pthread_mutex_lock(&pool->lock);
    *pool->last = job;
    pool->last = &job->next;
    pool->n_queued++;
    pthread_cond_signal(&pool->filled);
    pthread_mutex_unlock(&pool->lock);
}

unsigned pool_queued(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    unsigned n = pool->n_queued;
    pthread_mutex_unlock(&pool->lock);
    return n;
}
