/* The lexer: jinja2's rules with trim_blocks and lstrip_blocks on.
 *
 * Text between tags is data. A tag's `-` strips all white space on its side; else a block or comment tag that stands alone
 * on its line takes the blanks before it and the newline behind it with it (`+` keeps them).
 */
#include "libprompt/jinja_ast.h"
#include "libprompt/utf8.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lexer {
    struct kvg_arena *arena;
    struct kvg_error *err;
    const char *src;
    size_t len, pos;
    uint32_t line;
    bool line_starting; /* the token before ended with a newline */
    struct token *tokens;
    size_t n, cap;
    char *open; /* closing brackets still to come */
    size_t n_open, cap_open;
};

static int lex_fail(struct lexer *lx, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int lex_fail(struct lexer *lx, const char *format, ...)
{
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return kvg_fail(lx->err, KVG_INVALID, "chat template, line %u: %s", lx->line, text);
}

static struct token *add_token(struct lexer *lx, enum token_type type)
{
    if (lx->n == lx->cap) {
        size_t cap = lx->cap ? lx->cap * 2 : 256;
        struct token *tokens = kvg_arena_grow(lx->arena, lx->tokens, lx->cap * sizeof *tokens, cap * sizeof *tokens);
        if (!tokens) {
            kvg_fail(lx->err, KVG_NOMEM, "chat template: out of memory");
            return NULL;
        }
        lx->tokens = tokens;
        lx->cap = cap;
    }
    struct token *token = &lx->tokens[lx->n++];
    *token = (struct token){.type = type, .line = lx->line};
    return token;
}

/* Bytes of the white space character at pos, or 0. */
static unsigned space_at(const struct lexer *lx, size_t pos)
{
    if (pos >= lx->len)
        return 0;
    unsigned n = kvg_utf8_len((const unsigned char *)lx->src + pos, lx->len - pos);
    return n && py_space(kvg_utf8_decode((const unsigned char *)lx->src + pos, n)) ? n : 0;
}

static size_t skip_spaces(const struct lexer *lx, size_t pos)
{
    for (unsigned n; (n = space_at(lx, pos));)
        pos += n;
    return pos;
}

/* Moves to pos, counting lines. */
static void advance(struct lexer *lx, size_t pos)
{
    for (size_t i = lx->pos; i < pos; i++)
        lx->line += lx->src[i] == '\n';
    lx->line_starting = pos > lx->pos && lx->src[pos - 1] == '\n';
    lx->pos = pos;
}

static bool has(const struct lexer *lx, size_t pos, const char *text)
{
    size_t n = strlen(text);
    return pos + n <= lx->len && memcmp(lx->src + pos, text, n) == 0;
}

/* The end of a block tag (with its sign and what it strips) at pos, or 0. */
static size_t block_end_at(const struct lexer *lx, size_t pos)
{
    if (has(lx, pos, "+%}"))
        return pos + 3;
    if (has(lx, pos, "-%}"))
        return skip_spaces(lx, pos + 3);
    if (has(lx, pos, "%}"))
        return pos + 2 + has(lx, pos + 2, "\n");
    return 0;
}

/* Data src[from..to) before a tag with that sign. */
static int add_data(struct lexer *lx, size_t from, size_t to, char sign, bool lstrip)
{
    if (sign == '-') {
        while (to > from) {
            size_t last = to - 1;
            while (last > from && ((unsigned char)lx->src[last] & 0xc0) == 0x80)
                last--;
            if (space_at(lx, last) != to - last)
                break;
            to = last;
        }
    } else if (sign != '+' && lstrip) {
        size_t line = to;
        while (line > from && lx->src[line - 1] != '\n')
            line--;
        if ((line > from || lx->line_starting) && line < to && skip_spaces(lx, line) >= to)
            to = line;
    }
    if (to == from)
        return 0;
    struct token *token = add_token(lx, T_DATA);
    if (!token)
        return KVG_NOMEM;
    token->text = (struct kvg_str){lx->src + from, to - from};
    return 0;
}

static char sign_at(const struct lexer *lx, size_t pos)
{
    return pos < lx->len && (lx->src[pos] == '-' || lx->src[pos] == '+') ? lx->src[pos] : 0;
}

/* `{% raw %}` at pos: where its content starts, or 0. */
static size_t raw_begin_at(const struct lexer *lx, size_t pos)
{
    size_t i = pos + 2;
    i += sign_at(lx, i) != 0;
    i = skip_spaces(lx, i);
    if (!has(lx, i, "raw"))
        return 0;
    i = skip_spaces(lx, i + 3);
    if (has(lx, i, "-%}"))
        return skip_spaces(lx, i + 3);
    return has(lx, i, "%}") ? i + 2 : 0;
}

static int lex_raw(struct lexer *lx)
{
    for (size_t i = lx->pos; i < lx->len; i++) {
        if (!has(lx, i, "{%"))
            continue;
        char sign = sign_at(lx, i + 2);
        size_t word = skip_spaces(lx, i + 2 + (sign != 0));
        if (!has(lx, word, "endraw"))
            continue;
        size_t end = block_end_at(lx, skip_spaces(lx, word + 6));
        if (!end)
            continue;
        int rc = add_data(lx, lx->pos, i, sign, true);
        advance(lx, end);
        return rc;
    }
    return lex_fail(lx, "missing end of raw directive");
}

static int lex_comment(struct lexer *lx)
{
    size_t i = lx->pos;
    while (i < lx->len && !has(lx, i, "#}"))
        i++;
    if (i >= lx->len)
        return lex_fail(lx, "missing end of comment tag");
    char sign = i > lx->pos ? sign_at(lx, i - 1) : 0;
    size_t end = i + 2;
    if (sign == '-')
        end = skip_spaces(lx, end);
    else if (sign != '+')
        end += has(lx, end, "\n");
    advance(lx, end);
    return 0;
}

/* ---- inside a tag ---- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_word(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 0x80;
}

/* Digits with single underscores between them, from pos. */
static size_t skip_digits(const struct lexer *lx, size_t pos)
{
    while (pos < lx->len && (is_digit(lx->src[pos]) || (lx->src[pos] == '_' && pos + 1 < lx->len && is_digit(lx->src[pos + 1]))))
        pos++;
    return pos;
}

static int lex_number(struct lexer *lx)
{
    size_t start = lx->pos, end = skip_digits(lx, start);
    bool is_float = false;
    if (end + 1 < lx->len && lx->src[end] == '.' && is_digit(lx->src[end + 1]) && (start == 0 || lx->src[start - 1] != '.')) {
        is_float = true;
        end = skip_digits(lx, end + 1);
    }
    if (end < lx->len && (lx->src[end] | 32) == 'e') {
        size_t exponent = end + 1 + (sign_at(lx, end + 1) != 0);
        if (exponent < lx->len && is_digit(lx->src[exponent])) {
            is_float = true;
            end = skip_digits(lx, exponent);
        }
    }
    int base = 10;
    if (!is_float && lx->src[start] == '0' && start + 1 < lx->len) {
        char mark = lx->src[start + 1] | 32;
        base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
        for (end = base == 10 ? end : start + 2; base != 10 && end < lx->len && is_word(lx->src[end]);)
            end++;
    }
    char text[128];
    size_t n = 0;
    for (size_t i = start + (base == 10 ? 0 : 2); i < end; i++)
        if (lx->src[i] != '_' && n < sizeof text - 1)
            text[n++] = lx->src[i];
    text[n] = '\0';
    struct token *token = add_token(lx, is_float ? T_FLOAT : T_INTEGER);
    if (!token)
        return KVG_NOMEM;
    char *rest;
    if (is_float) {
        token->f = strtod(text, &rest);
    } else {
        unsigned long long value = strtoull(text, &rest, base);
        if (value > INT64_MAX)
            return lex_fail(lx, "integer %.40s is too large", text);
        token->i = (int64_t)value;
    }
    if (*rest || !n)
        return lex_fail(lx, "malformed number");
    advance(lx, end);
    return 0;
}

static int hex_value(const char *p, int digits, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < digits; i++) {
        char c = p[i] | 32;
        if (is_digit(p[i]))
            *out = *out * 16 + (uint32_t)(p[i] - '0');
        else if (c >= 'a' && c <= 'f')
            *out = *out * 16 + (uint32_t)(c - 'a' + 10);
        else
            return -1;
    }
    return 0;
}

/* The escape at src[*i] (behind its backslash), decoded to out as Python's unicode-escape does; -1 when malformed. */
static int decode_escape(const char *src, size_t *i, size_t end, char *out, size_t *w)
{
    static const char names[] = "abfnrtv\\'\"", codes[] = "\a\b\f\n\r\t\v\\'\"";
    char c = src[*i];
    const char *known = memchr(names, c, sizeof names - 1);
    if (known) {
        out[(*w)++] = codes[known - names];
        (*i)++;
    } else if (c == '\n') {
        (*i)++;
    } else if (c == 'x' || c == 'u' || c == 'U') {
        int digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t code, low;
        if (*i + 1 + (size_t)digits > end || hex_value(src + *i + 1, digits, &code) < 0 || code > 0x10ffff)
            return -1;
        *i += 1 + (size_t)digits;
        if (code >= 0xd800 && code <= 0xdbff && *i + 6 <= end && src[*i] == '\\' && src[*i + 1] == 'u' &&
            hex_value(src + *i + 2, 4, &low) == 0 && low >= 0xdc00 && low <= 0xdfff) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            *i += 6;
        }
        if (code >= 0xd800 && code <= 0xdfff)
            return -1;
        *w += kvg_utf8_encode(code, out + *w);
    } else if (c >= '0' && c <= '7') {
        uint32_t code = 0;
        for (int k = 0; k < 3 && *i < end && src[*i] >= '0' && src[*i] <= '7'; k++)
            code = code * 8 + (uint32_t)(src[(*i)++] - '0');
        *w += kvg_utf8_encode(code, out + *w);
    } else if (c == 'N') {
        return -1;
    } else {
        out[(*w)++] = '\\';
    }
    return 0;
}

static int lex_string(struct lexer *lx)
{
    char quote = lx->src[lx->pos];
    size_t start = lx->pos + 1, end = start;
    bool escaped = false;
    while (end < lx->len && lx->src[end] != quote) {
        escaped |= lx->src[end] == '\\';
        end += lx->src[end] == '\\' ? 2 : 1;
    }
    if (end >= lx->len)
        return lex_fail(lx, "unexpected char '%c': a string without its end", quote);
    struct token *token = add_token(lx, T_STRING);
    if (!token)
        return KVG_NOMEM;
    token->text = (struct kvg_str){lx->src + start, end - start};
    if (escaped) {
        /* an escape is never longer decoded: \7 is one byte, \xff two of four */
        char *out = kvg_arena_alloc(lx->arena, end - start + 4);
        if (!out)
            return kvg_fail(lx->err, KVG_NOMEM, "chat template: out of memory");
        size_t w = 0;
        for (size_t i = start; i < end;) {
            if (lx->src[i] != '\\') {
                out[w++] = lx->src[i++];
                continue;
            }
            i++;
            if (decode_escape(lx->src, &i, end, out, &w) < 0)
                return lex_fail(lx, "malformed escape in a string");
        }
        token->text = (struct kvg_str){out, w};
    }
    advance(lx, end + 1);
    return 0;
}

static int balance(struct lexer *lx, char c)
{
    if (c == '{' || c == '(' || c == '[') {
        if (lx->n_open == lx->cap_open) {
            size_t cap = lx->cap_open ? lx->cap_open * 2 : 64;
            char *open = kvg_arena_grow(lx->arena, lx->open, lx->cap_open, cap);
            if (!open)
                return kvg_fail(lx->err, KVG_NOMEM, "chat template: out of memory");
            lx->open = open;
            lx->cap_open = cap;
        }
        lx->open[lx->n_open++] = c == '{' ? '}' : c == '(' ? ')' : ']';
    } else if (c == '}' || c == ')' || c == ']') {
        if (lx->n_open == 0)
            return lex_fail(lx, "unexpected '%c'", c);
        if (lx->open[--lx->n_open] != c)
            return lex_fail(lx, "unexpected '%c', expected '%c'", c, lx->open[lx->n_open]);
    }
    return 0;
}

static int lex_operator(struct lexer *lx)
{
    static const struct {
        const char *text;
        uint16_t op;
    } twins[] = {{"//", OT_FLOORDIV}, {"**", OT_POW}, {"==", OT_EQ}, {"!=", OT_NE}, {">=", OT_GE}, {"<=", OT_LE}};
    uint16_t op = 0;
    for (size_t i = 0; i < sizeof twins / sizeof *twins; i++)
        if (has(lx, lx->pos, twins[i].text))
            op = twins[i].op;
    size_t n = op ? 2 : 1;
    char c = lx->src[lx->pos];
    if (!op && c && strchr("+-/*%~[](){}><=.:|,;", c))
        op = (uint16_t)c;
    if (!op)
        return lex_fail(lx, "unexpected char '%c' at %zu", c, lx->pos);
    if (n == 1 && balance(lx, c) < 0)
        return KVG_INVALID;
    struct token *token = add_token(lx, T_OPERATOR);
    if (!token)
        return KVG_NOMEM;
    token->op = op;
    advance(lx, lx->pos + n);
    return 0;
}

static int lex_word(struct lexer *lx)
{
    size_t end = lx->pos;
    while (end < lx->len && is_word(lx->src[end]))
        end++;
    struct token *token = add_token(lx, T_NAME);
    if (!token)
        return KVG_NOMEM;
    token->text = (struct kvg_str){lx->src + lx->pos, end - lx->pos};
    advance(lx, end);
    return 0;
}

/* From behind the opening of a tag to behind its end. */
static int lex_tag(struct lexer *lx, bool variable)
{
    lx->n_open = 0;
    while (lx->pos < lx->len) {
        size_t end = 0;
        if (lx->n_open == 0 && !variable)
            end = block_end_at(lx, lx->pos);
        else if (lx->n_open == 0)
            end = has(lx, lx->pos, "-}}") ? skip_spaces(lx, lx->pos + 3) : has(lx, lx->pos, "}}") ? lx->pos + 2 : 0;
        if (end) {
            if (!add_token(lx, variable ? T_VARIABLE_END : T_BLOCK_END))
                return KVG_NOMEM;
            advance(lx, end);
            return 0;
        }
        char c = lx->src[lx->pos];
        unsigned space = space_at(lx, lx->pos);
        int rc = 0;
        if (space)
            advance(lx, lx->pos + space);
        else if (is_digit(c))
            rc = lex_number(lx);
        else if (is_word(c))
            rc = lex_word(lx);
        else if (c == '\'' || c == '"')
            rc = lex_string(lx);
        else
            rc = lex_operator(lx);
        if (rc < 0)
            return rc;
    }
    return 0; /* the parser says what is missing */
}

/* Data up to the next tag, and that tag. */
static int lex_next(struct lexer *lx)
{
    size_t i = lx->pos;
    while (i + 1 < lx->len && !(lx->src[i] == '{' && strchr("%{#", lx->src[i + 1])))
        i++;
    if (i + 1 >= lx->len) {
        int rc = add_data(lx, lx->pos, lx->len, '+', false);
        advance(lx, lx->len);
        return rc;
    }
    char kind = lx->src[i + 1], sign = sign_at(lx, i + 2);
    size_t raw = kind == '%' ? raw_begin_at(lx, i) : 0;
    int rc = add_data(lx, lx->pos, i, sign, kind != '{');
    if (rc < 0)
        return rc;
    advance(lx, raw ? raw : i + 2 + (sign != 0));
    if (raw)
        return lex_raw(lx);
    if (kind == '#')
        return lex_comment(lx);
    if (!add_token(lx, kind == '%' ? T_BLOCK_BEGIN : T_VARIABLE_BEGIN))
        return KVG_NOMEM;
    return lex_tag(lx, kind == '{');
}

/* \r\n and \r become \n; one newline at the very end is dropped. */
static size_t normalize_newlines(const char *source, size_t len, char *out)
{
    size_t w = 0;
    for (size_t i = 0; i < len; i++) {
        out[w++] = source[i] == '\r' ? '\n' : source[i];
        if (source[i] == '\r' && i + 1 < len && source[i + 1] == '\n')
            i++;
    }
    return w && out[w - 1] == '\n' ? w - 1 : w;
}

int jinja_lex(struct kvg_arena *arena, const char *source, size_t len, struct token **out, struct kvg_error *err)
{
    char *text = kvg_arena_alloc(arena, len + 1);
    if (!text)
        return kvg_fail(err, KVG_NOMEM, "chat template: out of memory");
    for (size_t i = 0; i < len;) {
        unsigned n = kvg_utf8_len((const unsigned char *)source + i, len - i);
        if (!n || !source[i])
            return kvg_fail(err, KVG_INVALID, "chat template: invalid UTF-8 or NUL at byte %zu", i);
        i += n;
    }
    struct lexer lx = {.arena = arena, .err = err, .src = text, .line = 1, .line_starting = true};
    lx.len = normalize_newlines(source, len, text);
    text[lx.len] = '\0';
    while (lx.pos < lx.len) {
        int rc = lex_next(&lx);
        if (rc < 0)
            return rc;
    }
    if (!add_token(&lx, T_EOF))
        return KVG_NOMEM;
    *out = lx.tokens;
    return 0;
}
