#include "gpu-worker/tools/hf_files.h"
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "libprompt/hf_folder.h"
#include "libprompt/json.h"

enum { COPY_BYTES = 1 << 20, MOST_CONFIG = 1 << 20 };

/* Whether it is a config.json of a model that kvgate knows and whose weights are not integers yet. Of another family only some
 * matrices would be known by their names, and the folder would say that all are quantized. */
static int check_config(const char *in, const struct kvg_json *config, const char *text, struct kvg_error *err)
{
    struct kvg_gguf_writer metadata;
    struct kvg_error why = {0};
    if (config->type != KVG_JSON_OBJECT)
        return kvg_fail(err, KVG_FILE, "%.200s/config.json is no object", in);
    if (kvg_json_get(config, "quantization_config"))
        return kvg_fail(err, KVG_UNSUPPORTED, "%.200s is quantized already (quantization_config in its config.json)", in);
    kvg_gguf_write_begin(&metadata);
    int failed = kvg_folder_config(&metadata, config, text, &why);
    kvg_buf_free(&metadata.buf);
    return failed ? kvg_fail(err, failed, "%.100s: %.150s", in, why.message) : 0;
}

/* config.json of IN with a quantization_config: every other member as its text stands there. */
static int write_config(const char *in, const char *to, const char *text, size_t n, const struct kvg_buf *added,
                        struct kvg_error *err)
{
    struct kvg_arena arena;
    struct kvg_json *config;
    struct kvg_buf out = {0};
    char path[HF_PATH + 32];
    kvg_arena_init(&arena, 0);
    int failed = kvg_json_parse(&arena, text, n, NULL, &config, err);
    if (!failed && !(failed = check_config(in, config, text, err))) {
        kvg_buf_puts(&out, "{\n");
        for (uint32_t i = 0; i < config->n; i++) {
            kvg_buf_puts(&out, "  ");
            kvg_buf_json_string(&out, config->items[i].key.bytes, config->items[i].key.len);
            kvg_buf_puts(&out, ": ");
            kvg_buf_add(&out, text + config->items[i].start, config->items[i].end - config->items[i].start);
            kvg_buf_puts(&out, ",\n");
        }
        kvg_buf_puts(&out, "  \"quantization_config\": ");
        kvg_buf_add(&out, added->bytes, added->len);
        kvg_buf_puts(&out, "\n}\n");
        snprintf(path, sizeof path, "%s/config.json", to);
        FILE *file = fopen(path, "wbx");
        bool good = file && !out.failed && !added->failed && fwrite(out.bytes, 1, out.len, file) == out.len;
        good = file && fclose(file) == 0 && good;
        failed = good ? 0 : kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", path, strerror(errno));
    }
    kvg_buf_free(&out);
    kvg_arena_free(&arena);
    return failed;
}

int hf_files_config(const char *in, const char *to, const struct kvg_buf *added, struct kvg_error *err)
{
    char path[HF_PATH + 32];
    snprintf(path, sizeof path, "%s/config.json", in);
    FILE *file = fopen(path, "rb");
    char *text = malloc(MOST_CONFIG);
    size_t n = file && text ? fread(text, 1, MOST_CONFIG, file) : 0;
    int failed = n > 0 && n < MOST_CONFIG ? write_config(in, to, text, n, added, err)
                                          : kvg_fail(err, KVG_FILE, "%.200s cannot be read, is empty or over 1 MiB", path);
    if (file)
        fclose(file);
    free(text);
    return failed;
}

static int copy_file(const char *in, const char *to, const char *name, struct kvg_error *err)
{
    char from[HF_PATH + 300], under[HF_PATH + 300];
    snprintf(from, sizeof from, "%s/%s", in, name);
    snprintf(under, sizeof under, "%s/%s", to, name);
    FILE *source = fopen(from, "rb"), *out = source ? fopen(under, "wbx") : NULL;
    char *piece = malloc(COPY_BYTES);
    bool good = out && piece;
    for (size_t n; good && (n = fread(piece, 1, COPY_BYTES, source)) > 0;)
        good = fwrite(piece, 1, n, out) == n;
    good = good && !ferror(source);
    if (source)
        fclose(source);
    good = (!out || fclose(out) == 0) && good;
    free(piece);
    return good ? 0 : kvg_fail(err, KVG_FILE, "cannot copy %.200s: %s", from, strerror(errno));
}

int hf_files_copy(const char *in, const char *to, struct kvg_error *err)
{
    DIR *folder = opendir(in);
    struct dirent *entry;
    struct stat found;
    char path[HF_PATH + 300];
    int failed = folder ? 0 : kvg_fail(err, KVG_FILE, "%.200s is no folder that can be read: %s", in, strerror(errno));
    while (!failed && (entry = readdir(folder))) {
        const char *name = entry->d_name;
        snprintf(path, sizeof path, "%s/%s", in, name);
        if (stat(path, &found) != 0 || !S_ISREG(found.st_mode) || strcmp(name, "config.json") == 0 ||
            strstr(name, ".safetensors") || strstr(name, ".bin") || strstr(name, ".gguf"))
            continue;
        failed = copy_file(in, to, name, err);
    }
    if (folder)
        closedir(folder);
    return failed;
}

void hf_files_remove(const char *path)
{
    DIR *folder = opendir(path);
    struct dirent *entry;
    char file[HF_PATH + 300];
    while (folder && (entry = readdir(folder))) {
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlink(file);
    }
    if (folder)
        closedir(folder);
    rmdir(path);
}
