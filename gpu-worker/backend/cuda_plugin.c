#define _GNU_SOURCE
#include "gpu-worker/backend/cuda_plugin.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "kvgate-cuda.so"

/* Where the shared object is, or would be. */
static void find_file(char *out, size_t size)
{
    const char *named = getenv("KVGATE_CUDA");
    char program[1024];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (named && *named) {
        snprintf(out, size, "%s", named);
        return;
    }
    program[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(program, '/');
    snprintf(out, size, "%.*s/" FILE_NAME, slash ? (int)(slash - program) : 1, slash ? program : ".");
    if (access(out, R_OK) != 0 && access("/usr/lib/kvgate/" FILE_NAME, R_OK) == 0)
        snprintf(out, size, "/usr/lib/kvgate/" FILE_NAME);
}

/* The object stays loaded for the life of the process: its library's own threads do not bear an unload. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    char file[1200];
    find_file(file, sizeof file);
    if (access(file, R_OK) != 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: this installation has no CUDA backend (%s is not there)", file);
    void *object = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!object)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: cannot load the CUDA backend: %s", dlerror());
    const char *const *version = dlsym(object, KVGATE_CUDA_VERSION_SYMBOL);
    kvgate_cuda_open_function *open_backend = (kvgate_cuda_open_function *)dlsym(object, KVGATE_CUDA_OPEN_SYMBOL);
    if (!version || !open_backend || strcmp(*version, KVGATE_VERSION) != 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: %s is of version %s, this worker of " KVGATE_VERSION, file,
                        version ? *version : "unknown");
    return open_backend(out, options, err);
}
