/* The prompt of a request: body -> JSON -> model -> ids -> chain, and what the gateway adds to the body.
 *
 * Plain memory and libprompt only: no pool, no log, no request, so that it may run in a thread of nginx's pool while the request
 * is blocked.
 */
#include "ngx_http_kvgate.h"


/* Depth and number of values that a body may have; libprompt's defaults otherwise. */
static const struct kvg_json_limits  ngx_http_kvgate_json_limits;


static void
ngx_http_kvgate_refuse(ngx_http_kvgate_prompt_t *p, ngx_uint_t status, const char *code, const char *param)
{
    p->reason = NGX_HTTP_KVGATE_REFUSED;
    p->http_status = status;
    p->error_code = code;

    if (param) {
        ngx_cpystrn((u_char *) p->error.param, (u_char *) param, sizeof(p->error.param));
    }
}


/* The body as one run of bytes: the client's own buffer where there is just one. */
static const char *
ngx_http_kvgate_body_text(ngx_http_kvgate_prompt_t *p)
{
    char        *text, *last;
    size_t       done;
    ssize_t      n;
    ngx_uint_t   i;

    if (p->n_slices == 1) {
        return (const char *) p->slices[0]->pos;
    }

    text = kvg_arena_alloc(&p->work, p->size + 1);
    if (text == NULL) {
        kvg_fail(&p->error, KVG_NOMEM, "no memory for a body of %zu bytes", p->size);
        return NULL;
    }

    if (p->n_slices) {
        last = text;

        for (i = 0; i < p->n_slices; i++) {
            last = (char *) ngx_cpymem(last, p->slices[i]->pos, p->slices[i]->last - p->slices[i]->pos);
        }

        return text;
    }

    for (done = 0; done < p->size; done += n) {
        n = pread(p->fd, text + done, p->size - done, p->file_pos + done);

        if (n < 0 && ngx_errno == NGX_EINTR) {
            n = 0;
            continue;
        }

        if (n <= 0) {
            kvg_fail(&p->error, KVG_FILE, "the buffered body ends after %zu of %zu bytes", done, p->size);
            return NULL;
        }
    }

    return text;
}


ngx_http_kvgate_model_t *
ngx_http_kvgate_find_model(const ngx_http_kvgate_main_conf_t *conf, struct kvg_str name, ngx_uint_t *aliased)
{
    ngx_str_t                *alias;
    ngx_uint_t                i, k;
    ngx_http_kvgate_model_t  *model;

    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        *aliased = 0;

        if (kvg_str_eq(name, model[i].name)) {
            return &model[i];
        }

        *aliased = 1;
        alias = model[i].aliases.elts;

        for (k = 0; k < model[i].aliases.nelts; k++) {
            if (alias[k].len == name.len && ngx_memcmp(alias[k].data, name.bytes, name.len) == 0) {
                return &model[i];
            }
        }
    }

    return NULL;
}


/* What a gateway must not let through, and which model is meant. */
static ngx_int_t
ngx_http_kvgate_check_body(ngx_http_kvgate_prompt_t *p, const struct kvg_json *body, ngx_uint_t *aliased)
{
    const struct kvg_json  *name;

    if (body->type != KVG_JSON_OBJECT) {
        kvg_fail(&p->error, KVG_INVALID, "the request body must be a JSON object");
        ngx_http_kvgate_refuse(p, NGX_HTTP_BAD_REQUEST, NULL, NULL);
        return NGX_ERROR;
    }

    if (kvg_json_get(body, "prompt_token_ids")) {
        kvg_fail(&p->error, KVG_INVALID, "prompt_token_ids is not accepted from clients");
        ngx_http_kvgate_refuse(p, NGX_HTTP_BAD_REQUEST, NULL, "prompt_token_ids");
        return NGX_ERROR;
    }

    name = kvg_json_get(body, "model");

    if (name == NULL || name->type != KVG_JSON_STRING) {
        kvg_fail(&p->error, KVG_INVALID, name ? "model must be a string" : "you must provide a model parameter");
        ngx_http_kvgate_refuse(p, NGX_HTTP_BAD_REQUEST, NULL, "model");
        return NGX_ERROR;
    }

    p->model = ngx_http_kvgate_find_model(p->conf, name->str, aliased);

    if (p->model == NULL) {
        kvg_fail(&p->error, KVG_INVALID, "the model `%.*s` does not exist", (int) ngx_min(name->str.len, 128), name->str.bytes);
        ngx_http_kvgate_refuse(p, NGX_HTTP_NOT_FOUND, "model_not_found", "model");
        return NGX_ERROR;
    }

    return NGX_OK;
}


static int
ngx_http_kvgate_chain(ngx_http_kvgate_prompt_t *p, const struct kvg_json *body, const struct kvg_ids *ids)
{
    struct kvg_str             refinement;
    struct kvg_str             salt;
    struct kvg_hash            seed;
    const struct kvg_json     *value;
    struct kvg_chain_identity  identity;

    refinement.bytes = NULL;
    refinement.len = 0;
    value = kvg_json_get(body, "cache_salt");

    if (value && value->type == KVG_JSON_STRING) {
        refinement = value->str;
    }

    if (kvg_salt_join(p->salt, refinement, &p->work, &salt) != KVG_OK) {
        return KVG_NOMEM;
    }

    p->chain = kvg_arena_alloc(&p->keep, (ids->n / p->model->block_size + 1) * sizeof(struct kvg_hash));
    if (p->chain == NULL) {
        return KVG_NOMEM;
    }

    identity.model = p->model->name;
    identity.fingerprint = *kvg_prompt_model_fingerprint(p->model->prompt);
    identity.block_size = p->model->block_size;
    identity.salt = salt.bytes;
    identity.salt_len = salt.len;

    kvg_chain_seed(&identity, &seed);
    p->n_blocks = kvg_chain_extend(&seed, ids->ids, ids->n, p->model->block_size, p->chain);

    return KVG_OK;
}


/* Each number below 10000 as text with a comma behind it, and with zeros before it; filled once. A prompt may have 100,000 ids, and
 * nearly all are one or two of these. */
static struct {
    struct {
        u_char               text[7];
        u_char               len;      /* of its digits */
    }                        plain[10000];
    u_char                   padded[10000][4];
} ngx_http_kvgate_numbers;


void
ngx_http_kvgate_prompt_init(void)
{
    u_char      *last;
    ngx_uint_t   i;

    for (i = 0; i < 10000; i++) {
        last = ngx_sprintf(ngx_http_kvgate_numbers.plain[i].text, "%ui,", i);
        ngx_http_kvgate_numbers.plain[i].len = last - 1 - ngx_http_kvgate_numbers.plain[i].text;
        (void) ngx_sprintf(ngx_http_kvgate_numbers.padded[i], "%04ui", i);
    }
}


/* out has 11 bytes for each id, so that a store of eight stays inside. */
static u_char *
ngx_http_kvgate_write_ids(u_char *out, const struct kvg_ids *ids)
{
    size_t    i;
    uint32_t  id;

    for (i = 0; i < ids->n; i++) {
        id = ids->ids[i];

        if (id < 10000) {
            ngx_memcpy(out, &ngx_http_kvgate_numbers.plain[id], 8);
            out += ngx_http_kvgate_numbers.plain[id].len + 1;

        } else if (id < 100000000) {
            ngx_memcpy(out, &ngx_http_kvgate_numbers.plain[id / 10000], 8);
            out += ngx_http_kvgate_numbers.plain[id / 10000].len;
            ngx_memcpy(out, ngx_http_kvgate_numbers.padded[id % 10000], 4);
            out[4] = ',';
            out += 5;

        } else {
            out = ngx_sprintf(out, "%uD,", id);
        }
    }

    return out - 1;  /* without the last comma */
}


/* The members that take the place of the body's final brace. Of two members with one name the last counts, at the worker as here:
 * that is how an alias becomes the model's name and how a client's priority is overridden. */
static int
ngx_http_kvgate_tail(ngx_http_kvgate_prompt_t *p, const struct kvg_json *body, const struct kvg_ids *ids, ngx_uint_t aliased)
{
    u_char      *last;
    size_t       size;
    ngx_uint_t   override;

    override = !p->priority && kvg_json_get(body, "priority") != NULL;

    if (!p->append || (ids == NULL && !aliased && !override)) {
        return KVG_OK;
    }

    size = sizeof(",\"prompt_token_ids\":[],\"model\":\"\",\"priority\":0}") + KVG_NAME_MAX + (ids ? ids->n * 11 : 0);
    last = kvg_arena_alloc(&p->keep, size);
    if (last == NULL) {
        return KVG_NOMEM;
    }

    p->tail.bytes = (char *) last;

    if (ids) {
        last = ngx_cpymem(last, ",\"prompt_token_ids\":[", sizeof(",\"prompt_token_ids\":[") - 1);
        last = ngx_http_kvgate_write_ids(last, ids);
        *last++ = ']';
    }

    if (aliased) {
        last = ngx_sprintf(last, ",\"model\":\"%s\"", p->model->name);
    }

    if (override) {
        last = ngx_cpymem(last, ",\"priority\":0", sizeof(",\"priority\":0") - 1);
    }

    *last++ = '}';
    p->tail.len = last - (u_char *) p->tail.bytes;
    p->cut = body->end - 1;

    return KVG_OK;
}


/* The tokens of the second and later prompts. */
static void
ngx_http_kvgate_count_others(ngx_http_kvgate_prompt_t *p, const struct kvg_json *body)
{
    size_t            i;
    struct kvg_ids    ids;
    struct kvg_error  err;

    for (i = 1; i < p->n_prompts; i++) {
        if (kvg_prompt_ids(p->model->prompt, p->endpoint, body, i, p->now, &p->work, &ids, &err) == KVG_OK) {
            p->all_tokens += ids.n;
        }
    }
}


static void
ngx_http_kvgate_prompt_parsed(ngx_http_kvgate_prompt_t *p, const struct kvg_json *body)
{
    ngx_uint_t      aliased;
    struct kvg_ids  ids;

    if (ngx_http_kvgate_check_body(p, body, &aliased) != NGX_OK) {
        return;
    }

    if (kvg_prompt_count(p->endpoint, body, &p->n_prompts, &p->error) != KVG_OK
        || kvg_prompt_ids(p->model->prompt, p->endpoint, body, 0, p->now, &p->work, &ids, &p->error) != KVG_OK
        || ids.n == 0
        || ngx_http_kvgate_chain(p, body, &ids) != KVG_OK)
    {
        p->reason = NGX_HTTP_KVGATE_UNPARSED;
        (void) ngx_http_kvgate_tail(p, body, NULL, aliased);
        return;
    }

    p->n_ids = ids.n;
    p->all_tokens = ids.n;

    if (p->count) {
        ngx_http_kvgate_count_others(p, body);
    }

    /* Several prompts are routed by the first; the worker tokenizes them. */
    if (ngx_http_kvgate_tail(p, body, p->n_prompts == 1 ? &ids : NULL, aliased) != KVG_OK) {
        p->tail.len = 0;
    }
}


void
ngx_http_kvgate_prompt_run(ngx_http_kvgate_prompt_t *p)
{
    int               rc;
    uint64_t          start;
    const char       *text;
    struct kvg_json  *body;

    start = ngx_http_kvgate_microseconds();
    text = ngx_http_kvgate_body_text(p);

    if (text == NULL) {
        p->reason = NGX_HTTP_KVGATE_UNPARSED;

    } else if ((rc = kvg_json_parse(&p->work, text, p->size, &ngx_http_kvgate_json_limits, &body, &p->error)) == KVG_OK) {
        ngx_http_kvgate_prompt_parsed(p, body);

    } else if (rc == KVG_NOMEM) {
        p->reason = NGX_HTTP_KVGATE_UNPARSED;

    } else {
        ngx_http_kvgate_refuse(p, NGX_HTTP_BAD_REQUEST, NULL, NULL);
    }

    p->microseconds = (ngx_uint_t) (ngx_http_kvgate_microseconds() - start);
}
