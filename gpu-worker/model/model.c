#include "gpu-worker/model/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cuda_plugin.h"
#include "gpu-worker/log.h"
#include "gpu-worker/model/family.h"
#include "gpu-worker/model/follow.h"
#include "gpu-worker/model/loader.h"
#include "gpu-worker/model/safetensors.h"
#include "gpu-worker/model/watch.h"

enum { DEFAULT_ROWS = 2048, DEFAULT_SEQS = 64 };

struct model {
    /* Mapped as long as the model lives: embeddings are read from them. */
    struct kvg_gguf *gguf;
    struct safetensors *folder; /* NULL: the tensors are in gguf */
    struct backend *backend;
    struct watched *watched;   /* with options.watch */
    struct family_model parts; /* its family: NULL until the loader knows it */
    struct model_info info;
    struct model_options options;
    struct backend_kv kv;     /* n_blocks = 0 until model_kv_alloc */
    struct backend_seq *seqs; /* [max_seqs] */
    struct orders orders;     /* with options.comm */
    bool leads;               /* rank 0 of a group whose other ranks follow */
};

static int open_backend(struct model *model, struct kvg_error *err)
{
    const char *device = model->options.device ? model->options.device : "auto";
    struct backend_options options = {.isa = model->options.cpu_isa,
                                      .arithmetic = model->options.cpu_arithmetic,
                                      .threads = model->options.threads,
                                      .max_rows = model->options.max_rows,
                                      .max_seqs = model->options.max_seqs,
                                      .max_outputs = model->options.max_outputs,
                                      .deterministic = model->options.deterministic,
                                      .eager = model->options.enforce_eager,
                                      .comm = model->options.comm};
    if (strcmp(device, "auto") != 0 && strcmp(device, "cpu") != 0 && strcmp(device, "cuda") != 0)
        return kvg_fail(err, KVG_INVALID, "unknown --device \"%s\" (auto, cpu, cuda)", device);
    int failed = KVG_UNSUPPORTED;
    struct kvg_error why = {0};
    if (strcmp(device, "cpu") != 0) {
        failed = cuda_backend_open(&model->backend, &options, &why);
        if (failed && err)
            *err = why;
        if (failed && (failed != KVG_UNSUPPORTED || strcmp(device, "cuda") == 0))
            return failed;
        if (failed)
            log_info("--device auto: running on the CPU; %s", why.message);
    }
    return failed ? cpu_backend_open(&model->backend, &options, err) : 0;
}

/* The backend, and how it keeps keys and values. */
static int open_device(struct model *model, struct kvg_error *err)
{
    int failed = backend_kv_dtype(model->options.kv_cache_dtype, &model->kv.dtype, err);
    if (!failed)
        failed = open_backend(model, err);
    if (!failed && model->kv.dtype == KV_AUTO)
        model->kv.dtype = model->backend->kv_auto;
    if (!failed && model->options.watch)
        failed = watch_install(&model->watched, model->backend, model->options.watch, err);
    return failed;
}

static int load_weights(struct model *model, struct kvg_error *err)
{
    struct loader loader = {.folder = model->folder,
                            .progress = model->options.progress,
                            .context = model->options.context,
                            .watch = model->options.watch,
                            .rank = model->options.comm ? model->options.comm->rank : 0,
                            .ranks = model->options.comm ? model->options.comm->size : 1};
    int failed = loader_init(&loader, model->gguf, model->backend, err);
    if (failed)
        goto done;
    model->parts.family = loader.family;
    failed = loader.family->load(&model->parts, &loader, model->options.max_rows, model->options.max_outputs, err);
    if (!failed)
        failed = loader_finish(&loader, err);
    model->info.weight_bytes = loader.total_bytes;
    if (!failed && loader.progress)
        loader.progress(1, loader.context);
done:
    loader_free(&loader);
    return failed;
}

static void fill_info(struct model *model)
{
    const struct shape *s = &model->parts.shape;
    struct model_info *info = &model->info;
    info->family = model->parts.family->name;
    info->n_layers = s->n_layers;
    info->n_heads = s->n_heads;
    info->n_kv_heads = s->n_kv_heads;
    info->head_dim = s->head_dim;
    info->hidden = s->hidden;
    info->n_vocab = model->parts.n_vocab;
    info->samples_ahead = model->backend->ops->memory != NULL; /* the call waits for another device */
    info->max_position = s->max_position;
    info->scored = model->parts.brief_logits ? model->parts.scored : info->n_vocab;
    info->ranks = model->parts.share.size;
    int n = info->ranks > 1 ? snprintf(info->backend, sizeof info->backend, "%u ranks of ", info->ranks) : 0;
    model->backend->ops->describe(model->backend, info->backend + n, sizeof info->backend - (size_t)n);
    info->kv_cache_dtype = backend_kv_dtype_name(model->kv.dtype);
    model->kv.n_layers = s->n_layers;
    model->kv.n_heads = model->parts.share.n_heads;
    model->kv.n_kv_heads = model->parts.share.n_kv_heads;
    model->kv.head_dim = s->head_dim;
    model->kv.windows = s->windowed ? s->windows : NULL;
}

int model_open(struct model **out, const struct model_options *options, struct kvg_error *err)
{
    struct model *model = calloc(1, sizeof *model);
    int failed;
    if (!model)
        return comm_agree(options->comm, kvg_fail(err, KVG_NOMEM, "no memory for a model"), err);
    model->options = *options;
    if (!model->options.max_rows)
        model->options.max_rows = DEFAULT_ROWS;
    if (!model->options.max_seqs)
        model->options.max_seqs = DEFAULT_SEQS;
    if (!model->options.max_outputs)
        model->options.max_outputs = model->options.max_seqs;
    model->parts.scored = model->options.scored;
    model->seqs = calloc(model->options.max_seqs, sizeof *model->seqs);
    if (!model->seqs)
        failed = kvg_fail(err, KVG_NOMEM, "no memory for %u sequences", model->options.max_seqs);
    else if (!(failed = options->comm ? orders_init(&model->orders, options->comm, model->options.max_seqs, err) : 0))
        failed = loader_open_files(model->options.path, &model->gguf, &model->folder, err);
    /* A rank that fails must not leave the others waiting for it in what they do together next. */
    if (!(failed = comm_agree(options->comm, failed, err)) && !(failed = comm_agree(options->comm, open_device(model, err), err)))
        failed = comm_agree(options->comm, load_weights(model, err), err);
    if (failed) {
        model_close(model);
        return failed;
    }
    model->leads = options->comm && options->comm->rank == 0;
    fill_info(model);
    *out = model;
    return 0;
}

void model_close(struct model *model)
{
    if (!model)
        return;
    if (model->leads)
        order_close(&model->orders, NULL);
    orders_free(&model->orders);
    if (model->parts.family)
        model->parts.family->free(&model->parts);
    if (model->backend)
        model->backend->ops->close(model->backend);
    watch_free(model->watched);
    if (model->gguf)
        kvg_gguf_close(model->gguf);
    safetensors_close(model->folder);
    free(model->seqs);
    free(model);
}

const struct model_info *model_info(const struct model *model)
{
    return &model->info;
}

size_t model_kv_block_bytes(const struct model *model, uint32_t block_size)
{
    struct backend_kv kv = model->kv;
    kv.block_size = block_size;
    size_t bytes = model->backend->ops->kv_block_bytes(model->backend, &kv);
    return model->backend->ops->memory ? bytes : bytes * model->info.ranks;
}

uint64_t model_device_memory(const struct model *model, uint64_t *free_bytes)
{
    const struct backend_ops *ops = model->backend->ops;
    *free_bytes = 0;
    return ops->memory ? ops->memory(model->backend, free_bytes) : 0;
}

int model_kv_alloc(struct model *model, uint32_t n_blocks, uint32_t block_size, struct kvg_error *err)
{
    struct backend_kv kv = model->kv;
    if (model->kv.n_blocks)
        return kvg_fail(err, KVG_INVALID, "the KV pool is already allocated (%u blocks)", model->kv.n_blocks);
    if (n_blocks == 0)
        return kvg_fail(err, KVG_INVALID, "a KV pool of 0 blocks");
    kv.n_blocks = n_blocks;
    kv.block_size = block_size;
    int failed = model->leads ? order_kv(&model->orders, n_blocks, block_size, err) : 0;
    if (failed || (failed = comm_agree(model->options.comm, model->backend->ops->kv_alloc(model->backend, &kv, err), err)))
        return failed;
    model->kv = kv;
    return 0;
}

static int check_batch(const struct model *model, const struct model_batch *batch, struct kvg_error *err)
{
    if (model->kv.n_blocks == 0)
        return kvg_fail(err, KVG_INVALID, "a forward before the KV pool is allocated");
    if (batch->n_rows == 0 || batch->n_seqs > model->options.max_seqs)
        return kvg_fail(err, KVG_INVALID, "a batch of %u rows and %u sequences (most %u)", batch->n_rows, batch->n_seqs,
                        model->options.max_seqs);
    for (uint32_t i = 0; i < batch->n_rows; i++)
        if (batch->ids[i] >= model->info.n_vocab)
            return kvg_fail(err, KVG_INVALID, "token id %u of a vocabulary of %u", batch->ids[i], model->info.n_vocab);
    for (uint32_t i = 0; i < batch->n_outputs; i++)
        if (batch->outputs[i] >= batch->n_rows)
            return kvg_fail(err, KVG_INVALID, "output row %u of %u", batch->outputs[i], batch->n_rows);
    for (uint32_t i = 0; i < batch->n_seqs; i++) {
        const struct model_seq *seq = &batch->seqs[i];
        uint64_t tokens = (uint64_t)seq->n_past + seq->n_rows, room = (uint64_t)seq->n_blocks * model->kv.block_size;
        if (tokens > room)
            return kvg_fail(err, KVG_INVALID, "sequence %u has %llu tokens and blocks for %llu", i, (unsigned long long)tokens,
                            (unsigned long long)room);
    }
    return 0;
}

/* This rank's part of a step. */
static int run_batch(struct model *model, const struct model_batch *batch, struct kvg_error *err)
{
    struct backend *backend = model->backend;
    int failed;
    for (uint32_t i = 0; i < batch->n_seqs; i++) {
        const struct model_seq *seq = &batch->seqs[i];
        model->seqs[i] = (struct backend_seq){seq->first_row, seq->n_rows, seq->n_past, seq->blocks};
    }
    struct backend_step step = {.n_rows = batch->n_rows,
                                .n_seqs = batch->n_seqs,
                                .n_outputs = batch->n_outputs,
                                .ids = batch->ids,
                                .outputs = batch->outputs,
                                .seqs = model->seqs};
    if ((failed = backend->ops->begin_step(backend, &step, err)))
        return failed;
    model->parts.brief = batch->brief && model->parts.brief_logits;
    model->parts.family->forward(&model->parts, backend, batch->n_rows, batch->n_outputs);
    return backend->ops->end_step(backend, err);
}

int model_forward(struct model *model, const struct model_batch *batch, struct kvg_error *err)
{
    int failed = check_batch(model, batch, err);
    if (failed || (model->leads && (failed = order_step(&model->orders, batch, model->kv.block_size, err))))
        return failed;
    return run_batch(model, batch, err);
}

int model_follow(struct model *model, struct kvg_error *err)
{
    struct order order;
    int failed;
    while (!(failed = order_read(&model->orders, &order, err)) && order.kind != ORDER_CLOSE) {
        if (order.kind == ORDER_STEP)
            failed = run_batch(model, &order.batch, err);
        else
            model_kv_alloc(model, order.n_blocks, order.block_size, NULL); /* rank 0 says what failed, and ends */
        if (failed)
            return failed;
    }
    return failed;
}

/* Of the last forward. */
static struct tensor *last_logits(const struct model *model)
{
    return model->parts.brief ? model->parts.brief_logits : model->parts.logits;
}

const float *model_logits(struct model *model)
{
    return model->backend->ops->host(model->backend, last_logits(model));
}

int model_sample(struct model *model, const struct sample_row *rows, uint32_t n, struct sample_result *results,
                 struct kvg_error *err)
{
    return model->backend->ops->sample(model->backend, last_logits(model), rows, n, results, err);
}
