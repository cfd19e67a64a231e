#include "libprompt/arena.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 16, CHUNK_MIN = 4096, CHUNK_MAX = 1 << 20 };

/* The header keeps the bytes behind it 16-byte aligned. */
struct kvg_arena_chunk {
    _Alignas(ALIGN) struct kvg_arena_chunk *older;
    size_t size; /* bytes behind the header */
};

static size_t round_up(size_t n)
{
    return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

void kvg_arena_init(struct kvg_arena *arena, size_t limit)
{
    memset(arena, 0, sizeof *arena);
    arena->limit = limit;
}

void kvg_arena_free(struct kvg_arena *arena)
{
    for (struct kvg_arena_chunk *chunk = arena->chunks, *older; chunk; chunk = older) {
        older = chunk->older;
        free(chunk);
    }
    kvg_arena_init(arena, arena->limit);
}

/* Chunks double, so that a request of n bytes costs O(log n) mallocs. */
static int add_chunk(struct kvg_arena *arena, size_t n)
{
    size_t size = arena->chunks ? arena->chunks->size * 2 : CHUNK_MIN;
    if (size > CHUNK_MAX)
        size = CHUNK_MAX;
    if (size < n)
        size = n;
    struct kvg_arena_chunk *chunk = malloc(sizeof *chunk + size);
    if (!chunk)
        return -1;
    chunk->older = arena->chunks;
    chunk->size = size;
    arena->chunks = chunk;
    arena->next = (char *)(chunk + 1);
    arena->end = arena->next + size;
    return 0;
}

void *kvg_arena_alloc(struct kvg_arena *arena, size_t n)
{
    if (n > SIZE_MAX / 2)
        return NULL;
    n = n ? round_up(n) : ALIGN;
    if (arena->limit && n > arena->limit - (arena->used < arena->limit ? arena->used : arena->limit))
        return NULL;
    if ((size_t)(arena->end - arena->next) < n && add_chunk(arena, n) < 0)
        return NULL;
    void *p = arena->next;
    arena->next += n;
    arena->used += n;
    return p;
}

void *kvg_arena_zalloc(struct kvg_arena *arena, size_t n)
{
    void *p = kvg_arena_alloc(arena, n);
    return p ? memset(p, 0, n) : NULL;
}

void *kvg_arena_grow(struct kvg_arena *arena, void *old, size_t old_n, size_t n)
{
    if (n <= old_n)
        return old;
    size_t had = round_up(old_n ? old_n : 1), need = round_up(n);
    if (old && n < SIZE_MAX / 2 && (char *)old + had == arena->next && (size_t)(arena->end - arena->next) >= need - had &&
        (!arena->limit || need - had <= arena->limit - arena->used)) {
        arena->next += need - had;
        arena->used += need - had;
        return old;
    }
    void *p = kvg_arena_alloc(arena, n);
    if (p && old_n)
        memcpy(p, old, old_n);
    return p;
}

char *kvg_arena_copy(struct kvg_arena *arena, const char *bytes, size_t n)
{
    char *p = kvg_arena_alloc(arena, n + 1);
    if (!p)
        return NULL;
    memcpy(p, bytes, n);
    p[n] = '\0';
    return p;
}
