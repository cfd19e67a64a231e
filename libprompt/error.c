#include "libprompt/error.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int kvg_fail(struct kvg_error *err, int code, const char *format, ...)
{
    if (!err)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    err->code = code;
    err->position = (size_t)-1;
    err->param[0] = '\0';
    return code;
}
