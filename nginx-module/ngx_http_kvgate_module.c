/* The module: its table of directives, its configurations, its life in nginx's processes. README.md explains each directive. */
#include "ngx_http_kvgate.h"

#if (NGX_THREADS)
#include <ngx_thread_pool.h>
#endif


static ngx_int_t ngx_http_kvgate_preconfiguration(ngx_conf_t *cf);
static ngx_int_t ngx_http_kvgate_postconfiguration(ngx_conf_t *cf);
static void *ngx_http_kvgate_create_main_conf(ngx_conf_t *cf);
static char *ngx_http_kvgate_init_main_conf(ngx_conf_t *cf, void *conf);
static void *ngx_http_kvgate_create_srv_conf(ngx_conf_t *cf);
static void *ngx_http_kvgate_create_loc_conf(ngx_conf_t *cf);
static char *ngx_http_kvgate_merge_loc_conf(ngx_conf_t *cf, void *parent, void *child);
static ngx_int_t ngx_http_kvgate_init_process(ngx_cycle_t *cycle);
static void ngx_http_kvgate_exit_process(ngx_cycle_t *cycle);


static ngx_conf_enum_t  ngx_http_kvgate_modes[] = {
    { ngx_string("off"), NGX_HTTP_KVGATE_OFF },
    { ngx_string("on"), NGX_HTTP_KVGATE_ON },
    { ngx_string("observe"), NGX_HTTP_KVGATE_OBSERVE },
    { ngx_null_string, 0 }
};


static ngx_command_t  ngx_http_kvgate_commands[] = {

    { ngx_string("kvgate"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_conf_set_enum_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_kvgate_loc_conf_t, mode),
      &ngx_http_kvgate_modes },

    { ngx_string("kvgate_bypass"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_1MORE,
      ngx_http_set_predicate_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_kvgate_loc_conf_t, bypass),
      NULL },

    { ngx_string("kvgate_salt"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_set_complex_value_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_kvgate_loc_conf_t, salt),
      NULL },

    { ngx_string("kvgate_limit"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_1MORE,
      ngx_http_kvgate_limit,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_priority"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_FLAG,
      ngx_conf_set_flag_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_kvgate_loc_conf_t, priority),
      NULL },

    { ngx_string("kvgate_status"),
      NGX_HTTP_LOC_CONF|NGX_CONF_NOARGS,
      ngx_http_kvgate_status,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_balance"),
      NGX_HTTP_UPS_CONF|NGX_CONF_NOARGS,
      ngx_http_kvgate_balance,
      NGX_HTTP_SRV_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_model"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_2MORE,
      ngx_http_kvgate_model,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_redis"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_1MORE,
      ngx_http_kvgate_redis,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_redis_timeout"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE1,
      ngx_conf_set_msec_slot,
      NGX_HTTP_MAIN_CONF_OFFSET,
      offsetof(ngx_http_kvgate_main_conf_t, redis_timeout),
      NULL },

    { ngx_string("kvgate_redis_ca"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE1,
      ngx_conf_set_str_slot,
      NGX_HTTP_MAIN_CONF_OFFSET,
      offsetof(ngx_http_kvgate_main_conf_t, redis_ca),
      NULL },

    { ngx_string("kvgate_redis_certificate"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE2,
      ngx_http_kvgate_redis_certificate,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_redis_prefix"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE1,
      ngx_http_kvgate_redis_prefix,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_zone"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE1,
      ngx_http_kvgate_zone,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_allow"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_1MORE,
      ngx_http_kvgate_allow,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("kvgate_alpha"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_TAKE1,
      ngx_http_kvgate_alpha,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

      ngx_null_command
};


static ngx_http_module_t  ngx_http_kvgate_module_ctx = {
    ngx_http_kvgate_preconfiguration,      /* preconfiguration */
    ngx_http_kvgate_postconfiguration,     /* postconfiguration */

    ngx_http_kvgate_create_main_conf,      /* create main configuration */
    ngx_http_kvgate_init_main_conf,        /* init main configuration */

    ngx_http_kvgate_create_srv_conf,       /* create server configuration */
    NULL,                                  /* merge server configuration */

    ngx_http_kvgate_create_loc_conf,       /* create location configuration */
    ngx_http_kvgate_merge_loc_conf         /* merge location configuration */
};


ngx_module_t  ngx_http_kvgate_module = {
    NGX_MODULE_V1,
    &ngx_http_kvgate_module_ctx,           /* module context */
    ngx_http_kvgate_commands,              /* module directives */
    NGX_HTTP_MODULE,                       /* module type */
    NULL,                                  /* init master */
    NULL,                                  /* init module */
    ngx_http_kvgate_init_process,          /* init process */
    NULL,                                  /* init thread */
    NULL,                                  /* exit thread */
    ngx_http_kvgate_exit_process,          /* exit process */
    NULL,                                  /* exit master */
    NGX_MODULE_V1_PADDING
};


/* ---- configurations ---- */

static void *
ngx_http_kvgate_create_main_conf(ngx_conf_t *cf)
{
    ngx_http_kvgate_main_conf_t  *mcf;

    mcf = ngx_pcalloc(cf->pool, sizeof(ngx_http_kvgate_main_conf_t));
    if (mcf == NULL) {
        return NULL;
    }

    mcf->redis_timeout = NGX_CONF_UNSET_MSEC;

    if (ngx_array_init(&mcf->models, cf->pool, 2, sizeof(ngx_http_kvgate_model_t)) != NGX_OK) {
        return NULL;
    }

    return mcf;
}


static char *
ngx_http_kvgate_init_main_conf(ngx_conf_t *cf, void *conf)
{
    ngx_http_kvgate_main_conf_t *mcf = conf;

    ngx_str_t  name = ngx_string("kvgate");
    ngx_str_t  local = ngx_string("redis://127.0.0.1:6379");

    ngx_conf_init_msec_value(mcf->redis_timeout, 10);

    if (mcf->redis_prefix.data == NULL) {
        ngx_str_set(&mcf->redis_prefix, "kvgate:");
    }

    if (mcf->allow == NULL && ngx_http_kvgate_default_allow(cf, mcf) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    if (mcf->redis.n == 0 && ngx_http_kvgate_add_redis(cf, mcf, &local) != NGX_CONF_OK) {
        return NGX_CONF_ERROR;
    }

    if (mcf->models.nelts == 0) {
        return NGX_CONF_OK;
    }

    if (mcf->redis_timeout == 0) {
        ngx_log_error(NGX_LOG_EMERG, cf->log, 0, "\"kvgate_redis_timeout\" must be over 0");
        return NGX_CONF_ERROR;
    }

    if (ngx_http_kvgate_check_names(cf, mcf) != NGX_CONF_OK) {
        return NGX_CONF_ERROR;
    }

#if (NGX_SSL)
    if (ngx_http_kvgate_tls_init(cf, mcf) != NGX_CONF_OK) {
        return NGX_CONF_ERROR;
    }
#endif

#if (NGX_THREADS)
    if (ngx_thread_pool_add(cf, NULL) == NULL) {
        return NGX_CONF_ERROR;
    }
#endif

    return mcf->zone ? NGX_CONF_OK : ngx_http_kvgate_add_zone(cf, mcf, &name, 1024 * 1024);
}


static void *
ngx_http_kvgate_create_srv_conf(ngx_conf_t *cf)
{
    return ngx_pcalloc(cf->pool, sizeof(ngx_http_kvgate_srv_conf_t));
}


static void *
ngx_http_kvgate_create_loc_conf(ngx_conf_t *cf)
{
    ngx_http_kvgate_loc_conf_t  *lcf;

    lcf = ngx_pcalloc(cf->pool, sizeof(ngx_http_kvgate_loc_conf_t));
    if (lcf == NULL) {
        return NULL;
    }

    /* salt is NULL */
    lcf->mode = NGX_CONF_UNSET_UINT;
    lcf->bypass = NGX_CONF_UNSET_PTR;
    lcf->priority = NGX_CONF_UNSET;
    lcf->limit = NGX_CONF_UNSET_PTR;

    return lcf;
}


static char *
ngx_http_kvgate_merge_loc_conf(ngx_conf_t *cf, void *parent, void *child)
{
    ngx_http_kvgate_loc_conf_t *prev = parent;
    ngx_http_kvgate_loc_conf_t *conf = child;

    ngx_http_kvgate_main_conf_t  *mcf;

    ngx_conf_merge_uint_value(conf->mode, prev->mode, NGX_HTTP_KVGATE_OFF);
    ngx_conf_merge_ptr_value(conf->bypass, prev->bypass, NULL);
    ngx_conf_merge_value(conf->priority, prev->priority, 0);
    ngx_conf_merge_ptr_value(conf->limit, prev->limit, NULL);

    if (conf->salt == NULL) {
        conf->salt = prev->salt;
    }

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_kvgate_module);

    if (conf->mode != NGX_HTTP_KVGATE_OFF && mcf->models.nelts == 0) {
        ngx_log_error(NGX_LOG_EMERG, cf->log, 0, "\"kvgate\" is on but there is no \"kvgate_model\"");
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static ngx_int_t
ngx_http_kvgate_preconfiguration(ngx_conf_t *cf)
{
    ngx_http_kvgate_prompt_init();

    return ngx_http_kvgate_add_variables(cf);
}


static ngx_int_t
ngx_http_kvgate_postconfiguration(ngx_conf_t *cf)
{
    ngx_http_handler_pt          *h;
    ngx_http_core_main_conf_t    *cmcf;
    ngx_http_kvgate_main_conf_t  *mcf;

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_kvgate_module);

    if (mcf->models.nelts == 0) {
        return NGX_OK;
    }

    cmcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_core_module);

    h = ngx_array_push(&cmcf->phases[NGX_HTTP_PRECONTENT_PHASE].handlers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    *h = ngx_http_kvgate_handler;

    h = ngx_array_push(&cmcf->phases[NGX_HTTP_LOG_PHASE].handlers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    *h = ngx_http_kvgate_served;
    ngx_http_kvgate_filter_init();

    return NGX_OK;
}


/* ---- processes ---- */

static ngx_http_kvgate_main_conf_t *
ngx_http_kvgate_process_conf(ngx_cycle_t *cycle)
{
    ngx_http_kvgate_main_conf_t  *mcf;

    if (ngx_process != NGX_PROCESS_WORKER && ngx_process != NGX_PROCESS_SINGLE) {
        return NULL;
    }

    mcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_kvgate_module);

    return mcf && mcf->models.nelts ? mcf : NULL;
}


static ngx_int_t
ngx_http_kvgate_init_process(ngx_cycle_t *cycle)
{
    ngx_http_kvgate_main_conf_t  *mcf;

    mcf = ngx_http_kvgate_process_conf(cycle);

    if (mcf == NULL) {
        return NGX_OK;
    }

    ngx_http_kvgate_pools_use(mcf, 1);

    return ngx_http_kvgate_redis_init(cycle, mcf);
}


static void
ngx_http_kvgate_exit_process(ngx_cycle_t *cycle)
{
    ngx_http_kvgate_main_conf_t  *mcf;

    mcf = ngx_http_kvgate_process_conf(cycle);

    if (mcf) {
        ngx_http_kvgate_redis_exit();
        ngx_http_kvgate_pools_use(mcf, -1);
    }
}
