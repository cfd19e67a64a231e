/* What the directives of the http level, and kvgate_status, do. */
#include "ngx_http_kvgate.h"


/* ---- kvgate_model ---- */

static void
ngx_http_kvgate_close_model(void *data)
{
    kvg_prompt_model_close(data);
}


static char *
ngx_http_kvgate_model_options(ngx_conf_t *cf, ngx_http_kvgate_model_t *model)
{
    ssize_t      size;
    ngx_int_t    n;
    ngx_str_t   *value, text, *alias;
    ngx_uint_t   i;

    value = cf->args->elts;

    for (i = 3; i < cf->args->nelts; i++) {
        text = value[i];

        if (ngx_strncmp(text.data, "alias=", 6) == 0) {
            text.data += 6;
            text.len -= 6;
            alias = ngx_array_push(&model->aliases);

            if (alias == NULL) {
                return NGX_CONF_ERROR;
            }

            if (text.len == 0 || text.len > KVG_NAME_MAX) {
                goto invalid;
            }

            *alias = text;
            continue;
        }

        if (ngx_strncmp(text.data, "block_size=", 11) == 0) {
            n = ngx_atoi(text.data + 11, text.len - 11);

            if (n < 16 || n > 512 || (n & (n - 1))) {
                ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "\"%V\" must be a power of two from 16 to 512", &value[i]);
                return NGX_CONF_ERROR;
            }

            model->block_size = (uint32_t) n;
            continue;
        }

        if (ngx_strncmp(text.data, "segments=", 9) == 0) {
            text.data += 9;
            text.len -= 9;
            size = ngx_parse_size(&text);

            if (size == NGX_ERROR) {
                goto invalid;
            }

            model->segments = size;
            continue;
        }

        goto invalid;
    }

    return NGX_CONF_OK;

invalid:

    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid parameter \"%V\"", &value[i]);
    return NGX_CONF_ERROR;
}


static char *
ngx_http_kvgate_open_model(ngx_conf_t *cf, ngx_http_kvgate_model_t *model)
{
    struct kvg_error     err;
    ngx_pool_cleanup_t  *cln;

    if (ngx_conf_full_name(cf->cycle, &model->path, 1) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    cln = ngx_pool_cleanup_add(cf->pool, 0);
    if (cln == NULL) {
        return NGX_CONF_ERROR;
    }

    if (kvg_prompt_model_open(&model->prompt, (char *) model->path.data, model->segments, &err) != KVG_OK) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "model \"%s\" cannot be opened: %V: %s", model->name, &model->path, err.message);
        return NGX_CONF_ERROR;
    }

    cln->handler = ngx_http_kvgate_close_model;
    cln->data = model->prompt;
    kvg_hash_hex(kvg_prompt_model_fingerprint(model->prompt), model->fingerprint);

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_model(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_str_t                *value;
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    value = cf->args->elts;

    if (!kvg_name_valid((char *) value[1].data, value[1].len)) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "model name \"%V\" must be 1 to %d of A-Z a-z 0-9 . _ / -", &value[1],
                           KVG_NAME_MAX);
        return NGX_CONF_ERROR;
    }

    model = mcf->models.elts;

    for (i = 0; i < mcf->models.nelts; i++) {
        if (ngx_strcmp(model[i].name, value[1].data) == 0) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "duplicate model \"%V\"", &value[1]);
            return NGX_CONF_ERROR;
        }
    }

    model = ngx_array_push(&mcf->models);
    if (model == NULL) {
        return NGX_CONF_ERROR;
    }

    ngx_memzero(model, sizeof(ngx_http_kvgate_model_t));
    model->name = (char *) value[1].data;
    model->path = value[2];
    model->created = ngx_time();
    model->block_size = 32;
    model->segments = 32 * 1024 * 1024;

    if (ngx_array_init(&model->aliases, cf->pool, 1, sizeof(ngx_str_t)) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    if (ngx_http_kvgate_model_options(cf, model) != NGX_CONF_OK) {
        return NGX_CONF_ERROR;
    }

    return ngx_http_kvgate_open_model(cf, model);
}


/* How many names of a model, its own and its aliases, are `name`. */
static ngx_uint_t
ngx_http_kvgate_count_name(ngx_http_kvgate_model_t *model, u_char *name)
{
    ngx_str_t   *alias;
    ngx_uint_t   i, n;

    n = ngx_strcmp(model->name, name) == 0;
    alias = model->aliases.elts;

    for (i = 0; i < model->aliases.nelts; i++) {
        n += ngx_strcmp(alias[i].data, name) == 0;
    }

    return n;
}


char *
ngx_http_kvgate_check_names(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf)
{
    ngx_str_t                *alias;
    ngx_uint_t                i, k, m, n;
    ngx_http_kvgate_model_t  *model;

    model = mcf->models.elts;

    for (i = 0; i < mcf->models.nelts; i++) {
        alias = model[i].aliases.elts;

        for (k = 0; k < model[i].aliases.nelts; k++) {
            for (m = 0, n = 0; m < mcf->models.nelts; m++) {
                n += ngx_http_kvgate_count_name(&model[m], alias[k].data);
            }

            if (n > 1) {
                ngx_log_error(NGX_LOG_EMERG, cf->log, 0, "alias \"%V\" of kvgate_model \"%s\" is already a model's name or alias",
                              &alias[k], model[i].name);
                return NGX_CONF_ERROR;
            }
        }
    }

    return NGX_CONF_OK;
}


/* ---- kvgate_redis ---- */

/* Names are resolved here, once: hiredis would do it while the event loop waits. */
static char *
ngx_http_kvgate_redis_resolve(ngx_conf_t *cf, ngx_str_t *text, struct kvg_redis_url *parsed)
{
    u_char     *p;
    ngx_url_t   u;

    ngx_memzero(&u, sizeof(u));
    u.url.data = ngx_pnalloc(cf->pool, sizeof(parsed->host) + sizeof("[]:65535"));
    if (u.url.data == NULL) {
        return NGX_CONF_ERROR;
    }

    p = ngx_sprintf(u.url.data, ngx_strchr(parsed->host, ':') ? "[%s]:%ui" : "%s:%ui", parsed->host, (ngx_uint_t) parsed->port);
    u.url.len = p - u.url.data;

    if (ngx_parse_url(cf->pool, &u) != NGX_OK || u.naddrs == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "%s in kvgate_redis \"%s\"", u.err ? u.err : "no address", parsed->shown);
        return NGX_CONF_ERROR;
    }

    /* hiredis wants an IPv6 address without brackets */
    if (inet_ntop(u.addrs[0].sockaddr->sa_family,
                  u.addrs[0].sockaddr->sa_family == AF_INET6 ? (void *) &((struct sockaddr_in6 *) u.addrs[0].sockaddr)->sin6_addr
                                                             : (void *) &((struct sockaddr_in *) u.addrs[0].sockaddr)->sin_addr,
                  parsed->host, sizeof(parsed->host)) == NULL)
    {
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_add_redis(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf, ngx_str_t *text)
{
    size_t                     i;
    struct kvg_error           err;
    struct kvg_redis_servers  *servers = &mcf->redis;

    i = servers->n;

    if (kvg_redis_servers_parse((char *) text->data, servers, &err) != KVG_OK) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "kvgate_redis: %s", err.message);
        return NGX_CONF_ERROR;
    }

    for ( /* void */ ; i < servers->n; i++) {
#if !(NGX_SSL)
        if (servers->urls[i].tls) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "kvgate_redis: rediss:// needs an nginx that is built with TLS");
            return NGX_CONF_ERROR;
        }

#endif
        if (servers->urls[i].path[0] == '\0' && ngx_http_kvgate_redis_resolve(cf, text, &servers->urls[i]) != NGX_CONF_OK) {
            return NGX_CONF_ERROR;
        }
    }

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_redis(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_str_t   *value;
    ngx_uint_t   i;

    value = cf->args->elts;

    if (mcf->redis.n) {
        return "is duplicate";
    }

    for (i = 1; i < cf->args->nelts; i++) {
        if (ngx_http_kvgate_add_redis(cf, mcf, &value[i]) != NGX_CONF_OK) {
            return NGX_CONF_ERROR;
        }
    }

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_redis_certificate(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_str_t  *value;

    value = cf->args->elts;

    if (mcf->redis_certificate.data) {
        return "is duplicate";
    }

    mcf->redis_certificate = value[1];
    mcf->redis_certificate_key = value[2];

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_redis_prefix(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_str_t  *value;

    value = cf->args->elts;

    if (mcf->redis_prefix.data) {
        return "is duplicate";
    }

    if (!kvg_prefix_valid((char *) value[1].data, value[1].len)) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "key prefix \"%V\" must be at most %d of A-Z a-z 0-9 . _ / : -", &value[1],
                           KVG_PREFIX_MAX);
        return NGX_CONF_ERROR;
    }

    mcf->redis_prefix = value[1];

    return NGX_CONF_OK;
}


/* ---- the other directives of http ---- */

char *
ngx_http_kvgate_add_zone(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf, ngx_str_t *name, size_t size)
{
    mcf->zone = ngx_shared_memory_add(cf, name, size, &ngx_http_kvgate_module);
    if (mcf->zone == NULL) {
        return NGX_CONF_ERROR;
    }

    if (mcf->zone->data) {
        return "is duplicate";
    }

    mcf->zone->init = ngx_http_kvgate_zone_init;
    mcf->zone->data = mcf;

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_zone(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    u_char     *colon;
    ssize_t     size;
    ngx_str_t  *value, name, text;

    value = cf->args->elts;

    if (mcf->zone) {
        return "is duplicate";
    }

    colon = (u_char *) ngx_strchr(value[1].data, ':');

    if (colon == NULL || colon == value[1].data) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "kvgate_zone \"%V\" must be name:size", &value[1]);
        return NGX_CONF_ERROR;
    }

    name.data = value[1].data;
    name.len = colon - value[1].data;
    text.data = colon + 1;
    text.len = value[1].data + value[1].len - text.data;
    size = ngx_parse_size(&text);

    if (size == NGX_ERROR) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid size in kvgate_zone \"%V\"", &value[1]);
        return NGX_CONF_ERROR;
    }

    if (size < (ssize_t) (8 * ngx_pagesize)) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "kvgate_zone \"%V\" is too small", &value[1]);
        return NGX_CONF_ERROR;
    }

    return ngx_http_kvgate_add_zone(cf, mcf, &name, size);
}


char *
ngx_http_kvgate_allow(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_int_t    rc;
    ngx_str_t   *value;
    ngx_cidr_t  *cidr;
    ngx_uint_t   i;

    value = cf->args->elts;

    if (mcf->allow == NULL) {
        mcf->allow = ngx_array_create(cf->pool, 4, sizeof(ngx_cidr_t));
        if (mcf->allow == NULL) {
            return NGX_CONF_ERROR;
        }
    }

    for (i = 1; i < cf->args->nelts; i++) {
        cidr = ngx_array_push(mcf->allow);
        if (cidr == NULL) {
            return NGX_CONF_ERROR;
        }

        ngx_memzero(cidr, sizeof(ngx_cidr_t));

        if (ngx_strcmp(value[i].data, "unix:") == 0) {
            cidr->family = AF_UNIX;
            continue;
        }

        rc = ngx_ptocidr(&value[i], cidr);

        if (rc == NGX_ERROR) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid parameter \"%V\": an address, a CIDR or unix:", &value[i]);
            return NGX_CONF_ERROR;
        }

        if (rc == NGX_DONE) {
            ngx_conf_log_error(NGX_LOG_WARN, cf, 0, "low address bits of %V are meaningless", &value[i]);
        }
    }

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_alpha(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_int_t   thousandths;
    ngx_str_t  *value;

    value = cf->args->elts;

    if (mcf->alpha != 0) {
        return "is duplicate";
    }

    thousandths = ngx_atofp(value[1].data, value[1].len, 3);

    if (thousandths == NGX_ERROR || thousandths == 0 || thousandths > 1000000) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "kvgate_alpha \"%V\" must be a number over 0 and at most 1000", &value[1]);
        return NGX_CONF_ERROR;
    }

    mcf->alpha = (double) thousandths / 1000;

    return NGX_CONF_OK;
}


char *
ngx_http_kvgate_status(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_core_loc_conf_t  *clcf;

    clcf = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);
    clcf->handler = ngx_http_kvgate_status_handler;

    return NGX_CONF_OK;
}


/* ---- defaults ---- */

/* loopback and unix sockets */
ngx_int_t
ngx_http_kvgate_default_allow(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf)
{
    ngx_uint_t        i;
    ngx_cidr_t       *cidr;
    static ngx_str_t  loopback[] = { ngx_string("127.0.0.0/8"), ngx_string("::1/128") };

    mcf->allow = ngx_array_create(cf->pool, 3, sizeof(ngx_cidr_t));
    if (mcf->allow == NULL) {
        return NGX_ERROR;
    }

    for (i = 0; i < 2; i++) {
        cidr = ngx_array_push(mcf->allow);
        if (cidr == NULL) {
            return NGX_ERROR;
        }

        if (ngx_ptocidr(&loopback[i], cidr) == NGX_ERROR) {
            (void) mcf->allow->nelts--;  /* no IPv6 in this nginx */
        }
    }

    cidr = ngx_array_push(mcf->allow);
    if (cidr == NULL) {
        return NGX_ERROR;
    }

    ngx_memzero(cidr, sizeof(ngx_cidr_t));
    cidr->family = AF_UNIX;

    return NGX_OK;
}
