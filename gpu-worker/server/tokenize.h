/* POST /tokenize and /detokenize, in vLLM's shape. /tokenize adds "kvgate": {block_size, fingerprint, chain}, the hashes by
 * which an operator finds the owners of a prompt in Redis. */
#pragma once
#include "gpu-worker/server/conn.h"

void tokenize_start(struct conn *conn);
void detokenize_start(struct conn *conn);
