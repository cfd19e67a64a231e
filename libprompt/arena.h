/* A bump allocator: everything that one request's parse, render and tokenization need lives and dies together.
 *
 * Not safe for concurrent use; one arena belongs to one request. Pointers stay valid until kvg_arena_free.
 */
#pragma once
#include <stddef.h>

struct kvg_arena_chunk;

struct kvg_arena {
    struct kvg_arena_chunk *chunks; /* newest first */
    char *next, *end;               /* free bytes of the newest chunk */
    size_t used;                    /* bytes handed out */
    size_t limit;                   /* kvg_arena_alloc fails beyond it; 0 = no limit */
};

void kvg_arena_init(struct kvg_arena *arena, size_t limit);
void kvg_arena_free(struct kvg_arena *arena);

/* n bytes, 16-byte aligned, not zeroed; NULL when the limit or memory is exhausted. n == 0 gives a valid pointer. */
void *kvg_arena_alloc(struct kvg_arena *arena, size_t n);
void *kvg_arena_zalloc(struct kvg_arena *arena, size_t n);
/* Grows the allocation `old` of old_n bytes to n bytes, in place where it is the newest one. */
void *kvg_arena_grow(struct kvg_arena *arena, void *old, size_t old_n, size_t n);
char *kvg_arena_copy(struct kvg_arena *arena, const char *bytes, size_t n); /* adds a final NUL */
