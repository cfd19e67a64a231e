#include "gpu-worker/model/follow.h"
#include <stdlib.h>
#include <string.h>

struct head {
    uint32_t kind, n_rows, n_seqs, n_outputs, n_blocks, block_size; /* n_blocks: of all tables together, or of the pool */
    uint32_t brief;
};

enum { SEQ_WORDS = 4 };

int orders_init(struct orders *orders, struct comm *comm, uint32_t max_seqs, struct kvg_error *err)
{
    *orders = (struct orders){.comm = comm, .max_seqs = max_seqs, .seqs = calloc(max_seqs, sizeof *orders->seqs)};
    return orders->seqs ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for %u sequences", max_seqs);
}

void orders_free(struct orders *orders)
{
    free(orders->words);
    free(orders->seqs);
    *orders = (struct orders){0};
}

static int reserve(struct orders *orders, size_t n, struct kvg_error *err)
{
    if (n <= orders->capacity)
        return 0;
    uint32_t *words = realloc(orders->words, 2 * n * sizeof *words);
    if (!words)
        return kvg_fail(err, KVG_NOMEM, "no memory for a step of %zu words", n);
    orders->words = words;
    orders->capacity = 2 * n;
    return 0;
}

static size_t words_of(const struct head *head)
{
    return (size_t)head->n_rows + head->n_outputs + (size_t)head->n_seqs * SEQ_WORDS + head->n_blocks;
}

static uint32_t blocks_of(const struct model_seq *seq, uint32_t block_size)
{
    return (seq->n_past + seq->n_rows + block_size - 1) / block_size;
}

static uint32_t *put(uint32_t *at, const uint32_t *words, size_t n)
{
    if (n)
        memcpy(at, words, n * sizeof *at);
    return at + n;
}

static int send(struct orders *orders, struct head *head, struct kvg_error *err)
{
    return orders->comm->ops->broadcast(orders->comm, head, sizeof *head, err);
}

int order_step(struct orders *orders, const struct model_batch *batch, uint32_t block_size, struct kvg_error *err)
{
    struct head head = {ORDER_STEP, batch->n_rows, batch->n_seqs, batch->n_outputs, 0, block_size, batch->brief};
    for (uint32_t i = 0; i < batch->n_seqs; i++)
        head.n_blocks += blocks_of(&batch->seqs[i], block_size);
    size_t n = words_of(&head);
    int failed = reserve(orders, n, err);
    if (failed || (failed = send(orders, &head, err)))
        return failed;
    uint32_t *at = put(put(orders->words, batch->ids, batch->n_rows), batch->outputs, batch->n_outputs);
    for (uint32_t i = 0; i < batch->n_seqs; i++) {
        const struct model_seq *seq = &batch->seqs[i];
        const uint32_t words[SEQ_WORDS] = {seq->first_row, seq->n_rows, seq->n_past, blocks_of(seq, block_size)};
        at = put(at, words, SEQ_WORDS);
    }
    for (uint32_t i = 0; i < batch->n_seqs; i++)
        at = put(at, batch->seqs[i].blocks, blocks_of(&batch->seqs[i], block_size));
    return orders->comm->ops->broadcast(orders->comm, orders->words, n * sizeof *orders->words, err);
}

int order_kv(struct orders *orders, uint32_t n_blocks, uint32_t block_size, struct kvg_error *err)
{
    struct head head = {.kind = ORDER_KV, .n_blocks = n_blocks, .block_size = block_size};
    return send(orders, &head, err);
}

int order_close(struct orders *orders, struct kvg_error *err)
{
    struct head head = {.kind = ORDER_CLOSE};
    return send(orders, &head, err);
}

static int read_step(struct orders *orders, const struct head *head, struct model_batch *batch, struct kvg_error *err)
{
    size_t n = words_of(head);
    int failed = reserve(orders, n, err);
    if (head->n_seqs > orders->max_seqs)
        return kvg_fail(err, KVG_INVALID, "a step of %u sequences (most %u)", head->n_seqs, orders->max_seqs);
    if (failed || (failed = orders->comm->ops->broadcast(orders->comm, orders->words, n * sizeof *orders->words, err)))
        return failed;
    const uint32_t *ids = orders->words, *outputs = ids + head->n_rows, *seqs = outputs + head->n_outputs;
    const uint32_t *blocks = seqs + (size_t)head->n_seqs * SEQ_WORDS;
    for (uint32_t i = 0; i < head->n_seqs; i++, seqs += SEQ_WORDS) {
        orders->seqs[i] = (struct model_seq){seqs[0], seqs[1], seqs[2], blocks, seqs[3]};
        blocks += seqs[3];
    }
    *batch =
        (struct model_batch){head->n_rows, ids, head->n_seqs, orders->seqs, head->n_outputs, outputs, .brief = head->brief != 0};
    return 0;
}

int order_read(struct orders *orders, struct order *out, struct kvg_error *err)
{
    struct head head;
    int failed = orders->comm->ops->broadcast(orders->comm, &head, sizeof head, err);
    if (failed)
        return failed;
    *out = (struct order){.kind = (enum order_kind)head.kind, .n_blocks = head.n_blocks, .block_size = head.block_size};
    return out->kind == ORDER_STEP ? read_step(orders, &head, &out->batch, err) : 0;
}
