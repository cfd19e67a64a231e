/* What each code point is to the pre-tokenizers and the normalizer. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum kvg_class {
    KVG_LETTER = 1,              /* \p{L} */
    KVG_NUMBER = 2,              /* \p{N} */
    KVG_SPACE = 4,               /* \s */
    KVG_MARK = 8,                /* \p{M} */
    KVG_PUNCTUATION = 16,        /* \p{P} */
    KVG_SYMBOL = 32,             /* \p{S} */
    KVG_DIGIT = 64,              /* what a Digits splitter takes */
    KVG_SPLIT_PUNCTUATION = 128, /* what a Punctuation splitter takes */
    KVG_COMPOSING = 256,         /* NFC may change it, or what it follows */
    KVG_FROZEN = 512,            /* NFC leaves it and composes nothing across it, whatever the system's Unicode tables say */
};

struct kvg_class_range {
    uint32_t first, last; /* code points, inclusive */
    uint16_t classes;
};

extern const struct kvg_class_range kvg_class_ranges[]; /* ascending, disjoint */
extern const size_t kvg_n_class_ranges;

enum { KVG_CODE_POINTS = 0x110000 };

/* classes[code point] for all KVG_CODE_POINTS of them. */
void kvg_classes_expand(uint16_t *classes);
