#include "libprompt/hf_folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_JSON_BYTES = 256 << 20, MAX_JSON_VALUES = 32 << 20 };
#define TEMPLATE_KEY "tokenizer.chat_template"

struct folder {
    const char *path;
    struct kvg_arena arena; /* texts and trees of all files */
};

/* The file's bytes in the arena; absent: KVG_OK with out->bytes NULL. */
static int read_file(struct folder *folder, const char *name, struct kvg_str *out, struct kvg_error *err)
{
    char path[4096];
    struct stat st;
    char *bytes = NULL;
    FILE *f;

    *out = (struct kvg_str){0};
    if (snprintf(path, sizeof path, "%s/%s", folder->path, name) >= (int)sizeof path)
        return kvg_fail(err, KVG_FILE, "the folder's path has %zu bytes", strlen(folder->path));
    f = fopen(path, "rbe");
    if (!f)
        return errno == ENOENT ? 0 : kvg_fail(err, KVG_FILE, "cannot open %.200s: %s", path, strerror(errno));
    if (fstat(fileno(f), &st) || !S_ISREG(st.st_mode) || st.st_size > MAX_JSON_BYTES) {
        fclose(f);
        return kvg_fail(err, KVG_FILE, "%.200s is no regular file of at most %d bytes", path, MAX_JSON_BYTES);
    }
    bytes = kvg_arena_alloc(&folder->arena, (size_t)st.st_size + 1);
    if (bytes)
        *out = (struct kvg_str){bytes, fread(bytes, 1, (size_t)st.st_size, f)};
    fclose(f);
    if (!bytes)
        return kvg_fail(err, KVG_NOMEM, "out of memory for %.200s", path);
    return 0;
}

/* Absent: *out = NULL, an error only when the file is required. *source: the text, where wanted. */
static int read_json(struct folder *folder, const char *name, bool required, struct kvg_json **out, const char **source,
                     struct kvg_error *err)
{
    struct kvg_json_limits limits = {.depth = 64, .values = MAX_JSON_VALUES};
    struct kvg_error why = {0};
    struct kvg_str text;
    int rc = read_file(folder, name, &text, err);

    *out = NULL;
    if (rc)
        return rc;
    if (!text.bytes)
        return required ? kvg_fail(err, KVG_FILE, "%.200s has no %s", folder->path, name) : 0;
    rc = kvg_json_parse(&folder->arena, text.bytes, text.len, &limits, out, &why);
    if (rc)
        return kvg_fail(err, rc == KVG_NOMEM ? rc : KVG_FILE, "%.150s/%s: %.150s", folder->path, name, why.message);
    if (source)
        *source = text.bytes;
    if ((*out)->type != KVG_JSON_OBJECT)
        return kvg_fail(err, KVG_FILE, "%.200s/%s is no JSON object", folder->path, name);
    return 0;
}

/* chat_template.jinja, else tokenizer_config.json's chat_template: a string, or a list from which "default" is taken. */
static int write_template(struct kvg_gguf_writer *writer, struct folder *folder, const struct kvg_json *settings,
                          struct kvg_error *err)
{
    const struct kvg_json *value = kvg_json_get(settings, "chat_template");
    struct kvg_str text;
    int rc = read_file(folder, "chat_template.jinja", &text, err);

    if (rc)
        return rc;
    if (text.bytes) {
        kvg_gguf_write_str(writer, TEMPLATE_KEY, text);
        return 0;
    }
    for (uint32_t i = 0; value && value->type == KVG_JSON_ARRAY && i < value->n; i++) {
        const struct kvg_json *name = kvg_json_get(&value->items[i], "name");
        if (name && name->type == KVG_JSON_STRING && kvg_str_eq(name->str, "default")) {
            value = kvg_json_get(&value->items[i], "template");
            break;
        }
    }
    if (value && value->type == KVG_JSON_STRING)
        kvg_gguf_write_str(writer, TEMPLATE_KEY, value->str);
    return 0;
}

static int write_all(struct kvg_gguf_writer *writer, struct folder *folder, struct kvg_error *err)
{
    struct kvg_json *config, *tokenizer, *settings, *generation;
    const char *text = NULL;
    int rc;

    if ((rc = read_json(folder, "config.json", true, &config, &text, err)) ||
        (rc = read_json(folder, "tokenizer.json", true, &tokenizer, NULL, err)) ||
        (rc = read_json(folder, "tokenizer_config.json", false, &settings, NULL, err)) ||
        (rc = read_json(folder, "generation_config.json", false, &generation, NULL, err)) ||
        (rc = kvg_folder_config(writer, config, text, err)) ||
        (rc = kvg_folder_tokenizer(writer, &folder->arena, tokenizer, settings, generation, err)))
        return rc;
    return write_template(writer, folder, settings, err);
}

int kvg_folder_metadata(struct kvg_buf *out, const char *path, struct kvg_error *err)
{
    struct folder folder = {.path = path};
    struct kvg_gguf_writer writer;
    int rc;

    kvg_arena_init(&folder.arena, 0);
    kvg_gguf_write_begin(&writer);
    rc = write_all(&writer, &folder, err);
    kvg_gguf_write_end(&writer);
    if (!rc && writer.buf.failed)
        rc = kvg_fail(err, KVG_NOMEM, "out of memory for the metadata of %.200s", path);
    kvg_arena_free(&folder.arena);
    if (rc)
        kvg_buf_free(&writer.buf);
    else
        *out = writer.buf;
    return rc;
}
