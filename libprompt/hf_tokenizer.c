/* tokenizer.json -> tokenizer.ggml.*. The parts of the pipeline (normalizer, pre-tokenizer, post-processor) are recognized by
 * their text; one that is not known is refused, since ids would be wrong. */
#include "libprompt/hf_folder.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_IDS = 1 << 20, KIND_NORMAL = 1, KIND_CONTROL = 3, KIND_USER_DEFINED = 4, KIND_UNUSED = 5, KIND_BYTE = 6 };

#define LLAMA3_SPLIT                                                                                                             \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"       \
    "\\s+(?!\\S)|\\s+"
#define QWEN2_SPLIT                                                                                                              \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"            \
    "\\s+(?!\\S)|\\s+"
#define QWEN35_SPLIT                                                                                                             \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"            \
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Byte-level pre-tokenizers as `describe` writes them, and their name in GGUF files. */
static const struct {
    const char *pipeline, *name;
} PIPELINES[] = {
    {"bytes+regex", "gpt-2"},
    {"digits,bytes+regex", "smollm"},
    {"split " LLAMA3_SPLIT ",bytes", "llama-bpe"},
    {"split " QWEN2_SPLIT ",bytes", "qwen2"},
    {"split " QWEN35_SPLIT ",bytes", "qwen35"},
};

struct reader {
    struct kvg_gguf_writer *writer;
    struct kvg_arena *arena;
    const struct kvg_json *root, *model, *settings, *generation;
    struct kvg_error *err;
    struct kvg_str *texts; /* [n] */
    int32_t *kinds;        /* [n] */
    uint32_t n;
    bool byte_fallback;
};

static bool json_is(const struct kvg_json *value, const char *text)
{
    return value && value->type == KVG_JSON_STRING && kvg_str_eq(value->str, text);
}

static bool json_true(const struct kvg_json *object, const char *key)
{
    const struct kvg_json *value = kvg_json_get(object, key);

    return value && value->type == KVG_JSON_TRUE;
}

static bool absent(const struct kvg_json *value)
{
    return !value || value->type == KVG_JSON_NULL;
}

/* The text of a string, or "?"; for messages. */
static struct kvg_str text_of(const struct kvg_json *value)
{
    return value && value->type == KVG_JSON_STRING ? value->str : (struct kvg_str){"?", 1};
}

static int unknown(struct reader *r, const char *part, const struct kvg_json *what)
{
    struct kvg_str type = text_of(kvg_json_get(what, "type"));

    return kvg_fail(r->err, KVG_UNSUPPORTED,
                    "tokenizer.json: the %s of type %.*s with these settings is not known, ids would be wrong", part,
                    (int)(type.len < 60 ? type.len : 60), type.bytes);
}

/* ---- vocabulary ---- */

/* The id of an entry of model.vocab or added_tokens, bounded. */
static int read_id(struct reader *r, const struct kvg_json *value, struct kvg_str text, int64_t *id)
{
    if (!value || !kvg_json_int(value, id) || *id < 0 || *id >= MAX_IDS)
        return kvg_fail(r->err, KVG_FILE, "tokenizer.json: the id of token \"%.*s\" is no number below %d",
                        (int)(text.len < 60 ? text.len : 60), text.bytes, MAX_IDS);
    return 0;
}

static bool is_byte_token(struct kvg_str s)
{
    return s.len == 6 && memcmp(s.bytes, "<0x", 3) == 0 && s.bytes[5] == '>';
}

static int count_ids(struct reader *r, const struct kvg_json *vocab, const struct kvg_json *added)
{
    int64_t id;

    for (uint32_t i = 0; i < vocab->n; i++) {
        if (read_id(r, &vocab->items[i], vocab->items[i].key, &id))
            return KVG_FILE;
        r->n = r->n > id ? r->n : (uint32_t)id + 1;
    }
    for (uint32_t i = 0; added && i < added->n; i++) {
        if (read_id(r, kvg_json_get(&added->items[i], "id"), text_of(kvg_json_get(&added->items[i], "content")), &id))
            return KVG_FILE;
        r->n = r->n > id ? r->n : (uint32_t)id + 1;
    }
    return 0;
}

static int add_special(struct reader *r, const struct kvg_json *token)
{
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    const struct kvg_json *content = kvg_json_get(token, "content");
    struct kvg_str text = text_of(content);
    int64_t id = 0;

    if (!content || content->type != KVG_JSON_STRING || text.len == 0)
        return kvg_fail(r->err, KVG_FILE, "tokenizer.json: an added token has no content");
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (json_true(token, flags[i]))
            return kvg_fail(r->err, KVG_UNSUPPORTED, "tokenizer.json: the added token \"%.*s\" has %s, which is not supported",
                            (int)(text.len < 60 ? text.len : 60), text.bytes, flags[i]);
    }
    kvg_json_int(kvg_json_get(token, "id"), &id);
    if (r->texts[id].bytes && (r->texts[id].len != text.len || memcmp(r->texts[id].bytes, text.bytes, text.len) != 0))
        return kvg_fail(r->err, KVG_FILE,
                        "tokenizer.json: id %" PRId64 " is \"%.*s\" in the vocabulary and \"%.*s\" in added_tokens", id,
                        (int)(r->texts[id].len < 60 ? r->texts[id].len : 60), r->texts[id].bytes,
                        (int)(text.len < 60 ? text.len : 60), text.bytes);
    r->texts[id] = text;
    r->kinds[id] = json_true(token, "special") ? KIND_CONTROL : KIND_USER_DEFINED;
    return 0;
}

/* Ids that no token has become unused ones, so that the table has no holes. */
static int fill_holes(struct reader *r)
{
    for (uint32_t id = 0; id < r->n; id++) {
        char *name;
        if (r->texts[id].bytes)
            continue;
        if (!(name = kvg_arena_alloc(r->arena, 24)))
            return kvg_fail(r->err, KVG_NOMEM, "out of memory for %u tokens", r->n);
        r->texts[id] = (struct kvg_str){name, (size_t)snprintf(name, 24, "[PAD%u]", id)};
        r->kinds[id] = KIND_UNUSED;
    }
    return 0;
}

static int write_vocabulary(struct reader *r)
{
    const struct kvg_json *vocab = kvg_json_get(r->model, "vocab"), *added = kvg_json_get(r->root, "added_tokens");
    int64_t id = 0;
    int rc;

    if (!vocab || vocab->type != KVG_JSON_OBJECT || vocab->n == 0)
        return kvg_fail(r->err, KVG_FILE, "tokenizer.json: model.vocab is missing, empty or no object");
    if (added && added->type != KVG_JSON_ARRAY)
        return kvg_fail(r->err, KVG_FILE, "tokenizer.json: added_tokens is no array");
    if ((rc = count_ids(r, vocab, added)))
        return rc;
    r->texts = kvg_arena_zalloc(r->arena, r->n * sizeof *r->texts);
    r->kinds = kvg_arena_zalloc(r->arena, r->n * sizeof *r->kinds);
    if (!r->texts || !r->kinds)
        return kvg_fail(r->err, KVG_NOMEM, "out of memory for %u tokens", r->n);
    for (uint32_t i = 0; i < vocab->n; i++) {
        kvg_json_int(&vocab->items[i], &id);
        if (r->texts[id].bytes)
            return kvg_fail(r->err, KVG_FILE, "tokenizer.json: id %" PRId64 " occurs twice in model.vocab", id);
        r->texts[id] = vocab->items[i].key;
        r->kinds[id] = r->byte_fallback && is_byte_token(vocab->items[i].key) ? KIND_BYTE : KIND_NORMAL;
    }
    for (uint32_t i = 0; added && i < added->n; i++) {
        if ((rc = add_special(r, &added->items[i])))
            return rc;
    }
    if ((rc = fill_holes(r)))
        return rc;
    kvg_gguf_write_strs(r->writer, "tokenizer.ggml.tokens", r->texts, r->n);
    kvg_gguf_write_i32s(r->writer, "tokenizer.ggml.token_type", r->kinds, r->n);
    return 0;
}

/* Entries are "LEFT RIGHT", or pairs. */
static int write_merges(struct reader *r)
{
    const struct kvg_json *merges = kvg_json_get(r->model, "merges");
    struct kvg_str *lines;

    if (!merges || merges->type != KVG_JSON_ARRAY)
        return kvg_fail(r->err, KVG_FILE, "tokenizer.json: model.merges is missing or no array");
    if (!(lines = kvg_arena_alloc(r->arena, (merges->n + 1) * sizeof *lines)))
        return kvg_fail(r->err, KVG_NOMEM, "out of memory for %u merges", merges->n);
    for (uint32_t i = 0; i < merges->n; i++) {
        const struct kvg_json *entry = &merges->items[i];
        struct kvg_str left, right;
        char *line;
        if (entry->type == KVG_JSON_STRING) {
            lines[i] = entry->str;
            continue;
        }
        if (entry->type != KVG_JSON_ARRAY || entry->n != 2 || entry->items[0].type != KVG_JSON_STRING ||
            entry->items[1].type != KVG_JSON_STRING)
            return kvg_fail(r->err, KVG_FILE, "tokenizer.json: model.merges[%u] is no pair of strings", i);
        left = entry->items[0].str, right = entry->items[1].str;
        if (!(line = kvg_arena_alloc(r->arena, left.len + right.len + 1)))
            return kvg_fail(r->err, KVG_NOMEM, "out of memory for %u merges", merges->n);
        memcpy(line, left.bytes, left.len);
        line[left.len] = ' ';
        memcpy(line + left.len + 1, right.bytes, right.len);
        lines[i] = (struct kvg_str){line, left.len + right.len + 1};
    }
    kvg_gguf_write_strs(r->writer, "tokenizer.ggml.merges", lines, merges->n);
    return 0;
}

/* ---- the pipeline ---- */

/* Calls a step for the parts of a Sequence, or for the one part; key: of the Sequence's list. */
static uint32_t parts_of(const struct kvg_json *value, const char *key, const struct kvg_json **parts)
{
    const struct kvg_json *list = kvg_json_get(value, key);

    if (absent(value))
        return 0;
    if (!json_is(kvg_json_get(value, "type"), "Sequence") || !list || list->type != KVG_JSON_ARRAY) {
        *parts = value;
        return 1;
    }
    *parts = list->items;
    return list->n;
}

/* "split REGEX,bytes": what a byte-level pre-tokenizer does, as PIPELINES has it. */
static int describe(struct reader *r, const struct kvg_json *part, struct kvg_buf *out)
{
    const struct kvg_json *type = kvg_json_get(part, "type"), *pattern = kvg_json_get(kvg_json_get(part, "pattern"), "Regex");
    const struct kvg_json *use_regex = kvg_json_get(part, "use_regex");

    if (out->len)
        kvg_buf_puts(out, ",");
    if (json_is(type, "ByteLevel") && !json_true(part, "add_prefix_space")) {
        kvg_buf_puts(out, !use_regex || use_regex->type == KVG_JSON_TRUE ? "bytes+regex" : "bytes");
        return 0;
    }
    if (json_is(type, "Digits") && json_true(part, "individual_digits")) {
        kvg_buf_puts(out, "digits");
        return 0;
    }
    if (json_is(type, "Split") && pattern && pattern->type == KVG_JSON_STRING && !json_true(part, "invert") &&
        json_is(kvg_json_get(part, "behavior"), "Isolated")) {
        kvg_buf_puts(out, "split ");
        kvg_buf_add(out, pattern->str.bytes, pattern->str.len);
        return 0;
    }
    return unknown(r, "pre-tokenizer", part);
}

static int write_byte_level(struct reader *r)
{
    const struct kvg_json *normalizer = kvg_json_get(r->root, "normalizer"), *parts = NULL;
    uint32_t n = parts_of(kvg_json_get(r->root, "pre_tokenizer"), "pretokenizers", &parts);
    struct kvg_buf text = {0};
    int rc = 0;

    for (uint32_t i = 0; i < n && !rc; i++)
        rc = describe(r, &parts[i], &text);
    kvg_buf_add(&text, "", 1);
    if (!rc && text.failed)
        rc = kvg_fail(r->err, KVG_NOMEM, "out of memory");
    const char *name = NULL;
    for (size_t i = 0; !rc && i < sizeof PIPELINES / sizeof *PIPELINES; i++) {
        if (strcmp(PIPELINES[i].pipeline, text.bytes) == 0)
            name = PIPELINES[i].name;
    }
    if (!rc && !name)
        rc = kvg_fail(r->err, KVG_UNSUPPORTED, "tokenizer.json: the pre-tokenizer \"%.200s\" is not known, ids would be wrong",
                      text.bytes);
    kvg_buf_free(&text);
    if (rc)
        return rc;
    n = parts_of(normalizer, "normalizers", &parts);
    if (n > 1 || (n == 1 && !json_is(kvg_json_get(parts, "type"), "NFC")))
        return unknown(r, "normalizer", normalizer);
    kvg_gguf_write_str(r->writer, "tokenizer.ggml.model", (struct kvg_str){"gpt2", 4});
    kvg_gguf_write_str(r->writer, "tokenizer.ggml.pre", (struct kvg_str){name, strlen(name)});
    kvg_gguf_write_bool(r->writer, "kvgate.nfc", n == 1);
    kvg_gguf_write_bool(r->writer, "kvgate.ignore_merges", json_true(r->model, "ignore_merges"));
    return 0;
}

/* Replace " " by "▁", as normalizer. */
static bool is_space_mark(const struct kvg_json *part)
{
    return json_is(kvg_json_get(part, "type"), "Replace") &&
           json_is(kvg_json_get(kvg_json_get(part, "pattern"), "String"), " ") &&
           json_is(kvg_json_get(part, "content"), "\xe2\x96\x81");
}

/* Sets whether a space is put in front of the text: of every segment (PREPEND), or by Metaspace's rule. */
static int read_normalizer(struct reader *r, bool *prefix, bool *marked)
{
    const struct kvg_json *normalizer = kvg_json_get(r->root, "normalizer"), *parts = NULL;
    uint32_t n = parts_of(normalizer, "normalizers", &parts);

    for (uint32_t i = 0; i < n; i++) {
        if (json_is(kvg_json_get(&parts[i], "type"), "Prepend") && json_is(kvg_json_get(&parts[i], "prepend"), "\xe2\x96\x81") &&
            !*marked)
            *prefix = true;
        else if (is_space_mark(&parts[i]))
            *marked = true;
        else
            return unknown(r, "normalizer", &parts[i]);
    }
    return 0;
}

static int write_sentence_piece(struct reader *r)
{
    const struct kvg_json *pre = kvg_json_get(r->root, "pre_tokenizer"), *scheme = kvg_json_get(pre, "prepend_scheme");
    const struct kvg_json *split = kvg_json_get(pre, "split");
    bool prefix = false, marked = false, metaspace = json_is(kvg_json_get(pre, "type"), "Metaspace"), first = false;
    int rc = read_normalizer(r, &prefix, &marked);

    if (rc)
        return rc;
    if (metaspace) {
        first = json_is(scheme, "first");
        if (prefix || marked || !json_is(kvg_json_get(pre, "replacement"), "\xe2\x96\x81") || !split ||
            split->type != KVG_JSON_FALSE)
            return unknown(r, "pre-tokenizer", pre);
        prefix = !json_is(scheme, "never");
    } else if (!marked || (!absent(pre) && !(json_is(kvg_json_get(pre, "type"), "Split") &&
                                             json_is(kvg_json_get(kvg_json_get(pre, "pattern"), "String"), " ")))) {
        return unknown(r, "pre-tokenizer", pre); /* a Split at spaces cuts nothing: all are marks by then */
    }
    kvg_gguf_write_str(r->writer, "tokenizer.ggml.model", (struct kvg_str){"bpe-fallback", 12});
    kvg_gguf_write_bool(r->writer, "tokenizer.ggml.add_space_prefix", prefix);
    kvg_gguf_write_bool(r->writer, "kvgate.space_prefix_once", metaspace);
    kvg_gguf_write_bool(r->writer, "kvgate.space_prefix_first", first);
    return 0;
}

/* ---- special tokens ---- */

static bool find_text(const struct reader *r, struct kvg_str text, uint32_t *id)
{
    for (uint32_t i = 0; i < r->n; i++) {
        if (r->texts[i].len == text.len && memcmp(r->texts[i].bytes, text.bytes, text.len) == 0) {
            *id = i;
            return true;
        }
    }
    return false;
}

/* A token of tokenizer_config.json: its text, or an object with it. */
static bool settings_token(const struct reader *r, const char *key, uint32_t *id)
{
    const struct kvg_json *value = kvg_json_get(r->settings, key);

    if (value && value->type == KVG_JSON_OBJECT)
        value = kvg_json_get(value, "content");
    return value && value->type == KVG_JSON_STRING && find_text(r, value->str, id);
}

/* The special token that a TemplateProcessing puts first (or last) around a single text. */
static bool template_token(const struct reader *r, const struct kvg_json *post, bool last, uint32_t *id)
{
    const struct kvg_json *single = kvg_json_get(post, "single"), *entry;

    if (!single || single->type != KVG_JSON_ARRAY || single->n < 2)
        return false;
    entry = kvg_json_get(&single->items[last ? single->n - 1 : 0], "SpecialToken");
    entry = kvg_json_get(entry, "id");
    return entry && entry->type == KVG_JSON_STRING && find_text(r, entry->str, id);
}

static void write_ends(struct reader *r)
{
    const struct kvg_json *list = kvg_json_get(r->generation, "eos_token_id");
    int32_t ids[16];
    size_t n = 0;
    int64_t id;

    for (uint32_t i = 0; list && list->type == KVG_JSON_ARRAY && i < list->n && n < sizeof ids / sizeof *ids; i++) {
        if (kvg_json_int(&list->items[i], &id) && id >= 0 && id < r->n)
            ids[n++] = (int32_t)id;
    }
    if (list && kvg_json_int(list, &id) && id >= 0 && id < r->n)
        ids[n++] = (int32_t)id;
    if (n)
        kvg_gguf_write_i32s(r->writer, "kvgate.end_token_ids", ids, n);
}

/* What is put around a text by itself is the post-processor's say, as in the reference. */
static void write_specials(struct reader *r)
{
    const struct kvg_json *parts = NULL, *unk = kvg_json_get(r->model, "unk_token");
    uint32_t n = parts_of(kvg_json_get(r->root, "post_processor"), "processors", &parts), bos = 0, eos = 0, id;
    bool has_bos = settings_token(r, "bos_token", &bos), has_eos = settings_token(r, "eos_token", &eos);
    bool add_bos = false, add_eos = false;

    for (uint32_t i = 0; i < n; i++) {
        if (!json_is(kvg_json_get(&parts[i], "type"), "TemplateProcessing"))
            continue;
        add_bos = template_token(r, &parts[i], false, &id) && (!has_bos || id == bos);
        bos = add_bos ? id : bos;
        has_bos = has_bos || add_bos;
        add_eos = template_token(r, &parts[i], true, &id) && has_eos && id == eos;
    }
    if (has_bos)
        kvg_gguf_write_u32(r->writer, "tokenizer.ggml.bos_token_id", bos);
    if (has_eos)
        kvg_gguf_write_u32(r->writer, "tokenizer.ggml.eos_token_id", eos);
    if (unk && unk->type == KVG_JSON_STRING && find_text(r, unk->str, &id))
        kvg_gguf_write_u32(r->writer, "tokenizer.ggml.unknown_token_id", id);
    kvg_gguf_write_bool(r->writer, "tokenizer.ggml.add_bos_token", add_bos);
    kvg_gguf_write_bool(r->writer, "tokenizer.ggml.add_eos_token", add_eos);
    write_ends(r);
}

int kvg_folder_tokenizer(struct kvg_gguf_writer *writer, struct kvg_arena *arena, const struct kvg_json *tokenizer,
                         const struct kvg_json *settings, const struct kvg_json *generation, struct kvg_error *err)
{
    struct reader r = {writer, arena, tokenizer, kvg_json_get(tokenizer, "model"), settings, generation, err};
    const struct kvg_json *type = kvg_json_get(r.model, "type");
    int rc;

    if (type && !json_is(type, "BPE"))
        return unknown(&r, "model", r.model);
    r.byte_fallback = json_true(r.model, "byte_fallback");
    if ((rc = r.byte_fallback ? write_sentence_piece(&r) : write_byte_level(&r)) || (rc = write_vocabulary(&r)) ||
        (rc = write_merges(&r)))
        return rc;
    write_specials(&r);
    return 0;
}
