/* Added tokens (CONTROL and USER_DEFINED) in a trie over bytes: the leftmost match, the longest at that place. */
#include "libprompt/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

static uint32_t add_node(struct kvg_added *added, uint8_t byte)
{
    if (added->n_nodes == added->cap) {
        uint32_t cap = added->cap ? added->cap * 2 : 256;
        struct kvg_added_node *nodes = realloc(added->nodes, cap * sizeof *nodes);
        if (!nodes)
            return 0;
        added->nodes = nodes;
        added->cap = cap;
    }
    added->nodes[added->n_nodes] = (struct kvg_added_node){.id = KVG_NO_TOKEN, .byte = byte};
    return added->n_nodes++;
}

static uint32_t find_child(const struct kvg_added *added, uint32_t node, uint8_t byte)
{
    uint32_t child = added->nodes[node].child;

    while (child && added->nodes[child].byte != byte)
        child = added->nodes[child].sibling;
    return child;
}

static int insert(struct kvg_added *added, struct kvg_str text, uint32_t id)
{
    uint32_t node = 0;

    for (size_t i = 0; i < text.len; i++) {
        uint32_t child = find_child(added, node, (uint8_t)text.bytes[i]);
        if (!child) {
            child = add_node(added, (uint8_t)text.bytes[i]);
            if (!child)
                return KVG_NOMEM;
            added->nodes[child].sibling = added->nodes[node].child;
            added->nodes[node].child = child;
        }
        node = child;
    }
    if (added->nodes[node].id == KVG_NO_TOKEN)
        added->nodes[node].id = id;
    return 0;
}

static void index_first_bytes(struct kvg_added *added)
{
    added->only_first = -1;
    for (uint32_t child = added->nodes[0].child; child; child = added->nodes[child].sibling) {
        added->first[added->nodes[child].byte] = child;
        added->only_first = added->nodes[child].byte;
    }
    if (added->nodes[0].child && added->nodes[added->nodes[0].child].sibling)
        added->only_first = -1;
}

/* rstrip_all: every CONTROL token but the three that Phi-3's tokenizer excepts takes the white space behind it. */
static int set_strip(struct kvg_added *added, const struct kvg_vocab *vocab)
{
    static const char *const except[] = {"<unk>", "<s>", "<|endoftext|>"};

    added->strip = calloc(vocab->n, 1);
    if (!added->strip)
        return KVG_NOMEM;
    for (uint32_t id = 0; id < vocab->n; id++) {
        if (vocab->kinds[id] == KVG_TOKEN_CONTROL || vocab->kinds[id] == KVG_TOKEN_USER_DEFINED)
            added->strip[id] = KVG_RSTRIP;
        for (size_t i = 0; i < sizeof except / sizeof *except; i++) {
            if (kvg_str_eq(vocab->texts[id], except[i]))
                added->strip[id] = 0;
        }
    }
    return 0;
}

int kvg_added_build(struct kvg_added *added, const struct kvg_vocab *vocab, bool rstrip_all, struct kvg_error *err)
{
    add_node(added, 0);
    if (!added->nodes)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for added tokens");
    for (uint32_t id = 0; id < vocab->n; id++) {
        if ((vocab->kinds[id] == KVG_TOKEN_CONTROL || vocab->kinds[id] == KVG_TOKEN_USER_DEFINED) && vocab->texts[id].len &&
            insert(added, vocab->texts[id], id))
            return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for added tokens");
    }
    index_first_bytes(added);
    if (rstrip_all && set_strip(added, vocab))
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for added tokens");
    return 0;
}

void kvg_added_free(struct kvg_added *added)
{
    free(added->nodes);
    free(added->strip);
}

/* Where the run of TEMPLATE bytes that holds `at` ends; `at` itself when that byte is INPUT. Positions only grow. */
static size_t template_until(struct kvg_run_cursor *cursor, size_t at)
{
    const struct kvg_text *text = cursor->text;

    while (cursor->run < text->n_runs && cursor->run_start + text->runs[cursor->run].len <= at)
        cursor->run_start += text->runs[cursor->run++].len;
    if (cursor->run == text->n_runs || text->runs[cursor->run].origin != KVG_TEMPLATE)
        return at;
    return cursor->run_start + text->runs[cursor->run].len;
}

/* The longest token at `at`, or KVG_NO_TOKEN; *end is behind it. */
static uint32_t match_at(const struct kvg_tokenizer *tokenizer, struct kvg_run_cursor *cursor, size_t at, size_t *end)
{
    const struct kvg_added *added = &tokenizer->added;
    const struct kvg_text *text = cursor->text;
    uint32_t node = added->first[(uint8_t)text->bytes[at]], best = KVG_NO_TOKEN;
    size_t i = at, trusted = node ? template_until(cursor, at) : at;

    while (node) {
        uint32_t id = added->nodes[node].id;
        i++;
        if (id != KVG_NO_TOKEN && (i <= trusted || tokenizer->vocab.kinds[id] != KVG_TOKEN_CONTROL)) {
            best = id;
            *end = i;
        }
        node = i < text->len ? find_child(added, node, (uint8_t)text->bytes[i]) : 0;
    }
    return best;
}

static size_t skip_space(const struct kvg_tokenizer *tokenizer, const struct kvg_text *text, size_t at)
{
    const uint8_t *p = (const uint8_t *)text->bytes + at, *end = (const uint8_t *)text->bytes + text->len;
    unsigned len;

    while (p < end && (tokenizer->classes[kvg_decode(p, end, &len)] & KVG_SPACE))
        p += len;
    return (size_t)(p - (const uint8_t *)text->bytes);
}

struct kvg_added_match kvg_added_next(const struct kvg_tokenizer *tokenizer, struct kvg_run_cursor *cursor, size_t from)
{
    const struct kvg_added *added = &tokenizer->added;
    const struct kvg_text *text = cursor->text;
    struct kvg_added_match match = {text->len, text->len, KVG_NO_TOKEN};

    for (size_t at = from; at < text->len; at++) {
        if (added->only_first >= 0) {
            const char *found = memchr(text->bytes + at, added->only_first, text->len - at);
            if (!found)
                break;
            at = (size_t)(found - text->bytes);
        } else if (!added->first[(uint8_t)text->bytes[at]]) {
            continue;
        }
        match.id = match_at(tokenizer, cursor, at, &match.end);
        if (match.id == KVG_NO_TOKEN)
            continue;
        match.start = at;
        if (added->strip && (added->strip[match.id] & KVG_RSTRIP))
            match.end = skip_space(tokenizer, text, match.end);
        return match;
    }
    return (struct kvg_added_match){text->len, text->len, KVG_NO_TOKEN};
}
