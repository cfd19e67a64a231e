/* From recorded ops to kernels. An op whose result the next op multiplies also writes the rounded form that the product reads, so
 * that no kernel of its own has to; run.c keeps track of whose form the scratch holds.
 */
#include "gpu-worker/backend/cuda/cuda_internal.h"

/* Scratch for `form` of x [., cols]. */
static struct act_forms scratch_form(struct cuda_backend *cuda, enum act_form form, uint32_t cols)
{
    struct act_forms out = {.form = form, .acts = cuda->acts, .halves = cuda->halves};
    out.acts.n_groups = cols / QUANT_GROUP;
    out.ld = (cols + FLOAT_ALIGN - 1) / FLOAT_ALIGN * FLOAT_ALIGN;
    return out;
}

static void holds(struct cuda_backend *cuda, const struct tensor *x, enum act_form form)
{
    if (form == FORM_GROUPS) {
        cuda->groups_of = x;
    } else if (form != FORM_NONE) {
        cuda->halves_of = x;
        cuda->halves_form = form;
    }
}

static bool is_held(const struct cuda_backend *cuda, const struct tensor *x, enum act_form form)
{
    return form == FORM_GROUPS ? cuda->groups_of == x : cuda->halves_of == x && cuda->halves_form == form;
}

static void is_written(struct cuda_backend *cuda, const struct tensor *out)
{
    if (cuda->groups_of == out)
        cuda->groups_of = NULL;
    if (cuda->halves_of == out)
        cuda->halves_of = NULL;
}

/* The form in which the next op wants `out`. */
static struct act_forms next_form(struct cuda_backend *cuda, const struct op *op)
{
    const struct op *next = op + 1;
    enum act_form form = FORM_NONE;
    if (next < cuda->ops + cuda->n_ops && next->kind == OP_MATMUL && next->x == op->out && next->n == op->n)
        for (uint32_t i = 0; i < next->matmul.count && form == FORM_NONE; i++)
            form = matmul_form(cuda, &next->matmul.weights[i]->matrix, next->n);
    is_written(cuda, op->out);
    holds(cuda, op->out, form);
    return scratch_form(cuda, form, op->out->cols);
}

static void need_form(struct cuda_backend *cuda, const struct tensor *x, uint32_t n, enum act_form form)
{
    if (form == FORM_NONE || is_held(cuda, x, form))
        return;
    struct act_forms forms = scratch_form(cuda, form, x->cols);
    launch_form(cuda, n, x, &forms);
    holds(cuda, x, form);
}

/* One launch for the products of each kind of matrix. */
static void run_matmul(struct cuda_backend *cuda, const struct op *op)
{
    const struct backend_matmul *args = &op->matmul;
    uint32_t done = 0;
    for (uint32_t i = 0; i < args->count; i++) {
        const struct matrix *first = &args->weights[i]->matrix;
        struct products products = {.n = op->n, .accumulate = args->accumulate};
        if (done >> i & 1)
            continue;
        for (uint32_t j = i; j < args->count; j++) {
            const struct tensor *bias = args->biases[j];
            if (args->weights[j]->matrix.kind != first->kind)
                continue;
            products.p[products.count++] =
                (struct product){args->weights[j]->matrix, bias ? bias->data : NULL, args->outs[j]->data, 0};
            done |= 1u << j;
        }
        need_form(cuda, op->x, op->n, matmul_form(cuda, first, op->n));
        launch_products(cuda, &products, op->x);
    }
    for (uint32_t i = 0; i < args->count; i++)
        is_written(cuda, args->outs[i]);
}

static void run_op(struct cuda_backend *cuda, const struct op *op)
{
    struct act_forms forms;
    switch (op->kind) {
    case OP_EMBED:
        launch_embed(cuda, op);
        break;
    case OP_RMSNORM:
        forms = next_form(cuda, op);
        launch_rmsnorm(cuda, op, &forms);
        return;
    case OP_MATMUL:
        run_matmul(cuda, op);
        return;
    case OP_ANGLES:
        launch_angles(cuda, op);
        break;
    case OP_ROPE_STORE:
        launch_rope_store(cuda, op);
        is_written(cuda, op->rope.q);
        is_written(cuda, op->rope.k);
        return;
    case OP_ATTENTION:
        forms = next_form(cuda, op);
        launch_attention(cuda, op, &forms);
        return;
    case OP_SILU_MUL:
        forms = next_form(cuda, op);
        launch_silu_mul(cuda, op, &forms);
        return;
    case OP_GATHER:
        launch_gather(cuda, op);
        break;
    }
    is_written(cuda, op->out);
}

void queue_ops(struct cuda_backend *cuda)
{
    cuda->groups_of = cuda->halves_of = NULL;
    for (uint32_t i = 0; i < cuda->n_ops && !cuda->failure.code; i++)
        if (cuda->ops[i].n)
            run_op(cuda, &cuda->ops[i]);
}

void cuda_run(struct cuda_backend *cuda)
{
    if (!graph_run(cuda))
        queue_ops(cuda);
}
