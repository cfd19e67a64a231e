/* POST /v1/chat/completions and /v1/completions: from the body to the last byte of the answer.
 *
 *   pool thread:  JSON -> parameters -> ids of each prompt
 *   loop thread:  submit each prompt to the engine (n choices each) -> its events, through the inbox -> SSE or one object
 *
 * Choice index = prompt * n + choice. The job ends when the engine has sent the last event of every prompt.
 */
#pragma once
#include "gpu-worker/server/conn.h"
#include "libprompt/prompt.h"

/* Starts the job of conn's complete request. */
void generation_start(struct conn *conn, enum kvg_endpoint endpoint);
