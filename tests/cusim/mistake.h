/* Which of the mistakes of mutants.py is in force; -1 = none. */
#pragma once
#include <stdlib.h>

static inline int planted_mistake(void)
{
    static int number = -2;
    if (number == -2) {
        const char *text = getenv("CUSIM_MISTAKE");
        number = text ? atoi(text) : -1;
    }
    return number;
}
