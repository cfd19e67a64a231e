/* From recorded ops to kernels. An op whose result the next op multiplies also writes the rounded form that the product reads, so
 * that no kernel of its own has to; this file keeps track of whose form the scratch holds.
 *
 * For few rows, neighbouring ops become one kernel where nobody else reads what lies between them. A layer of a decode step is
 * then six kernels:
 *
 *   matmul q, k, v
 *   rope_store + attention      rotates q and k, appends k and v
 *   attention's parts together
 *   matmul, + rmsnorm           x += W attended; x * norm, whose scale the next product applies
 *   matmul gate, up + silu_mul
 *   matmul, + rmsnorm           x += W gate; the next layer's norm
 */
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"

static struct acts groups_scratch(const struct cuda_backend *cuda, uint32_t at, uint32_t cols)
{
    struct acts acts = cuda->acts[at];
    acts.n_groups = cols / QUANT_GROUP;
    return acts;
}

/* Scratch for `form` of x [., cols]; groups go where no kernel reads now. */
static struct act_forms scratch_form(struct cuda_backend *cuda, enum act_form form, uint32_t cols)
{
    struct act_forms out = {.form = form, .acts = groups_scratch(cuda, cuda->acts_at ^ 1, cols), .halves = cuda->halves};
    out.ld = (cols + FLOAT_ALIGN - 1) / FLOAT_ALIGN * FLOAT_ALIGN;
    return out;
}

/* A kernel that has been queued writes this form of x. */
static void holds(struct cuda_backend *cuda, const struct tensor *x, enum act_form form, const struct column_order *order)
{
    if (form_is_integer(form)) {
        cuda->groups_of = x;
        cuda->groups_form = form;
        cuda->groups_order = order;
        cuda->acts_at ^= 1;
    } else if (form != FORM_NONE) {
        cuda->halves_of = x;
        cuda->halves_form = form;
    }
}

static bool is_held(const struct cuda_backend *cuda, const struct tensor *x, enum act_form form, const struct column_order *order)
{
    return form_is_integer(form) ? cuda->groups_of == x && cuda->groups_form == form && cuda->groups_order == order
                                 : cuda->halves_of == x && cuda->halves_form == form;
}

static void is_written(struct cuda_backend *cuda, const struct tensor *out)
{
    if (cuda->groups_of == out)
        cuda->groups_of = NULL;
    if (cuda->halves_of == out)
        cuda->halves_of = NULL;
    if (cuda->scaled_of == out)
        cuda->scaled_of = NULL;
}

/* ---- what the ops after an op do with its result ---- */

/* The i-th op from `op` on, NULL past the last. */
static const struct op *ahead(const struct cuda_backend *cuda, const struct op *op, uint32_t i)
{
    return op + i < cuda->ops + cuda->n_ops ? op + i : NULL;
}

static bool is_among(const struct backend_matmul *args, const struct tensor *tensor)
{
    for (uint32_t i = 0; i < args->count; i++)
        if (args->outs[i] == tensor)
            return true;
    return false;
}

static bool reads(const struct op *op, const struct tensor *tensor)
{
    switch (op->kind) {
    case OP_MATMUL:
        return op->x == tensor || (op->matmul.accumulate && is_among(&op->matmul, tensor));
    case OP_ROPE_STORE:
        return op->rope.q == tensor || op->rope.k == tensor || op->rope.v == tensor || op->rope.angles == tensor;
    case OP_ATTENTION:
        return op->attention.q == tensor;
    case OP_SILU_MUL:
    case OP_GELU_MUL:
    case OP_ADD:
        return op->x == tensor || op->out == tensor;
    default:
        return op->x == tensor;
    }
}

/* Whether an op from `op` on reads the tensor before another writes it. */
static bool is_read_from(const struct cuda_backend *cuda, const struct op *op, const struct tensor *tensor)
{
    for (; op && op < cuda->ops + cuda->n_ops; op++) {
        if (reads(op, tensor))
            return true;
        if (op->kind == OP_MATMUL ? is_among(&op->matmul, tensor) : op->out == tensor)
            return false;
    }
    return false;
}

/* Whether the op is a product of x for few rows with one form of input, which goes to *form. Grouped matrices take no part: a
 * block of their kernels has no whole row, whose scale the next product's input needs; nor do matrices whose input is gathered.
 */
static bool takes_few_rows(const struct cuda_backend *cuda, const struct op *op, const struct tensor *x, uint32_t n,
                           enum act_form *form)
{
    if (!op || op->kind != OP_MATMUL || op->x != x || op->n != n)
        return false;
    *form = matmul_form(cuda, &op->matmul.weights[0]->matrix, n);
    for (uint32_t i = 0; i < op->matmul.count; i++) {
        const struct matrix *w = &op->matmul.weights[i]->matrix;
        if (!takes_gemv(cuda, w, n) || matrix_is_grouped(w) || op->matmul.weights[i]->order || matmul_form(cuda, w, n) != *form)
            return false;
    }
    return n <= GEMV_ROWS_MAX && !cuda->options.deterministic;
}

static bool is_whole_groups(const struct tensor *weight)
{
    return weight->rows % QUANT_GROUP == 0;
}

/* x += product, rmsnorm of x, product: the first two in one. */
static bool adds_before_norm(const struct cuda_backend *cuda, const struct op *op, enum act_form *form)
{
    const struct op *norm = ahead(cuda, op, 1), *next = ahead(cuda, op, 2);
    enum act_form own;
    return next && takes_few_rows(cuda, op, op->x, op->n, &own) && op->matmul.count == 1 && op->matmul.accumulate &&
           is_whole_groups(op->matmul.weights[0]) && norm->kind == OP_RMSNORM && norm->x == op->matmul.outs[0] &&
           norm->n == op->n && takes_few_rows(cuda, next, norm->out, op->n, form) && !is_read_from(cuda, next + 1, norm->out);
}

/* gate and up, silu_mul, product: the first two in one. */
static bool gates(const struct cuda_backend *cuda, const struct op *op, enum act_form *form)
{
    const struct backend_matmul *args = &op->matmul;
    const struct op *gate = ahead(cuda, op, 1), *next = ahead(cuda, op, 2);
    enum act_form own;
    return next && args->count == 2 && !args->accumulate && !args->biases[0] && !args->biases[1] &&
           takes_few_rows(cuda, op, op->x, op->n, &own) && args->weights[0]->matrix.kind == args->weights[1]->matrix.kind &&
           args->weights[0]->rows == args->weights[1]->rows && is_whole_groups(args->weights[0]) && gate->kind == OP_SILU_MUL &&
           gate->out == args->outs[0] && gate->x == args->outs[1] && gate->n == op->n &&
           takes_few_rows(cuda, next, gate->out, op->n, form) && !is_read_from(cuda, next + 1, gate->out) &&
           !is_read_from(cuda, next, gate->x);
}

/* rope_store and attention of sequences with one row each. */
static bool decodes_at_once(const struct cuda_backend *cuda, const struct op *op)
{
    const struct op *attention = ahead(cuda, op, 1);
    return attention && attention->kind == OP_ATTENTION && attention->attention.layer == op->rope.layer &&
           attention->attention.q == op->rope.q && cuda->n_decodes && !cuda->n_tiles &&
           !is_read_from(cuda, attention + 1, op->rope.q) && !is_read_from(cuda, attention + 1, op->rope.k);
}

/* ---- running ---- */

/* The form in which the next op wants `out`, which is written in its own order. */
static struct act_forms next_form(struct cuda_backend *cuda, const struct op *op)
{
    const struct op *next = ahead(cuda, op, 1);
    enum act_form form = FORM_NONE;
    if (next && next->kind == OP_MATMUL && next->x == op->out && next->n == op->n)
        for (uint32_t i = 0; i < next->matmul.count && form == FORM_NONE; i++)
            form = next->matmul.weights[i]->order ? FORM_NONE : matmul_form(cuda, &next->matmul.weights[i]->matrix, next->n);
    is_written(cuda, op->out);
    struct act_forms out = scratch_form(cuda, form, op->out->cols);
    holds(cuda, op->out, form, NULL);
    return out;
}

static void need_form(struct cuda_backend *cuda, const struct tensor *x, uint32_t n, enum act_form form,
                      const struct column_order *order)
{
    if (form == FORM_NONE || is_held(cuda, x, form, order))
        return;
    struct act_forms forms = scratch_form(cuda, form, x->cols);
    launch_form(cuda, n, x, order, &forms);
    holds(cuda, x, form, order);
}

static struct products products_of(const struct cuda_backend *cuda, const struct op *op)
{
    struct products products = {.n = op->n, .accumulate = op->matmul.accumulate};
    if (cuda->scaled_of == op->x)
        products.scale = cuda->scale;
    return products;
}

static void add_product(struct products *products, const struct backend_matmul *args, uint32_t i)
{
    const struct tensor *bias = args->biases[i];
    products->p[products->count++] = (struct product){args->weights[i]->matrix, bias ? bias->data : NULL, args->outs[i]->data, 0};
}

/* One launch for the products of each kind of matrix, and order of columns. */
static void run_matmul(struct cuda_backend *cuda, const struct op *op)
{
    const struct backend_matmul *args = &op->matmul;
    uint32_t done = 0;
    for (uint32_t i = 0; i < args->count; i++) {
        const struct tensor *first = args->weights[i];
        struct products products = products_of(cuda, op);
        if (done >> i & 1)
            continue;
        for (uint32_t j = i; j < args->count; j++) {
            if (args->weights[j]->matrix.kind != first->matrix.kind || args->weights[j]->order != first->order)
                continue;
            add_product(&products, args, j);
            done |= 1u << j;
        }
        need_form(cuda, op->x, op->n, matmul_form(cuda, &first->matrix, op->n), first->order);
        launch_products(cuda, &products, op->x);
    }
    for (uint32_t i = 0; i < args->count; i++)
        is_written(cuda, args->outs[i]);
}

/* The products and what follows them, in one launch; `next` is what the product after that reads, in this form. */
static void run_with_next(struct cuda_backend *cuda, const struct op *op, enum product_then then, const struct tensor *next,
                          enum act_form form)
{
    struct products products = products_of(cuda, op);
    products.then = then;
    for (uint32_t i = 0; i < op->matmul.count; i++)
        add_product(&products, &op->matmul, i);
    need_form(cuda, op->x, op->n, matmul_form(cuda, &products.p[0].w, op->n), NULL);
    products.next.rounded = form == FORM_GROUPS;
    products.next.acts = groups_scratch(cuda, cuda->acts_at ^ 1, next->cols);
    products.next.out = next->data;
    if (then == THEN_NORM) {
        products.next.norm = op[1].weight->data;
        products.next.squares = cuda->squares;
    }
    launch_products(cuda, &products, op->x);
    for (uint32_t i = 0; i < op->matmul.count; i++)
        is_written(cuda, op->matmul.outs[i]);
    is_written(cuda, next);
    holds(cuda, next, form, NULL);
    if (then == THEN_NORM) {
        cuda->scaled_of = next;
        cuda->scale = (struct row_scale){cuda->squares, next->cols / QUANT_GROUP, op[1].eps};
    }
}

/* A matmul and what goes with it; how many ops that is. */
static uint32_t run_products(struct cuda_backend *cuda, const struct op *op)
{
    enum act_form form;
    if (adds_before_norm(cuda, op, &form)) {
        run_with_next(cuda, op, THEN_NORM, op[1].out, form);
        return 2;
    }
    if (gates(cuda, op, &form)) {
        run_with_next(cuda, op, THEN_GATE, op[1].out, form);
        return 2;
    }
    run_matmul(cuda, op);
    return 1;
}

static uint32_t run_rope_store(struct cuda_backend *cuda, const struct op *op)
{
    is_written(cuda, op->rope.q);
    is_written(cuda, op->rope.k);
    if (!decodes_at_once(cuda, op)) {
        launch_rope_store(cuda, op);
        return 1;
    }
    struct act_forms forms = next_form(cuda, op + 1);
    launch_attention(cuda, op + 1, &op->rope, &forms);
    return 2;
}

/* What the group's table reports is the step's failure. */
static void run_all_reduce(struct cuda_backend *cuda, const struct op *op)
{
    cuda->comm->ops->all_reduce(cuda->comm, op->out->data, (size_t)op->n * op->out->cols, &cuda->failure);
}

static void run_gather_columns(struct cuda_backend *cuda, const struct op *op)
{
    float *out = op->out ? op->out->data : NULL;
    cuda->comm->ops->gather(cuda->comm, op->x->data, out, op->n, op->cols, &cuda->failure);
}

/* How many ops have been run: the next one may go along. */
static uint32_t run_op(struct cuda_backend *cuda, const struct op *op)
{
    struct act_forms forms;
    switch (op->kind) {
    case OP_EMBED:
        launch_embed(cuda, op);
        break;
    case OP_RMSNORM:
        forms = next_form(cuda, op);
        launch_rmsnorm(cuda, op, &forms);
        return 1;
    case OP_MATMUL:
        return run_products(cuda, op);
    case OP_ANGLES:
        launch_angles(cuda, op);
        break;
    case OP_ROPE_STORE:
        return run_rope_store(cuda, op);
    case OP_ATTENTION:
        forms = next_form(cuda, op);
        launch_attention(cuda, op, NULL, &forms);
        return 1;
    case OP_SILU_MUL:
        forms = next_form(cuda, op);
        launch_silu_mul(cuda, op, &forms);
        return 1;
    case OP_GELU_MUL:
        forms = next_form(cuda, op);
        launch_gelu_mul(cuda, op, &forms);
        return 1;
    case OP_HEAD_RMSNORM:
        launch_head_rmsnorm(cuda, op);
        break;
    case OP_SCALE:
    case OP_ADD:
        launch_add(cuda, op);
        break;
    case OP_GATHER:
        launch_gather(cuda, op);
        break;
    case OP_ALL_REDUCE:
        run_all_reduce(cuda, op);
        break;
    case OP_GATHER_COLUMNS:
        run_gather_columns(cuda, op);
        break;
    }
    is_written(cuda, op->out);
    return 1;
}

void queue_ops(struct cuda_backend *cuda)
{
    cuda->groups_of = cuda->halves_of = cuda->scaled_of = NULL;
    for (uint32_t i = 0; i < cuda->n_ops && !cuda->failure.code;)
        i += cuda->ops[i].n ? run_op(cuda, &cuda->ops[i]) : 1;
}

void cuda_run(struct cuda_backend *cuda)
{
    if (!graph_run(cuda))
        queue_ops(cuda);
}
