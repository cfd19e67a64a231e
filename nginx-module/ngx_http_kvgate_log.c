/* A log that stays readable while something is wrong for long: trouble that each request or each poll meets anew is said once a
 * minute. */
#include "ngx_http_kvgate.h"

#define NGX_HTTP_KVGATE_SAID   64    /* different texts remembered */
#define NGX_HTTP_KVGATE_AGAIN  60    /* seconds */
#define NGX_HTTP_KVGATE_LINE   768


typedef struct {
    uint32_t                       text;    /* CRC */
    time_t                         at;      /* 0: free */
} ngx_http_kvgate_said_t;


static ngx_http_kvgate_said_t  ngx_http_kvgate_said[NGX_HTTP_KVGATE_SAID];


/* Whether the text was logged within the last minute; else it is remembered in the place of the oldest. */
static ngx_uint_t
ngx_http_kvgate_said_lately(uint32_t text)
{
    time_t                   now;
    ngx_uint_t               i;
    ngx_http_kvgate_said_t  *said, *oldest;

    now = ngx_time();
    said = ngx_http_kvgate_said;
    oldest = said;

    for (i = 0; i < NGX_HTTP_KVGATE_SAID; i++) {
        if (said[i].at && said[i].text == text && now >= said[i].at && now - said[i].at < NGX_HTTP_KVGATE_AGAIN) {
            return 1;
        }

        if (said[i].at < oldest->at) {
            oldest = &said[i];
        }
    }

    oldest->text = text;
    oldest->at = now;

    return 0;
}


void ngx_cdecl
ngx_http_kvgate_complain(ngx_uint_t level, ngx_log_t *log, const char *format, ...)
{
    u_char   line[NGX_HTTP_KVGATE_LINE], *p, *last;
    va_list  args;

    va_start(args, format);
    last = ngx_vslprintf(line, line + sizeof(line), format, args);
    va_end(args);

    /* some of it comes from Redis: one line stays one line */
    for (p = line; p < last; p++) {
        if (*p < ' ' || *p == 0x7f) {
            *p = '?';
        }
    }

    if (!ngx_http_kvgate_said_lately(ngx_crc32_long(line, last - line))) {
        ngx_log_error(level, log, 0, "kvgate: %*s", (size_t) (last - line), line);
    }
}
