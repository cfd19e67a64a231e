/* A decoder as Llama defined it (RMS norms, rotary embeddings, grouped-query attention, a gated feed-forward), with the traits by
 * which other families differ (family.h).
 *
 *   x = embed(ids) [* sqrt(hidden)]
 *   each layer:  x += [norm] Wo attention(rope([norm] Wq n), rope([norm] Wk n), Wv n),  n = rmsnorm(x)
 *                x += [norm] Wdown (silu or gelu(Wgate n) * Wup n),                     n = rmsnorm(x)
 *   logits = Wout rmsnorm(x)                                                            output rows only
 *
 * The last layer runs its second half on the output rows alone: nobody reads the others.
 *
 * A rank of a tensor-parallel group has its share of q, k, v, gate, up and output by rows, of Wo and Wdown by columns. Rank 0
 * adds its product to x, the others replace x by theirs; the sum over the ranks is the new x of all.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "gpu-worker/model/family.h"

struct llama_layer {
    struct tensor *attn_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *attn_output, *output_bias;
    struct tensor *ffn_norm, *gate, *up, *down;
    struct tensor *q_norm, *k_norm, *attn_post_norm, *ffn_post_norm; /* NULL where the family has none */
};

struct llama {
    enum rope_style style;
    struct tensor *embedding, *frequencies, *output_norm, *output;
    struct tensor *window_frequencies, *window_angles; /* of layers with a window; NULL: they have those of the others */
    struct tensor *brief_output;                       /* the first rows of output; NULL where all are always scored */
    struct tensor *part_logits;                        /* a rank's own columns of the logits; NULL where it has them all */
    struct llama_layer *layers;
    /* activations of all rows */
    struct tensor *x, *normed, *query, *key, *value, *attended, *angles;
    struct tensor *added; /* [rows, hidden]: what a half layer adds, before its norm; families with post-norms */
    /* of n rows, all or outputs */
    struct tensor *gate_out, *up_out;
    /* of output rows */
    struct tensor *x_out, *attended_out, *normed_out;
};

/* A tensor of a layer, and what of it the rank takes: all, or `count` rows or columns from `first` on. */
struct layer_tensor {
    struct tensor **out; /* NULL: not wanted */
    const char *name;
    uint32_t rows, cols;
    enum loader_need need;
    enum { CUT_NONE, CUT_ROWS, CUT_COLS } cut;
    uint32_t first, count;
};

static int load_layer_tensor(struct loader *loader, uint32_t layer, const struct layer_tensor *t, struct kvg_error *err)
{
    struct loader_part part = {0, t->rows, 0, t->cols};
    char full[64];
    snprintf(full, sizeof full, "blk.%u.%s", layer, t->name);
    if (t->cut == CUT_ROWS)
        part = (struct loader_part){t->first, t->count, 0, t->cols};
    else if (t->cut == CUT_COLS)
        part = (struct loader_part){0, t->rows, t->first, t->count};
    return loader_tensor_part(loader, t->out, full, t->rows, t->cols, &part, t->rows == 1 ? WEIGHT_VECTOR : WEIGHT_MATMUL,
                              t->need, err);
}

static int load_layer(struct family_model *model, struct loader *loader, uint32_t i, enum loader_need bias, struct kvg_error *err)
{
    struct llama_layer *l = &((struct llama *)model->state)->layers[i];
    const struct shape *s = &model->shape;
    const struct share *p = &model->share;
    uint32_t traits = loader->family->traits, q_rows = s->n_heads * s->head_dim, kv_rows = s->n_kv_heads * s->head_dim;
    uint32_t first_q = p->first_head * s->head_dim, n_q = p->n_heads * s->head_dim;
    uint32_t first_kv = p->first_kv_head * s->head_dim, n_kv = p->n_kv_heads * s->head_dim;
    const struct layer_tensor wanted[] = {
        {&l->attn_norm, "attn_norm.weight", 1, s->hidden, LOADER_REQUIRED},
        {&l->q, "attn_q.weight", q_rows, s->hidden, LOADER_REQUIRED, CUT_ROWS, first_q, n_q},
        {&l->k, "attn_k.weight", kv_rows, s->hidden, LOADER_REQUIRED, CUT_ROWS, first_kv, n_kv},
        {&l->v, "attn_v.weight", kv_rows, s->hidden, LOADER_REQUIRED, CUT_ROWS, first_kv, n_kv},
        {&l->q_bias, "attn_q.bias", 1, q_rows, bias, CUT_COLS, first_q, n_q},
        {&l->k_bias, "attn_k.bias", 1, kv_rows, bias, CUT_COLS, first_kv, n_kv},
        {&l->v_bias, "attn_v.bias", 1, kv_rows, bias, CUT_COLS, first_kv, n_kv},
        {&l->attn_output, "attn_output.weight", s->hidden, q_rows, LOADER_REQUIRED, CUT_COLS, first_q, n_q},
        {&l->output_bias, "attn_output.bias", 1, s->hidden, LOADER_OPTIONAL},
        {&l->ffn_norm, "ffn_norm.weight", 1, s->hidden, LOADER_REQUIRED},
        {&l->gate, "ffn_gate.weight", s->ffn, s->hidden, LOADER_REQUIRED, CUT_ROWS, p->first_ffn, p->ffn},
        {&l->up, "ffn_up.weight", s->ffn, s->hidden, LOADER_REQUIRED, CUT_ROWS, p->first_ffn, p->ffn},
        {&l->down, "ffn_down.weight", s->hidden, s->ffn, LOADER_REQUIRED, CUT_COLS, p->first_ffn, p->ffn},
        {traits & FAMILY_QK_NORM ? &l->q_norm : NULL, "attn_q_norm.weight", 1, s->head_dim, LOADER_REQUIRED},
        {traits & FAMILY_QK_NORM ? &l->k_norm : NULL, "attn_k_norm.weight", 1, s->head_dim, LOADER_REQUIRED},
        {traits & FAMILY_POST_NORMS ? &l->attn_post_norm : NULL, "post_attention_norm.weight", 1, s->hidden, LOADER_REQUIRED},
        {traits & FAMILY_POST_NORMS ? &l->ffn_post_norm : NULL, "post_ffw_norm.weight", 1, s->hidden, LOADER_REQUIRED},
    };
    for (size_t w = 0; w < sizeof wanted / sizeof *wanted; w++) {
        int failed = wanted[w].out ? load_layer_tensor(loader, i, &wanted[w], err) : 0;
        if (failed)
            return failed;
    }
    return 0;
}

static int allocate(struct family_model *model, struct loader *loader, uint32_t max_rows, uint32_t max_outputs,
                    struct kvg_error *err)
{
    struct llama *llama = model->state;
    const struct shape *s = &model->shape;
    const struct share *p = &model->share;
    uint32_t q_cols = p->n_heads * s->head_dim, kv_cols = p->n_kv_heads * s->head_dim;
    uint32_t most = max_rows > max_outputs ? max_rows : max_outputs;
    const struct {
        struct tensor **out;
        uint32_t rows, cols;
    } wanted[] = {
        {&llama->x, max_rows, s->hidden},
        {&llama->normed, max_rows, s->hidden},
        {&llama->query, max_rows, q_cols},
        {&llama->key, max_rows, kv_cols},
        {&llama->value, max_rows, kv_cols},
        {&llama->attended, max_rows, q_cols},
        {&llama->angles, max_rows, s->rotated},
        {&llama->gate_out, most, p->ffn},
        {&llama->up_out, most, p->ffn},
        {&llama->x_out, max_outputs, s->hidden},
        {&llama->attended_out, max_outputs, q_cols},
        {&llama->normed_out, max_outputs, s->hidden},
        {p->rank == 0 ? &model->logits : NULL, max_outputs, model->n_vocab},
        {p->size > 1 ? &llama->part_logits : NULL, max_outputs, p->n_ids},
        {model->family->traits & FAMILY_POST_NORMS ? &llama->added : NULL, most, s->hidden},
        {llama->window_frequencies ? &llama->window_angles : NULL, max_rows, s->rotated},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (!wanted[i].out)
            continue;
        int failed = loader->backend->ops->activation(loader->backend, wanted[i].out, wanted[i].rows, wanted[i].cols, err);
        if (failed)
            return failed;
    }
    if (model->scored)
        return loader->backend->ops->activation(loader->backend, &model->brief_logits, max_outputs, model->scored, err);
    return 0;
}

/* There may be more rows than tokens (padding), but each token needs its row. */
static int check_vocabulary(const struct loader *loader, uint32_t rows, struct kvg_error *err)
{
    const struct kvg_gguf_value *tokens = kvg_gguf_find(loader->gguf, "tokenizer.ggml.tokens");
    if (!tokens || tokens->n <= rows)
        return 0;
    return kvg_fail(err, KVG_FILE, "tensor token_embd.weight has %u rows, but the vocabulary has %llu tokens", rows,
                    (unsigned long long)tokens->n);
}

/* The output matrix is its own tensor, or, where the file has none, the embedding (tied). */
static int load_ends(struct family_model *model, struct loader *loader, struct kvg_error *err)
{
    struct llama *llama = model->state;
    uint32_t hidden = model->shape.hidden, rows = loader_rows(loader, "token_embd.weight");
    const char *output = loader_has_output(loader) ? "output.weight" : "token_embd.weight";
    int failed;
    model->n_vocab = rows;
    if ((failed = loader_tensor(loader, &llama->embedding, "token_embd.weight", rows, hidden, WEIGHT_EMBEDDING, LOADER_REQUIRED,
                                err)) ||
        (failed = check_vocabulary(loader, rows, err)) ||
        (failed =
             loader_tensor(loader, &llama->output_norm, "output_norm.weight", 1, hidden, WEIGHT_VECTOR, LOADER_REQUIRED, err)) ||
        (failed = loader_frequencies(loader, &model->shape, &llama->frequencies, err)) ||
        (model->shape.window_base != 0 &&
         (failed = loader_window_frequencies(loader, &model->shape, &llama->window_frequencies, err))))
        return failed;
    model->scored = model->scored < rows && model->share.size == 1 ? model->scored : 0;
    struct loader_part part = {model->share.first_id, model->share.n_ids, 0, hidden};
    if ((failed = loader_tensor_part(loader, &llama->output, output, rows, hidden, &part, WEIGHT_MATMUL, LOADER_REQUIRED, err)) ||
        model->scored == 0)
        return failed;
    return loader_first_rows(loader, &llama->brief_output, output, model->scored, hidden, err);
}

/* What this family needs of the backend beyond the common operations. */
static int check_backend(const struct family_model *model, const struct backend *backend, struct kvg_error *err)
{
    const struct backend_ops *ops = backend->ops;
    uint32_t traits = model->family->traits;
    bool lacks_group = model->share.size > 1 && (!ops->all_reduce || !ops->gather_columns);
    bool lacks = ((traits & FAMILY_QK_NORM) && !ops->head_rmsnorm) || ((traits & FAMILY_POST_NORMS) && !ops->add) ||
                 ((traits & FAMILY_EMBED_SCALE) && !ops->scale) || ((traits & FAMILY_GELU) && !ops->gelu_mul);
    if (lacks_group)
        return kvg_fail(err, KVG_UNSUPPORTED,
                        "this device cannot be one of a group: use --device cpu, or no --tensor-parallel-size");
    return lacks ? kvg_fail(err, KVG_UNSUPPORTED, "this device lacks an operation of %s models: use --device cpu",
                            model->family->name)
                 : 0;
}

static int divide(struct family_model *model, const struct loader *loader, struct kvg_error *err)
{
    uint32_t ranks = loader->ranks ? loader->ranks : 1, block = 1;
    char name[64];
    for (uint32_t i = 0; i < model->shape.n_layers; i++) {
        snprintf(name, sizeof name, "blk.%u.ffn_down.weight", i);
        uint32_t own = loader_block(loader, name);
        block = own > block ? own : block;
    }
    return share_of(&model->share, &model->shape, block, loader_rows(loader, "token_embd.weight"), loader->rank, ranks, err);
}

int decoder_load(struct family_model *model, struct loader *loader, uint32_t max_rows, uint32_t max_outputs,
                 struct kvg_error *err)
{
    uint32_t traits = model->family->traits;
    int failed = loader_shape(loader, &model->shape, err);
    if (failed || (failed = divide(model, loader, err)) || (failed = check_backend(model, loader->backend, err)))
        return failed;
    struct llama *llama = model->state = calloc(1, sizeof *llama);
    if (llama)
        llama->layers = calloc(model->shape.n_layers, sizeof *llama->layers);
    if (!llama || !llama->layers)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u layers", model->shape.n_layers);
    llama->style = traits & FAMILY_INTERLEAVED && !loader->folder ? ROPE_INTERLEAVED : ROPE_HALVES;
    if ((failed = load_ends(model, loader, err)))
        return failed;
    for (uint32_t i = 0; i < model->shape.n_layers; i++)
        if ((failed = load_layer(model, loader, i, traits & FAMILY_QKV_BIAS ? LOADER_REQUIRED : LOADER_OPTIONAL, err)))
            return failed;
    return allocate(model, loader, max_rows, max_outputs, err);
}

void decoder_free(struct family_model *model)
{
    struct llama *llama = model->state;
    if (!llama)
        return;
    free(llama->layers);
    free(llama);
    model->state = NULL;
}

static void product(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight,
                    const struct tensor *bias, struct tensor *out, bool accumulate)
{
    struct backend_matmul args = {.count = 1, .weights = {weight}, .biases = {bias}, .outs = {out}, .accumulate = accumulate};
    backend->ops->matmul(backend, n, x, &args);
}

static void normed_products(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                            const struct backend_matmul *args)
{
    const struct backend_ops *ops = backend->ops;
    if (ops->normed_matmul) {
        ops->normed_matmul(backend, n, x, norm, args);
        return;
    }
    ops->rmsnorm(backend, n, x, norm->weight, norm->eps, norm->scratch);
    ops->matmul(backend, n, norm->scratch, args);
}

/* gate_out = silu(gate n) * up n, or with gelu. */
static void normed_gate(const struct family_model *model, struct backend *backend, uint32_t n, const struct tensor *x,
                        const struct backend_norm *norm, const struct llama_layer *l)
{
    const struct backend_ops *ops = backend->ops;
    const struct llama *llama = model->state;
    bool gelu = model->family->traits & FAMILY_GELU;
    struct backend_gated gated = {l->gate, l->up, llama->gate_out};
    struct backend_matmul both = {.count = 2, .weights = {l->gate, l->up}, .outs = {llama->gate_out, llama->up_out}};
    if (ops->normed_gated && !gelu) {
        ops->normed_gated(backend, n, x, norm, &gated);
        return;
    }
    ops->rmsnorm(backend, n, x, norm->weight, norm->eps, norm->scratch);
    ops->matmul(backend, n, norm->scratch, &both);
    if (gelu)
        ops->gelu_mul(backend, n, llama->gate_out, llama->up_out);
    else
        ops->silu_mul(backend, n, llama->gate_out, llama->up_out);
}

/* x += norm(W y), or without a norm x += W y. */
static void add_half(const struct family_model *model, struct backend *backend, uint32_t n, const struct tensor *y,
                     const struct tensor *weight, const struct tensor *bias, const struct tensor *norm, struct tensor *x,
                     struct tensor *normed)
{
    const struct llama *llama = model->state;
    bool first = model->share.rank == 0;
    struct tensor *out = norm ? llama->added : x;
    product(backend, n, y, weight, first ? bias : NULL, out, !norm && first);
    if (model->share.size > 1)
        backend->ops->all_reduce(backend, n, out);
    if (!norm)
        return;
    backend->ops->rmsnorm(backend, n, llama->added, norm, model->shape.eps, normed);
    backend->ops->add(backend, n, x, normed);
}

/* KV of all rows, and attention where `attend`. */
static void attention_half(const struct family_model *model, struct backend *backend, uint32_t n, uint32_t layer, bool attend)
{
    const struct llama *llama = model->state;
    const struct llama_layer *l = &llama->layers[layer];
    const struct backend_ops *ops = backend->ops;
    bool windowed = llama->window_angles && model->shape.windows[layer];
    struct backend_matmul qkv = {.count = 3,
                                 .weights = {l->q, l->k, l->v},
                                 .biases = {l->q_bias, l->k_bias, l->v_bias},
                                 .outs = {llama->query, llama->key, llama->value}};
    struct backend_rope rope = {
        layer, llama->query, llama->key, llama->value, windowed ? llama->window_angles : llama->angles, llama->style};
    struct backend_attention attention = {layer, model->shape.attention_scale, llama->query, llama->attended};
    struct backend_norm norm = {l->attn_norm, model->shape.eps, llama->normed};
    normed_products(backend, n, llama->x, &norm, &qkv);
    if (l->q_norm) {
        ops->head_rmsnorm(backend, n, llama->query, l->q_norm, model->shape.eps);
        ops->head_rmsnorm(backend, n, llama->key, l->k_norm, model->shape.eps);
    }
    ops->rope_store(backend, &rope);
    if (attend)
        ops->attention(backend, &attention);
}

static void ffn_half(const struct family_model *model, struct backend *backend, uint32_t n, uint32_t layer, struct tensor *x,
                     struct tensor *normed)
{
    const struct llama *llama = model->state;
    const struct llama_layer *l = &llama->layers[layer];
    struct backend_norm norm = {l->ffn_norm, model->shape.eps, normed};
    normed_gate(model, backend, n, x, &norm, l);
    add_half(model, backend, n, llama->gate_out, l->down, NULL, l->ffn_post_norm, x, normed);
}

static void begin(const struct family_model *model, struct backend *backend, uint32_t n_rows)
{
    const struct llama *llama = model->state;
    backend->ops->embed(backend, llama->embedding, llama->x);
    if (model->family->traits & FAMILY_EMBED_SCALE)
        backend->ops->scale(backend, n_rows, llama->x, sqrtf((float)model->shape.hidden));
    backend->ops->angles(backend, llama->frequencies, llama->angles);
    if (llama->window_angles)
        backend->ops->angles(backend, llama->window_frequencies, llama->window_angles);
}

void decoder_forward(const struct family_model *model, struct backend *backend, uint32_t n_rows, uint32_t n_outputs)
{
    const struct llama *llama = model->state;
    uint32_t last = model->shape.n_layers - 1;
    const struct llama_layer *l = llama->layers, *end = &llama->layers[last];

    begin(model, backend, n_rows);
    for (uint32_t i = 0; i < last; i++, l++) {
        attention_half(model, backend, n_rows, i, true);
        add_half(model, backend, n_rows, llama->attended, l->attn_output, l->output_bias, l->attn_post_norm, llama->x,
                 llama->normed);
        ffn_half(model, backend, n_rows, i, llama->x, llama->normed);
    }
    attention_half(model, backend, n_rows, last, n_outputs > 0);
    if (n_outputs == 0)
        return;
    backend->ops->gather(backend, llama->x, llama->x_out);
    backend->ops->gather(backend, llama->attended, llama->attended_out);
    add_half(model, backend, n_outputs, llama->attended_out, end->attn_output, end->output_bias, end->attn_post_norm,
             llama->x_out, llama->normed_out);
    ffn_half(model, backend, n_outputs, last, llama->x_out, llama->normed_out);
    backend->ops->rmsnorm(backend, n_outputs, llama->x_out, llama->output_norm, model->shape.eps, llama->normed_out);
    if (model->brief) {
        product(backend, n_outputs, llama->normed_out, llama->brief_output, NULL, model->brief_logits, false);
        return;
    }
    struct tensor *logits = llama->part_logits ? llama->part_logits : model->logits;
    product(backend, n_outputs, llama->normed_out, llama->output, NULL, logits, false);
    if (llama->part_logits)
        backend->ops->gather_columns(backend, n_outputs, llama->part_logits, model->logits, model->n_vocab);
}
