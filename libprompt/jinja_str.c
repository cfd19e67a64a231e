/* Strings with the origin of their bytes. Slicing shares bytes; building goes through pieces, which are joined once. */
#define _GNU_SOURCE /* memmem */
#include "libprompt/jinja_value.h"
#include "libprompt/utf8.h"
#include <string.h>
#include <utf8proc.h>

void pieces_init(struct pieces *p)
{
    p->v = p->local;
    p->n = p->len = 0;
    p->cap = PIECES_INLINE;
}

bool pieces_add(struct render *r, struct pieces *p, const char *bytes, size_t len, uint8_t origin)
{
    if (!len)
        return true;
    if (!burn(r, 0))
        return false;
    struct piece *last = p->n ? &p->v[p->n - 1] : NULL;
    p->len += len;
    if (p->len > r->output_limit) {
        fail_limit(r, "output bytes");
        return false;
    }
    if (last && last->bytes + last->len == bytes && last->origin == origin) {
        last->len += len;
        return true;
    }
    if (p->n == p->cap) {
        struct piece *v = render_alloc(r, p->cap * 2 * sizeof *v);
        if (!v)
            return false;
        memcpy(v, p->v, p->n * sizeof *v);
        p->v = v;
        p->cap *= 2;
    }
    p->v[p->n++] = (struct piece){bytes, len, origin};
    return true;
}

bool pieces_add_range(struct render *r, struct pieces *p, const struct str *s, size_t from, size_t to)
{
    if (!s->runs)
        return pieces_add(r, p, s->bytes + from, to - from, s->origin);
    size_t at = 0;
    for (uint32_t i = 0; i < s->n_runs && at < to; at += s->runs[i++].len) {
        size_t a = at > from ? at : from, b = at + s->runs[i].len < to ? at + s->runs[i].len : to;
        if (a < b && !pieces_add(r, p, s->bytes + a, b - a, s->runs[i].origin))
            return false;
    }
    return true;
}

bool pieces_add_str(struct render *r, struct pieces *p, const struct str *s)
{
    return pieces_add_range(r, p, s, 0, s->len);
}

const struct str *str_new(struct render *r, const char *bytes, size_t len, uint8_t origin)
{
    struct str *s = render_alloc(r, sizeof *s);
    if (s)
        *s = (struct str){.bytes = bytes, .len = len, .origin = origin};
    return s;
}

const struct str *str_literal(struct render *r, const char *text)
{
    return str_new(r, text, strlen(text), KVG_TEMPLATE);
}

const struct str *pieces_str(struct render *r, const struct pieces *p)
{
    if (p->n == 0)
        return str_new(r, "", 0, KVG_TEMPLATE);
    if (p->n == 1)
        return str_new(r, p->v[0].bytes, p->v[0].len, p->v[0].origin);
    size_t n_runs = 1;
    for (size_t i = 1; i < p->n; i++)
        n_runs += p->v[i].origin != p->v[i - 1].origin;
    char *bytes = burn(r, p->len) ? render_alloc(r, p->len + 1) : NULL, *w = bytes;
    struct kvg_run *runs = bytes && n_runs > 1 ? render_alloc(r, n_runs * sizeof *runs) : NULL;
    struct str *s = bytes && (runs || n_runs == 1) ? render_alloc(r, sizeof *s) : NULL;
    if (!s)
        return NULL;
    size_t k = 0;
    for (size_t i = 0; i < p->n; i++) {
        memcpy(w, p->v[i].bytes, p->v[i].len);
        w += p->v[i].len;
        if (!runs)
            continue;
        if (i == 0 || p->v[i].origin != runs[k - 1].origin)
            runs[k++] = (struct kvg_run){.origin = p->v[i].origin};
        runs[k - 1].len += p->v[i].len;
    }
    *w = '\0';
    *s = (struct str){
        .bytes = bytes, .len = p->len, .runs = runs, .n_runs = runs ? (uint32_t)n_runs : 0, .origin = p->v[0].origin};
    return s;
}

const struct str *str_slice(struct render *r, const struct str *s, size_t from, size_t to)
{
    if (from == 0 && to == s->len)
        return s;
    struct str *out = render_alloc(r, sizeof *out);
    if (!out)
        return NULL;
    *out = (struct str){.bytes = s->bytes + from, .len = to - from, .origin = s->origin, .markup = s->markup};
    out->ascii = s->ascii == 1;
    if (!s->runs || from == to)
        return out;
    uint32_t first = 0;
    size_t at = 0;
    while (at + s->runs[first].len <= from)
        at += s->runs[first++].len;
    uint32_t n = 1;
    for (size_t end = at + s->runs[first].len; end < to; end += s->runs[first + n++].len)
        ;
    out->origin = s->runs[first].origin;
    if (n == 1)
        return out;
    struct kvg_run *runs = burn(r, n) ? render_alloc(r, n * sizeof *runs) : NULL;
    if (!runs)
        return NULL;
    memcpy(runs, s->runs + first, n * sizeof *runs);
    runs[0].len -= from - at;
    size_t total = 0;
    for (uint32_t i = 0; i < n - 1; i++)
        total += runs[i].len;
    runs[n - 1].len = to - from - total;
    out->runs = runs;
    out->n_runs = n;
    return out;
}

const struct str *str_concat(struct render *r, const struct str *a, const struct str *b)
{
    if (!a->len)
        return b;
    if (!b->len)
        return a;
    struct pieces out;
    pieces_init(&out);
    if (!pieces_add_str(r, &out, a) || !pieces_add_str(r, &out, b))
        return NULL;
    return pieces_str(r, &out);
}

uint8_t str_origin(const struct str *s)
{
    return s->runs ? KVG_INPUT : s->origin;
}

bool str_same(const struct str *a, const struct str *b)
{
    return a->len == b->len && memcmp(a->bytes, b->bytes, a->len) == 0;
}

/* ---- characters ---- */

bool str_is_ascii(struct render *r, const struct str *s)
{
    if (!s->ascii) {
        uint64_t high = 0, word;
        size_t i = 0;
        for (; i + 8 <= s->len; i += 8) {
            memcpy(&word, s->bytes + i, 8);
            high |= word;
        }
        for (; i < s->len; i++)
            high |= (unsigned char)s->bytes[i];
        r->fuel -= (int64_t)(s->len / 16);
        ((struct str *)s)->ascii = high & 0x8080808080808080u ? 2 : 1;
    }
    return s->ascii == 1;
}

size_t str_chars(struct render *r, const struct str *s)
{
    if (str_is_ascii(r, s))
        return s->len;
    size_t n = 0;
    for (size_t i = 0; i < s->len; i++)
        n += ((unsigned char)s->bytes[i] & 0xc0) != 0x80;
    r->fuel -= (int64_t)(s->len / 16);
    return n;
}

size_t str_byte_offset(struct render *r, const struct str *s, size_t chars)
{
    if (str_is_ascii(r, s))
        return chars < s->len ? chars : s->len;
    size_t i = 0;
    for (; i < s->len; i++)
        if (((unsigned char)s->bytes[i] & 0xc0) != 0x80 && chars-- == 0)
            break;
    r->fuel -= (int64_t)(i / 16);
    return i;
}

size_t str_find(struct render *r, const struct str *s, const struct str *sub, size_t from)
{
    if (from > s->len || sub->len > s->len - from)
        return SIZE_MAX;
    const char *found = memmem(s->bytes + from, s->len - from, sub->bytes, sub->len);
    r->fuel -= (int64_t)((found ? (size_t)(found - s->bytes) - from : s->len - from) / 16);
    return found ? (size_t)(found - s->bytes) : SIZE_MAX;
}

size_t str_rfind(struct render *r, const struct str *s, const struct str *sub, size_t to)
{
    if (sub->len > to)
        return SIZE_MAX;
    for (size_t i = to - sub->len + 1; i-- > 0;) {
        if (memcmp(s->bytes + i, sub->bytes, sub->len) == 0)
            return i;
        if (i % 16 == 0)
            r->fuel--;
    }
    return SIZE_MAX;
}

/* White space as str.isspace() has it. */
bool py_space(uint32_t c)
{
    if (c < 0x80)
        return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

static bool strips(const struct str *chars, const char *p, unsigned n)
{
    if (!chars)
        return py_space(kvg_utf8_decode((const unsigned char *)p, n));
    for (size_t i = 0; i + n <= chars->len; i++)
        if (memcmp(chars->bytes + i, p, n) == 0 && ((unsigned char)chars->bytes[i] & 0xc0) != 0x80)
            return true;
    return false;
}

const struct str *str_strip(struct render *r, const struct str *s, const struct str *chars, bool left, bool right)
{
    size_t from = 0, to = s->len;
    while (left && from < to) {
        unsigned n = 1;
        while (from + n < to && ((unsigned char)s->bytes[from + n] & 0xc0) == 0x80)
            n++;
        if (!strips(chars, s->bytes + from, n))
            break;
        from += n;
    }
    while (right && to > from) {
        size_t last = to - 1;
        while (last > from && ((unsigned char)s->bytes[last] & 0xc0) == 0x80)
            last--;
        if (!strips(chars, s->bytes + last, (unsigned)(to - last)))
            break;
        to = last;
    }
    size_t stripped = s->len - (to - from);
    return burn(r, stripped * (1 + (chars ? chars->len : 0))) ? str_slice(r, s, from, to) : NULL;
}

const struct str *str_replace(struct render *r, const struct str *s, const struct str *from, const struct str *to, int64_t count)
{
    struct pieces out;
    pieces_init(&out);
    size_t at = 0, n = 0;
    for (; count < 0 || n < (uint64_t)count; n++) {
        size_t found = from->len ? str_find(r, s, from, at) : at;
        if (found == SIZE_MAX || (!from->len && n && at >= s->len))
            break;
        if (!from->len && n) { /* between characters, and at both ends */
            size_t next = at + 1;
            while (next < s->len && ((unsigned char)s->bytes[next] & 0xc0) == 0x80)
                next++;
            found = next;
        }
        if (!pieces_add_range(r, &out, s, at, found) || !pieces_add_str(r, &out, to))
            return NULL;
        at = found + from->len;
    }
    if (n == 0)
        return s;
    return pieces_add_range(r, &out, s, at, s->len) ? pieces_str(r, &out) : NULL;
}

const struct str *str_repeat(struct render *r, const struct str *s, int64_t n)
{
    struct pieces out;
    if (!s)
        return NULL;
    pieces_init(&out);
    for (int64_t i = 0; i < n && s->len; i++)
        if (!pieces_add_str(r, &out, s))
            return NULL;
    return pieces_str(r, &out);
}

const struct str *str_escape(struct render *r, const struct str *s)
{
    struct pieces out;
    pieces_init(&out);
    size_t plain = 0;
    for (size_t i = 0; i < s->len; i++) {
        const char *entity = s->bytes[i] == '&'    ? "&amp;"
                             : s->bytes[i] == '<'  ? "&lt;"
                             : s->bytes[i] == '>'  ? "&gt;"
                             : s->bytes[i] == '"'  ? "&#34;"
                             : s->bytes[i] == '\'' ? "&#39;"
                                                   : NULL;
        if (!entity)
            continue;
        if (!pieces_add_range(r, &out, s, plain, i) || !pieces_add(r, &out, entity, strlen(entity), str_origin(s)))
            return NULL;
        plain = i + 1;
    }
    if (!burn(r, s->len) || !pieces_add_range(r, &out, s, plain, s->len))
        return NULL;
    struct str *escaped = (struct str *)pieces_str(r, &out);
    if (escaped)
        escaped->markup = 1;
    return escaped;
}

/* ---- case ---- */

static bool cased(uint32_t c)
{
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT;
}

static bool starts_jinja_word(uint32_t before)
{
    return py_space(before) || (before < 0x80 && strchr("-([{<", (int)before));
}

static bool ends_word(const struct str *s, size_t next)
{
    for (unsigned n; next < s->len; next += n) {
        n = kvg_utf8_len((const unsigned char *)s->bytes + next, s->len - next);
        if (!n)
            return true;
        uint32_t c = kvg_utf8_decode((const unsigned char *)s->bytes + next, n);
        if (cased(c))
            return false;
        if (c != '\'' && c != '.' && c != ':' && utf8proc_category((utf8proc_int32_t)c) != UTF8PROC_CATEGORY_MN)
            return true;
    }
    return true;
}

/* The bytes of character c in the wanted case, into out (at most 8 bytes). */
static unsigned map_char(uint32_t c, bool upper, bool title, bool final_sigma, char *out)
{
    if (upper && c == 0xdf) { /* the sharp s */
        memcpy(out, title ? "Ss" : "SS", 2);
        return 2;
    }
    if (!upper && c == 0x3a3 && final_sigma)
        return kvg_utf8_encode(0x3c2, out);
    if (!upper && c == 0x130) { /* dotted capital I */
        memcpy(out, "i\xcc\x87", 3);
        return 3;
    }
    utf8proc_int32_t mapped = title   ? utf8proc_totitle((utf8proc_int32_t)c)
                              : upper ? utf8proc_toupper((utf8proc_int32_t)c)
                                      : utf8proc_tolower((utf8proc_int32_t)c);
    return kvg_utf8_encode((uint32_t)mapped, out);
}

const struct str *str_case(struct render *r, const struct str *s, enum str_case how)
{
    char *bytes = burn(r, s->len * 8) ? render_alloc(r, s->len * 3 + 8) : NULL;
    if (!bytes)
        return NULL;
    struct pieces out;
    pieces_init(&out);
    size_t w = 0, at = 0, run_end = s->runs ? s->runs[0].len : s->len, start = 0;
    uint32_t run = 0, before = 0;
    bool word = false; /* behind a cased character */
    while (at < s->len) {
        unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + at, s->len - at);
        uint32_t c = n ? kvg_utf8_decode((const unsigned char *)s->bytes + at, n) : 0xfffd;
        n = n ? n : 1;
        bool first = how == CASE_TITLE ? !word : how == CASE_CAPITALIZE ? at == 0 : at == 0 || starts_jinja_word(before);
        bool upper = how == CASE_UPPER || (how >= CASE_TITLE && how != CASE_SWAP && first) ||
                     (how == CASE_SWAP && utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LL);
        bool title = upper && (how == CASE_TITLE || how == CASE_CAPITALIZE);
        w += map_char(c, upper, title, word && c == 0x3a3 && ends_word(s, at + n), bytes + w);
        word = cased(c);
        before = c;
        at += n;
        while (at >= run_end) {
            uint8_t origin = s->runs ? s->runs[run].origin : s->origin;
            if (!pieces_add(r, &out, bytes + start, w - start, origin))
                return NULL;
            start = w;
            if (!s->runs || ++run >= s->n_runs)
                break;
            run_end += s->runs[run].len;
        }
    }
    return pieces_str(r, &out);
}

/* ---- joining and splitting ---- */

const struct str *str_join(struct render *r, const struct str *separator, const struct seq *items, bool strict)
{
    struct pieces out;
    pieces_init(&out);
    for (size_t i = 0; i < items->n; i++) {
        if (strict && items->items[i].type != V_STR) {
            fail_value(r, "sequence item %zu: expected str instance, %s found", i, type_name(items->items[i]));
            return NULL;
        }
        if ((i && !pieces_add_str(r, &out, separator)) || !print_value(r, &out, items->items[i]))
            return NULL;
    }
    return pieces_str(r, &out);
}

struct value_list {
    struct value *v;
    size_t n, cap;
};

static bool add_part(struct render *r, struct value_list *list, const struct str *part)
{
    if (!part || !burn(r, 0))
        return false;
    if (list->n == list->cap) {
        size_t cap = list->cap ? list->cap * 2 : 8;
        struct value *v = render_alloc(r, cap * sizeof *v);
        if (!v)
            return false;
        if (list->n)
            memcpy(v, list->v, list->n * sizeof *v);
        list->v = v;
        list->cap = cap;
    }
    list->v[list->n++] = str_value(part);
    return true;
}

static struct seq *list_of(struct render *r, const struct value_list *list)
{
    struct seq *seq = render_alloc(r, sizeof *seq);
    if (seq)
        *seq = (struct seq){.items = list->v, .n = list->n};
    return seq;
}

static unsigned char_at(const struct str *s, size_t at, uint32_t *c)
{
    unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + at, s->len - at);
    *c = n ? kvg_utf8_decode((const unsigned char *)s->bytes + at, n) : 0xfffd;
    return n ? n : 1;
}

static struct seq *split_spaces(struct render *r, const struct str *s, int64_t max)
{
    struct value_list list = {0};
    size_t at = 0;
    uint32_t c;
    if (!burn(r, s->len * 4))
        return NULL;
    for (;;) {
        unsigned n;
        while (at < s->len && (n = char_at(s, at, &c)) && py_space(c))
            at += n;
        if (at >= s->len)
            break;
        size_t start = at;
        if (max >= 0 && list.n == (uint64_t)max) {
            const struct str *rest = str_slice(r, s, start, s->len);
            if (!rest || !add_part(r, &list, str_strip(r, rest, NULL, false, true)))
                return NULL;
            break;
        }
        while (at < s->len && (n = char_at(s, at, &c)) && !py_space(c))
            at += n;
        if (!add_part(r, &list, str_slice(r, s, start, at)))
            return NULL;
    }
    return list_of(r, &list);
}

static struct seq *split_from_right(struct render *r, const struct str *s, const struct str *separator, int64_t max)
{
    struct value_list list = {0};
    size_t to = s->len;
    for (size_t found; (max < 0 || list.n < (uint64_t)max) && (found = str_rfind(r, s, separator, to)) != SIZE_MAX; to = found)
        if (!add_part(r, &list, str_slice(r, s, found + separator->len, to)))
            return NULL;
    if (!add_part(r, &list, str_slice(r, s, 0, to)))
        return NULL;
    for (size_t i = 0; i < list.n / 2; i++) {
        struct value v = list.v[i];
        list.v[i] = list.v[list.n - 1 - i];
        list.v[list.n - 1 - i] = v;
    }
    return list_of(r, &list);
}

struct seq *str_split(struct render *r, const struct str *s, const struct str *separator, int64_t max, bool from_right)
{
    if (!separator) {
        if (from_right && max >= 0) {
            fail_value(r, "rsplit on white space with a limit is not supported");
            return NULL;
        }
        return split_spaces(r, s, max);
    }
    if (!separator->len) {
        fail_value(r, "empty separator");
        return NULL;
    }
    if (from_right)
        return split_from_right(r, s, separator, max);
    struct value_list list = {0};
    size_t at = 0;
    for (size_t found; (max < 0 || list.n < (uint64_t)max) && (found = str_find(r, s, separator, at)) != SIZE_MAX;
         at = found + separator->len)
        if (!add_part(r, &list, str_slice(r, s, at, found)))
            return NULL;
    return add_part(r, &list, str_slice(r, s, at, s->len)) ? list_of(r, &list) : NULL;
}

static bool line_break(uint32_t c)
{
    return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

struct seq *str_splitlines(struct render *r, const struct str *s, bool keep_ends)
{
    struct value_list list = {0};
    size_t at = 0, start = 0;
    if (!burn(r, s->len * 4))
        return NULL;
    while (at < s->len) {
        uint32_t c;
        unsigned n = char_at(s, at, &c);
        if (!line_break(c)) {
            at += n;
            continue;
        }
        size_t end = at;
        at += n + (c == '\r' && at + 1 < s->len && s->bytes[at + 1] == '\n');
        if (!add_part(r, &list, str_slice(r, s, start, keep_ends ? at : end)))
            return NULL;
        start = at;
    }
    if (start < s->len && !add_part(r, &list, str_slice(r, s, start, s->len)))
        return NULL;
    return list_of(r, &list);
}
