#define _GNU_SOURCE
#include "redis-schemas/url.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char SHAPE[] = "Redis URL: expected redis:// or rediss://[[user]:password@]host[:port][/db], or unix:/path[?db=N]";

/* Decimal digits alone, 0..max; -1 otherwise. */
static long parse_number(const char *text, size_t len, long max)
{
    long value = 0;
    if (!len || len > 9)
        return -1;
    for (size_t i = 0; i < len; i++) {
        if (!isdigit((unsigned char)text[i]))
            return -1;
        value = value * 10 + (text[i] - '0');
    }
    return value <= max ? value : -1;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* text[0..len) into out[size], NUL-terminated; -1 where it does not fit or an escape is wrong. */
static int percent_decode(const char *text, size_t len, char *out, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (c == '%') {
            int high = i + 2 < len ? hex_digit(text[i + 1]) : -1, low = i + 2 < len ? hex_digit(text[i + 2]) : -1;
            if (high < 0 || low < 0 || !(high | low))
                return -1;
            c = (char)(high << 4 | low);
            i += 2;
        }
        if (n + 1 >= size)
            return -1;
        out[n++] = c;
    }
    out[n] = '\0';
    return 0;
}

static int parse_unix(const char *path, struct kvg_redis_url *out, struct kvg_error *err)
{
    if (!strncmp(path, "//", 2))
        path += 2;
    const char *query = strchr(path, '?');
    size_t len = query ? (size_t)(query - path) : strlen(path);
    if (path[0] != '/' || len >= sizeof out->path)
        return kvg_fail(err, KVG_INVALID, "Redis URL: the socket path must be absolute and at most %zu bytes long",
                        sizeof out->path - 1);
    memcpy(out->path, path, len);
    if (query) {
        long db = strncmp(query, "?db=", 4) ? -1 : parse_number(query + 4, strlen(query + 4), 1 << 20);
        if (db < 0)
            return kvg_fail(err, KVG_INVALID, "%s", SHAPE);
        out->db = (int)db;
    }
    snprintf(out->shown, sizeof out->shown, "unix:%s db %d", out->path, out->db);
    return 0;
}

static int parse_credentials(const char *text, size_t len, struct kvg_redis_url *out, struct kvg_error *err)
{
    const char *colon = memchr(text, ':', len);
    if (!colon)
        return kvg_fail(err, KVG_INVALID,
                        "Redis URL: a user needs a password (user:password@host), a password alone a colon (:password@host)");
    size_t user_len = (size_t)(colon - text);
    if (percent_decode(text, user_len, out->user, sizeof out->user) ||
        percent_decode(colon + 1, len - user_len - 1, out->password, sizeof out->password))
        return kvg_fail(err, KVG_INVALID, "Redis URL: user or password is too long or has a wrong %%XX escape");
    return 0;
}

/* host[:port] or [IPv6][:port] */
static int parse_address(const char *text, size_t len, struct kvg_redis_url *out, struct kvg_error *err)
{
    const char *end = text + len, *host = text, *host_end;
    if (len && text[0] == '[') {
        host = text + 1;
        host_end = memchr(host, ']', len - 1);
        text = host_end ? host_end + 1 : NULL;
    } else {
        host_end = memchr(text, ':', len);
        if (!host_end)
            host_end = end;
        text = host_end;
    }
    if (!text || host_end == host || memchr(host, ',', (size_t)(host_end - host)) ||
        (size_t)(host_end - host) >= sizeof out->host || (text < end && *text != ':'))
        return kvg_fail(err, KVG_INVALID, "%s", SHAPE);
    memcpy(out->host, host, (size_t)(host_end - host));
    if (text < end) {
        long port = parse_number(text + 1, (size_t)(end - text - 1), 65535);
        if (port < 1)
            return kvg_fail(err, KVG_INVALID, "Redis URL: the port must be a number from 1 to 65535");
        out->port = (uint16_t)port;
    }
    return 0;
}

int kvg_redis_url_parse(const char *url, struct kvg_redis_url *out, struct kvg_error *err)
{
    memset(out, 0, sizeof *out);
    out->port = 6379;
    if (!strncasecmp(url, "unix:", 5))
        return parse_unix(url + 5, out, err);
    out->tls = !strncasecmp(url, "rediss://", 9);
    if (!out->tls && strncasecmp(url, "redis://", 8))
        return kvg_fail(err, KVG_INVALID, "%s", SHAPE);
    const char *rest = url + 8 + out->tls, *slash, *at = strrchr(rest, '@');
    if (at) {
        if (parse_credentials(rest, (size_t)(at - rest), out, err))
            return KVG_INVALID;
        rest = at + 1;
    }
    slash = strchr(rest, '/');
    if (parse_address(rest, slash ? (size_t)(slash - rest) : strlen(rest), out, err))
        return KVG_INVALID;
    if (slash && slash[1]) {
        long db = parse_number(slash + 1, strlen(slash + 1), 1 << 20);
        if (db < 0)
            return kvg_fail(err, KVG_INVALID, "Redis URL: the db must be a number, not \"%.32s\"", slash + 1);
        out->db = (int)db;
    }
    if (out->tls)
        snprintf(out->name, sizeof out->name, "%s", out->host);
    snprintf(out->shown, sizeof out->shown, "%s%s:%u db %d", out->tls ? "tls " : "", out->host, out->port, out->db);
    return 0;
}

/* sentinel://[[user]:password@]host[:port],…/master[/db]; text begins behind the scheme. */
static int parse_sentinels(const char *text, struct kvg_redis_servers *out, struct kvg_error *err)
{
    static const char shape[] = "Redis URL: expected sentinel://[[user]:password@]host[:port],host[:port],…/master[/db]";
    const char *slash = strchr(text, '/'), *at = slash ? memrchr(text, '@', (size_t)(slash - text)) : NULL;
    if (out->n)
        return kvg_fail(err, KVG_INVALID, "Redis URL: a sentinel:// must be the only one");
    if (at) {
        if (parse_credentials(text, (size_t)(at - text), &out->login, err))
            return KVG_INVALID;
        text = at + 1;
    }
    const char *name = slash ? slash + 1 : "", *db = strchr(name, '/');
    size_t len = db ? (size_t)(db - name) : strlen(name);
    long number = db && db[1] ? parse_number(db + 1, strlen(db + 1), 1 << 20) : 0;
    if (!len || len >= sizeof out->master || number < 0)
        return kvg_fail(err, KVG_INVALID, "%s", shape);
    memcpy(out->master, name, len);
    out->login.db = (int)number;
    while (text < slash) {
        const char *comma = memchr(text, ',', (size_t)(slash - text)), *end = comma ? comma : slash;
        struct kvg_redis_url url = {.port = 26379};
        if (out->n == KVG_REDIS_SERVERS)
            return kvg_fail(err, KVG_INVALID, "Redis URL: more than %d Sentinels", KVG_REDIS_SERVERS);
        if (parse_address(text, (size_t)(end - text), &url, err))
            return KVG_INVALID;
        snprintf(url.shown, sizeof url.shown, "sentinel %s:%u", url.host, url.port);
        out->urls[out->n++] = url;
        text = end + (comma != NULL);
    }
    return out->n ? 0 : kvg_fail(err, KVG_INVALID, "%s", shape);
}

int kvg_redis_servers_parse(const char *text, struct kvg_redis_servers *out, struct kvg_error *err)
{
    if (!strncasecmp(text, "sentinel://", 11))
        return parse_sentinels(text + 11, out, err);
    if (out->master[0])
        return kvg_fail(err, KVG_INVALID, "Redis URL: a sentinel:// must be the only one");
    /* A comma within a password is written as it is where only one URL is given. */
    while (*text) {
        char one[1024];
        static const char *const next[] = {",redis://", ",rediss://", ",unix:"};
        const char *comma = NULL;
        for (size_t i = 0; i < sizeof next / sizeof *next; i++) {
            const char *at = strstr(text, next[i]);
            comma = at && (!comma || at < comma) ? at : comma;
        }
        size_t len = comma ? (size_t)(comma - text) : strlen(text);
        if (len >= sizeof one)
            return kvg_fail(err, KVG_INVALID, "Redis URL: longer than %zu bytes", sizeof one - 1);
        if (out->n == KVG_REDIS_SERVERS)
            return kvg_fail(err, KVG_INVALID, "Redis URL: more than %d servers", KVG_REDIS_SERVERS);
        memcpy(one, text, len);
        one[len] = '\0';
        if (kvg_redis_url_parse(one, &out->urls[out->n], err))
            return KVG_INVALID;
        out->n++;
        text += len + (comma != NULL);
    }
    return out->n ? 0 : kvg_fail(err, KVG_INVALID, "%s", SHAPE);
}

int kvg_redis_master(const struct kvg_redis_servers *servers, const char *host, const char *port, struct kvg_redis_url *out,
                     struct kvg_error *err)
{
    long number = parse_number(port, strlen(port), 65535);
    *out = servers->login;
    if (!host[0] || strlen(host) >= sizeof out->host || number < 1)
        return kvg_fail(err, KVG_INVALID, "the Sentinel names \"%.64s\" port \"%.16s\" as the master %s", host, port,
                        servers->master);
    snprintf(out->host, sizeof out->host, "%s", host);
    out->port = (uint16_t)number;
    snprintf(out->shown, sizeof out->shown, "%.48s at %.200s:%u db %d", servers->master, out->host, out->port, out->db);
    return 0;
}
