/* Listening sockets. */
#pragma once
#include <stdint.h>
#include "libprompt/error.h"

/* A non-blocking listening TCP socket, or -1 with err. host: a name or a numeric address; [::1] and ::1 alike. */
int listen_tcp(const char *host, uint16_t port, struct kvg_error *err);
/* address: IP:port, [IPv6]:port or unix:/path. A socket file that nobody listens on is replaced; one in use is an error.
 * The file is open to every local user: its folder decides who reaches it. */
int listen_address(const char *address, struct kvg_error *err);
/* The path of unix:/path, else NULL. */
const char *listen_unix_path(const char *address);
/* Splits host:port or [host]:port. 0, or -1 when it is neither or the port is not 1..65535. */
int split_address(const char *address, char *host, unsigned size, uint16_t *port);
