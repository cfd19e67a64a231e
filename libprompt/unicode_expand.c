#include "libprompt/unicode_classes.h"

#include <string.h>

void kvg_classes_expand(uint16_t *classes)
{
    memset(classes, 0, KVG_CODE_POINTS * sizeof *classes);
    for (size_t i = 0; i < kvg_n_class_ranges; i++) {
        for (uint32_t c = kvg_class_ranges[i].first; c <= kvg_class_ranges[i].last; c++)
            classes[c] = kvg_class_ranges[i].classes;
    }
}
