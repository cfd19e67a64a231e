/* Short replies that the gateway gives itself: errors in OpenAI's shape, and the list of models. */
#include "ngx_http_kvgate.h"


static ngx_str_t  ngx_http_kvgate_json = ngx_string("application/json");


ngx_int_t
ngx_http_kvgate_send(ngx_http_request_t *r, ngx_uint_t status, ngx_str_t *type, struct kvg_buf *text)
{
    ngx_int_t                 rc;
    ngx_http_complex_value_t  value;

    ngx_memzero(&value, sizeof(value));
    value.value.len = text->len;
    value.value.data = text->failed ? NULL : ngx_pnalloc(r->pool, text->len);
    rc = NGX_HTTP_INTERNAL_SERVER_ERROR;

    if (value.value.data) {
        ngx_memcpy(value.value.data, text->bytes, text->len);
        rc = ngx_http_send_response(r, status, type, &value);
    }

    kvg_buf_free(text);

    return rc;
}


static void
ngx_http_kvgate_put(struct kvg_buf *buf, const char *text)
{
    if (text) {
        kvg_buf_json_string(buf, text, ngx_strlen(text));

    } else {
        kvg_buf_puts(buf, "null");
    }
}


ngx_int_t
ngx_http_kvgate_send_error(ngx_http_request_t *r, ngx_uint_t status, const char *type, const char *message, const char *param,
    const char *code)
{
    struct kvg_buf  buf = { NULL, 0, 0, false };

    kvg_buf_puts(&buf, "{\"error\":{\"message\":");
    ngx_http_kvgate_put(&buf, message);
    kvg_buf_puts(&buf, ",\"type\":");
    ngx_http_kvgate_put(&buf, type);
    kvg_buf_puts(&buf, ",\"param\":");
    ngx_http_kvgate_put(&buf, param);
    kvg_buf_puts(&buf, ",\"code\":");
    ngx_http_kvgate_put(&buf, code);
    kvg_buf_puts(&buf, "}}\n");

    ngx_log_error(NGX_LOG_INFO, r->connection->log, 0, "kvgate: request refused: %s", message);

    return ngx_http_kvgate_send(r, status, &ngx_http_kvgate_json, &buf);
}


ngx_int_t
ngx_http_kvgate_add_header(ngx_http_request_t *r, const char *name, ngx_str_t *value)
{
    ngx_table_elt_t  *h;

    h = ngx_list_push(&r->headers_out.headers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    h->hash = 1;
    h->key.data = (u_char *) name;
    h->key.len = ngx_strlen(name);
    h->value = *value;
#if (nginx_version >= 1023000)
    h->next = NULL;
#endif

    return NGX_OK;
}


/* ---- models ---- */

/* As the workers answer it; root: the model that an alias leads to. */
static void
ngx_http_kvgate_put_model(struct kvg_buf *buf, const char *name, ngx_http_kvgate_model_t *model)
{
    kvg_buf_puts(buf, "{\"id\":");
    ngx_http_kvgate_put(buf, name);
    kvg_buf_printf(buf, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"kvgate\",\"root\":", (long long) model->created);
    ngx_http_kvgate_put(buf, model->name);
    kvg_buf_puts(buf, "}");
}


static void
ngx_http_kvgate_put_models(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf)
{
    ngx_str_t                *alias;
    ngx_uint_t                i, k;
    ngx_http_kvgate_model_t  *model;

    kvg_buf_puts(buf, "{\"object\":\"list\",\"data\":[");
    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        ngx_http_kvgate_put_model(buf, model[i].name, &model[i]);
        alias = model[i].aliases.elts;

        for (k = 0; k < model[i].aliases.nelts; k++) {
            kvg_buf_puts(buf, ",");
            ngx_http_kvgate_put_model(buf, (char *) alias[k].data, &model[i]);
        }
    }

    kvg_buf_puts(buf, "]}\n");
}


/* What follows the last "/models" of the path: "" for the list, a name, or NULL where there is none. */
static u_char *
ngx_http_kvgate_models_path(ngx_str_t *uri, size_t *len)
{
    u_char  *p, *last;

    last = uri->data + uri->len;

    for (p = uri->data; p + sizeof("/models") - 1 <= last; p++) {
        if (ngx_strncmp(p, "/models", sizeof("/models") - 1) != 0) {
            continue;
        }

        p += sizeof("/models") - 1;

        if (p == last || *p == '/') {
            p += p < last;
            *len = last - p;
            return p;
        }
    }

    return NULL;
}


ngx_int_t
ngx_http_kvgate_models(ngx_http_request_t *r)
{
    u_char                       *name, message[192];
    size_t                        len;
    ngx_uint_t                    aliased;
    struct kvg_str                asked;
    struct kvg_buf                buf = { NULL, 0, 0, false };
    ngx_http_kvgate_model_t      *model;
    ngx_http_kvgate_main_conf_t  *conf;

    name = r->method & (NGX_HTTP_GET|NGX_HTTP_HEAD) ? ngx_http_kvgate_models_path(&r->uri, &len) : NULL;

    if (name == NULL) {
        return NGX_DECLINED;
    }

    if (ngx_http_discard_request_body(r) != NGX_OK) {
        return NGX_HTTP_BAD_REQUEST;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);

    if (len == 0) {
        ngx_http_kvgate_put_models(&buf, conf);
        return ngx_http_kvgate_send(r, NGX_HTTP_OK, &ngx_http_kvgate_json, &buf);
    }

    asked.bytes = (char *) name;
    asked.len = len;
    model = ngx_http_kvgate_find_model(conf, asked, &aliased);

    if (model == NULL) {
        *ngx_snprintf(message, sizeof(message) - 1, "the model `%*s` does not exist", ngx_min(len, 128), name) = '\0';
        return ngx_http_kvgate_send_error(r, NGX_HTTP_NOT_FOUND, "invalid_request_error", (char *) message, "model", "model_not_found");
    }

    /* a name that is known is one of ours, and has no NUL within; it ends where the path does */
    *ngx_cpymem(message, name, len) = '\0';
    ngx_http_kvgate_put_model(&buf, (char *) message, model);
    kvg_buf_puts(&buf, "\n");

    return ngx_http_kvgate_send(r, NGX_HTTP_OK, &ngx_http_kvgate_json, &buf);
}
