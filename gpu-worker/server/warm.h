/* Prompts that are computed before the worker calls itself ready, and whose blocks are evicted last.
 *
 *   read the file: JSON -> parameters -> ids, each line judged as a request would be -> compute, a few prompts at a time -> done
 *
 * Their blocks are those that a client's request with the same beginning looks for: of the gateway listener without a salt of
 * the operator's where there is one, else of the plain listener. A line's cache_salt counts as in a request.
 */
#pragma once
#include <stddef.h>
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/server/server.h"
#include "libprompt/error.h"
#include "libprompt/prompt.h"

struct warm;

/* path: request bodies for chat or completions (told by "messages" and "prompt"), one a line; empty lines are skipped, and with a
 * line in the log prompts without a whole block and those whose blocks another has. Reads and tokenizes all of it. Of `server`
 * the names, the listeners and the key count. The engine and the model stay the caller's and outlive the result. 0, or -1 with
 * err naming file, line and member. */
int warm_open(struct warm **out, const char *path, const struct server_options *server, struct engine *engine,
              const struct kvg_prompt_model *prompt_model, struct kvg_error *err);
/* Asks the engine for what is due; call it every few milliseconds. 1: all is computed, and the log says so; 0: not yet; -1 with
 * err. One thread. */
int warm_advance(struct warm *warm, struct kvg_error *err);
void warm_cancel(struct warm *warm); /* what was asked for and is not computed */
void warm_close(struct warm *warm);  /* after the engine was closed, or when all is computed */
