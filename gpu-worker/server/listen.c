#include "gpu-worker/server/listen.h"
#include <errno.h>
#include <netdb.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 1024 };

static int bind_one(const struct addrinfo *address)
{
    int one = 1, fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

int listen_tcp(const char *host, uint16_t port, struct kvg_error *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found;
    char service[8];
    int fd = -1;

    snprintf(service, sizeof service, "%u", port);
    int code = getaddrinfo(host, service, &hints, &found);
    if (code != 0) {
        kvg_fail(err, KVG_INVALID, "cannot listen on %s:%u: %s", host, port, gai_strerror(code));
        return -1;
    }
    for (const struct addrinfo *at = found; at && fd < 0; at = at->ai_next)
        fd = bind_one(at);
    if (fd < 0)
        kvg_fail(err, KVG_INVALID, "cannot listen on %s:%u: %s", host, port, strerror(errno));
    freeaddrinfo(found);
    return fd;
}

const char *listen_unix_path(const char *address)
{
    return address && strncmp(address, "unix:", 5) == 0 ? address + 5 : NULL;
}

/* Whether a process accepts connections there. */
static int in_use(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int used = fd >= 0 && connect(fd, (const struct sockaddr *)address, sizeof *address) == 0;
    if (fd >= 0)
        close(fd);
    return used;
}

static int listen_unix(const char *path, struct kvg_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat file;

    if (path[0] != '/' || strlen(path) >= sizeof address.sun_path) {
        kvg_fail(err, KVG_INVALID, "unix:%s: the path has to be absolute and shorter than %zu bytes", path,
                 sizeof address.sun_path);
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (in_use(&address)) {
        kvg_fail(err, KVG_INVALID, "cannot listen on unix:%s: another process does", path);
        return -1;
    }
    if (lstat(path, &file) == 0 && S_ISSOCK(file.st_mode))
        unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || chmod(path, 0666) < 0 || listen(fd, BACKLOG) < 0) {
        kvg_fail(err, KVG_INVALID, "cannot listen on unix:%s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

int split_address(const char *address, char *host, unsigned size, uint16_t *port)
{
    const char *colon = strrchr(address, ':'), *from = address;
    char *end;
    if (!colon || colon == address)
        return -1;
    unsigned long number = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end || number == 0 || number > 65535)
        return -1;
    size_t len = (size_t)(colon - address);
    if (address[0] == '[') {
        if (len < 3 || address[len - 1] != ']')
            return -1;
        from++;
        len -= 2;
    }
    if (len >= size)
        return -1;
    memcpy(host, from, len);
    host[len] = '\0';
    *port = (uint16_t)number;
    return 0;
}

int listen_address(const char *address, struct kvg_error *err)
{
    char host[256];
    uint16_t port;
    const char *path = listen_unix_path(address);

    if (path)
        return listen_unix(path, err);
    if (split_address(address, host, sizeof host, &port) == 0)
        return listen_tcp(host, port, err);
    kvg_fail(err, KVG_INVALID, "\"%s\" is no address: IP:port, [IPv6]:port or unix:/path", address);
    return -1;
}
