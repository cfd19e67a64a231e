/* The host's side of sampling: rows go to the device in waves of at most WAVE_ROWS, their lists in one piece with them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/sample_host.h"

enum { WAVE_ROWS = 64, LIST_BYTES_MIN = 1 << 20 };

/* Pinned and device memory alike:  params [WAVE_ROWS] | lists [list_bytes] */
struct sample_buffers {
    uint8_t *pinned, *device;
    size_t list_bytes;
    float *scratch; /* device: [WAVE_ROWS][n_vocab] */
    struct sample_result *results, *device_results;
    uint32_t n_vocab;
};

int cuda_open_sampling(struct cuda_backend *cuda, uint32_t n_vocab, struct kvg_error *err)
{
    struct sample_buffers *s = cuda->sampling = calloc(1, sizeof *s);
    size_t longest = (size_t)n_vocab * (sizeof(struct sample_count) + sizeof(struct sample_bias) + sizeof(uint32_t));
    int failed;
    if (!s)
        return kvg_fail(err, KVG_NOMEM, "no memory for sampling");
    s->n_vocab = n_vocab;
    s->list_bytes = longest > LIST_BYTES_MIN ? longest : LIST_BYTES_MIN;
    size_t bytes = WAVE_ROWS * sizeof(struct sample_params) + s->list_bytes, results = WAVE_ROWS * sizeof *s->results;
    if ((failed = cuda_failed(cudaMallocHost((void **)&s->pinned, bytes), err, "pinned memory for sampling")) ||
        (failed = cuda_failed(cudaMallocHost((void **)&s->results, results), err, "pinned memory for sampling")) ||
        (failed = cuda_alloc((void **)&s->device, bytes, "sampling parameters", err)) ||
        (failed = cuda_alloc((void **)&s->device_results, results, "sampling results", err)))
        return failed;
    if ((failed = cuda_failed(cudaMemset(s->device_results, 0, results), err, "clearing results"))) /* copied whole */
        return failed;
    return cuda_alloc((void **)&s->scratch, (size_t)WAVE_ROWS * n_vocab * sizeof *s->scratch, "sampling scratch", err);
}

void cuda_close_sampling(struct cuda_backend *cuda)
{
    struct sample_buffers *s = cuda->sampling;
    if (!s)
        return;
    cudaFreeHost(s->pinned);
    cudaFreeHost(s->results);
    cudaFree(s->device);
    cudaFree(s->device_results);
    cudaFree(s->scratch);
    free(s);
    cuda->sampling = NULL;
}

static size_t list_bytes(const struct sample_row *row)
{
    return row->n_counts * sizeof *row->counts + row->n_biases * sizeof *row->biases + row->n_banned * sizeof *row->banned;
}

/* How many of the rows fit one wave; 0: the first one's lists alone are too long. */
static uint32_t wave_rows(const struct sample_buffers *s, const struct sample_row *rows, uint32_t n)
{
    uint32_t i = 0;
    for (size_t bytes = 0; i < n && i < WAVE_ROWS && bytes + list_bytes(&rows[i]) <= s->list_bytes; i++)
        bytes += list_bytes(&rows[i]);
    return i;
}

static void fill_params(struct sample_params *p, const struct sample_row *row)
{
    *p = (struct sample_params){.seed = row->seed,
                                .output = row->output,
                                .choice = row->choice,
                                .position = row->position,
                                .temperature = row->temperature,
                                .top_p = row->top_p,
                                .min_p = row->min_p,
                                .log_min_p = row->min_p > 0 ? logf(row->min_p < 1 ? row->min_p : 1) : 0,
                                .repetition_penalty = row->repetition_penalty,
                                .presence_penalty = row->presence_penalty,
                                .frequency_penalty = row->frequency_penalty,
                                .top_k = row->top_k,
                                .n_vocab = row->n_vocab,
                                .top_logprobs = row->top_logprobs,
                                .want_logprob = row->want_logprob,
                                .n_counts = row->n_counts,
                                .n_biases = row->n_biases,
                                .n_banned = row->n_banned};
}

/* Appends n elements to a list that has *used; where they begin, as an index. */
static uint32_t append(uint8_t *list, uint32_t *used, const void *elements, uint32_t n, size_t size)
{
    uint32_t at = *used;
    if (n)
        memcpy(list + at * size, elements, n * size);
    *used += n;
    return at;
}

/* Fills the pinned memory with m rows; the lists' places on the device to *lists; bytes used. */
static size_t fill_wave(const struct sample_buffers *s, const struct sample_row *rows, uint32_t m, struct sample_lists *lists)
{
    struct sample_params *params = (struct sample_params *)(void *)s->pinned;
    size_t n_counts = 0, n_biases = 0, head = WAVE_ROWS * sizeof *params;
    uint32_t counts = 0, biases = 0, banned = 0;
    for (uint32_t i = 0; i < m; i++) {
        n_counts += rows[i].n_counts;
        n_biases += rows[i].n_biases;
    }
    size_t bias_at = head + n_counts * sizeof *lists->counts, banned_at = bias_at + n_biases * sizeof *lists->biases;
    for (uint32_t i = 0; i < m; i++) {
        fill_params(&params[i], &rows[i]);
        params[i].counts = append(s->pinned + head, &counts, rows[i].counts, rows[i].n_counts, sizeof *lists->counts);
        params[i].biases = append(s->pinned + bias_at, &biases, rows[i].biases, rows[i].n_biases, sizeof *lists->biases);
        params[i].banned = append(s->pinned + banned_at, &banned, rows[i].banned, rows[i].n_banned, sizeof *lists->banned);
    }
    lists->counts = (const struct sample_count *)(void *)(s->device + head);
    lists->biases = (const struct sample_bias *)(void *)(s->device + bias_at);
    lists->banned = (const uint32_t *)(void *)(s->device + banned_at);
    return banned_at + banned * sizeof *lists->banned;
}

static int sample_wave(struct cuda_backend *cuda, const struct tensor *logits, const struct sample_row *rows, uint32_t m,
                       struct sample_result *results, struct kvg_error *err)
{
    struct sample_buffers *s = cuda->sampling;
    struct sample_lists lists;
    size_t bytes = fill_wave(s, rows, m, &lists);
    int failed = cuda_failed(cudaMemcpyAsync(s->device, s->pinned, bytes, cudaMemcpyHostToDevice, cuda->stream), err,
                             "copying sampling parameters");
    if (failed)
        return failed;
    cuda->failure.code = 0;
    launch_sample(cuda, logits, (const struct sample_params *)(void *)s->device, &lists, s->scratch, s->device_results, m);
    if (cuda->failure.code)
        return kvg_fail(err, cuda->failure.code, "%s", cuda->failure.message);
    if ((failed = cuda_failed(
             cudaMemcpyAsync(s->results, s->device_results, m * sizeof *results, cudaMemcpyDeviceToHost, cuda->stream), err,
             "copying samples")) ||
        (failed = cuda_failed(cudaStreamSynchronize(cuda->stream), err, "sampling")))
        return failed;
    memcpy(results, s->results, m * sizeof *results);
    return 0;
}

int cuda_sample(struct backend *backend, const struct tensor *logits, const struct sample_row *rows, uint32_t n,
                struct sample_result *results, struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    for (uint32_t i = 0; i < n; i++)
        if (rows[i].output >= cuda->n_outputs)
            return kvg_fail(err, KVG_INVALID, "sampling output %u of %u", rows[i].output, cuda->n_outputs);
    if (logits->cols > cuda->sampling->n_vocab)
        return kvg_fail(err, KVG_INVALID, "sampling from %u logits, scratch for %u", logits->cols, cuda->sampling->n_vocab);
    for (uint32_t first = 0, m; first < n; first += m) {
        m = wave_rows(cuda->sampling, rows + first, n - first);
        if (m == 0)
            return kvg_fail(err, KVG_LIMIT, "the penalties and biases of a row take %zu bytes of %zu", list_bytes(&rows[first]),
                            cuda->sampling->list_bytes);
        int failed = sample_wave(cuda, logits, rows + first, m, results + first, err);
        if (failed)
            return failed;
    }
    return 0;
}
