/* Which handler answers a complete request: method, path, authorization. */
#pragma once
#include "gpu-worker/server/conn.h"

/* Answers conn's request at once, or starts its job. */
void route_request(struct conn *conn);
