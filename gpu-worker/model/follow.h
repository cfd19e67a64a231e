/* How rank 0 of a tensor-parallel group tells the others what to do, step by step, and how they read it.
 *
 *   rank 0    order_step(batch)          order_kv(blocks)         order_close()
 *   others    order_read -> ORDER_STEP   order_read -> ORDER_KV   order_read -> ORDER_CLOSE
 *
 * An order is a head of fixed size and, of a step, its words: ids, output rows, sequences, block tables. Both sides keep one
 * struct orders; its memory grows as batches do. */
#pragma once
#include <stdint.h>
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/model/model.h"

enum order_kind { ORDER_CLOSE, ORDER_KV, ORDER_STEP };

struct orders {
    struct comm *comm;
    uint32_t *words;
    size_t capacity;
    struct model_seq *seqs; /* [max_seqs] of the step that was read */
    uint32_t max_seqs;
};

struct order {
    enum order_kind kind;
    uint32_t n_blocks, block_size; /* ORDER_KV */
    struct model_batch batch;      /* ORDER_STEP; its arrays are valid until the next order_read */
};

int orders_init(struct orders *orders, struct comm *comm, uint32_t max_seqs, struct kvg_error *err);
void orders_free(struct orders *orders);

/* Rank 0. The batch was checked; of its block tables so much is sent as its rows need. */
int order_step(struct orders *orders, const struct model_batch *batch, uint32_t block_size, struct kvg_error *err);
int order_kv(struct orders *orders, uint32_t n_blocks, uint32_t block_size, struct kvg_error *err);
int order_close(struct orders *orders, struct kvg_error *err);

/* The others: waits for the next order. */
int order_read(struct orders *orders, struct order *out, struct kvg_error *err);
