/* Ids -> text, a token at a time: bytes are held back until they form whole characters. */
#include "libprompt/tokenizer.h"
#include "libprompt/utf8.h"

#include <string.h>

/* How many of p[0..n) could still be the beginning of a character: the longest proper prefix of a well-formed sequence. */
static unsigned incomplete_prefix(const unsigned char *p, size_t n)
{
    unsigned char low = 0x80, high = 0xbf;
    unsigned need, have;

    if (n == 0 || p[0] < 0xc2 || p[0] > 0xf4)
        return 0;
    need = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0)
        low = 0xa0;
    else if (p[0] == 0xed)
        high = 0x9f;
    else if (p[0] == 0xf0)
        low = 0x90;
    else if (p[0] == 0xf4)
        high = 0x8f;
    for (have = 1; have < need && have < n; have++) {
        if (p[have] < low || p[have] > high)
            break;
        low = 0x80, high = 0xbf;
    }
    return have;
}

/* Moves whole characters of p[0..n) to out, broken sequences as U+FFFD; stops before a tail that may still be completed.
 * Returns the bytes written; *used are consumed. */
static size_t copy_characters(const unsigned char *p, size_t n, char *out, size_t *used)
{
    size_t at = 0, written = 0;

    while (at < n) {
        unsigned len = kvg_utf8_len(p + at, n - at);
        if (len) {
            memcpy(out + written, p + at, len);
            written += len;
            at += len;
            continue;
        }
        len = incomplete_prefix(p + at, n - at);
        if (len && at + len == n)
            break;
        memcpy(out + written, "\xef\xbf\xbd", 3);
        written += 3;
        at += len ? len : 1;
    }
    *used = at;
    return written;
}

size_t kvg_detokenize_step(struct kvg_detokenizer *state, uint32_t id, char *buf)
{
    struct kvg_str bytes = kvg_token_bytes(state->tokenizer, id, false);
    unsigned char joined[8];
    size_t used, written = 0;

    if (bytes.len == 0)
        return 0;
    if (!state->started && !state->keep_leading_space && kvg_tokenizer_drops_first_space(state->tokenizer) &&
        bytes.bytes[0] == ' ') {
        bytes.bytes++;
        bytes.len--;
    }
    state->started = true;
    while (state->n_held && bytes.len) { /* complete the held character byte by byte: at most three more */
        memcpy(joined, state->held, state->n_held);
        joined[state->n_held] = (unsigned char)*bytes.bytes;
        written += copy_characters(joined, state->n_held + 1u, buf + written, &used);
        state->n_held = (uint8_t)(state->n_held + 1 - used);
        memcpy(state->held, joined + used, state->n_held);
        bytes.bytes++;
        bytes.len--;
    }
    written += copy_characters((const unsigned char *)bytes.bytes, bytes.len, buf + written, &used);
    if (bytes.len > used) {
        state->n_held = (uint8_t)(bytes.len - used);
        memcpy(state->held, bytes.bytes + used, state->n_held);
    }
    return written;
}

size_t kvg_detokenize_end(struct kvg_detokenizer *state, char *buf)
{
    if (!state->n_held)
        return 0;
    state->n_held = 0;
    memcpy(buf, "\xef\xbf\xbd", 3);
    return 3;
}
