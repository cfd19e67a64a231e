/* Pre-tokenizers: each family's published split patterns as scanners over code point classes.
 *
 * A family is a list of stages. A stage cuts each piece it is given into matches and the gaps between them, and hands both to
 * the next one (the "isolated" behavior of splitters); the last stage hands out words. The pattern of each stage stands beside
 * its scanner; classes come from unicode_classes.c.
 */
#include "libprompt/tokenizer_internal.h"

#include <string.h>

enum stage {
    END,
    GPT2,                 /* last stage: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
    LLAMA3,               /* last: (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
                             |\s*[\r\n]+|\s+(?!\S)|\s+ */
    QWEN2,                /* the same with \p{N} in place of \p{N}{1,3} */
    QWEN35,               /* QWEN2 with marks counting as letters */
    DEEPSEEK3,            /* last: ASCII punctuation[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*
                             |\s*[\r\n]+|\s+(?!\S)|\s+ */
    NEWLINE,              /* [\r\n] */
    DIGIT,                /* each digit by itself */
    STAND_IN_DIGITS,      /* runs of digits among the characters that stand in for bytes (U+00B2, B3, B9, BC-BE are such) */
    ASCII_DIGITS_3,       /* [0-9][0-9][0-9] */
    NUMBERS_3,            /* \p{N}{1,3} */
    PUNCTUATION_RUN,      /* runs of what a Punctuation splitter takes */
    SPACE_LETTERS,        /* \s?\p{L}+ */
    SPACE_PUNCTUATION,    /* \s?\p{P}+ */
    DEEPSEEK_LETTERS,     /* \s?[A-Za-zµÀ-ÖØ-öø-ƺ...]+: deepseek_letters below */
    DEEPSEEK_PUNCTUATION, /* \s?[!-/:-~！-／：-～‘-‟　-。]+ */
    SPACE_AT_END,         /* \s+$ */
    DEEPSEEK_CJK,         /* [一-龥ࠀ-一가-퟿]+ */
    DEEPSEEK3_CJK,        /* [一-龥぀-ゟ゠-ヿ]+ */
};

static const struct kvg_pre PRES[] = {
    {{"gpt-2", "gpt2", "phi-2", "roberta-bpe", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code"}, {GPT2}},
    {{"default"}, {GPT2}},
    {{"mpt", "olmo", "gpt-neox", "jais"}, {GPT2}, .nfc = true},
    {{"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"}, {LLAMA3}, .ignore_merges = true, .add_bos = true},
    {{"dbrx", "smaug-bpe", "chatglm-bpe", "glm4"}, {LLAMA3}},
    {{"qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"}, {QWEN2}, .nfc = true},
    {{"qwen35"}, {QWEN35}},
    {{"smollm", "starcoder", "refact", "codeshell", "exaone"}, {DIGIT, GPT2}},
    {{"command-r"}, {DIGIT, GPT2}, .nfc = true},
    {{"falcon"}, {PUNCTUATION_RUN, GPT2, STAND_IN_DIGITS, ASCII_DIGITS_3}},
    {{"deepseek-llm"}, {NEWLINE, DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, SPACE_AT_END, DEEPSEEK_CJK, DIGIT}},
    {{"deepseek-coder"}, {NEWLINE, SPACE_LETTERS, SPACE_PUNCTUATION, DEEPSEEK_CJK, DIGIT}},
    {{"deepseek-v3"}, {NUMBERS_3, DEEPSEEK3_CJK, DEEPSEEK3}},
};

const struct kvg_pre *kvg_pre_find(struct kvg_str name)
{
    for (size_t i = 0; i < sizeof PRES / sizeof *PRES; i++) {
        for (size_t k = 0; PRES[i].names[k]; k++) {
            if (kvg_str_eq(name, PRES[i].names[k]))
                return &PRES[i];
        }
    }
    return NULL;
}

/* First and last code points of the letters that DeepSeek-LLM's pattern lists (cased letters of four scripts). */
static const uint32_t deepseek_letters[][2] = {
    {'A', 'Z'},         {'a', 'z'},         {0xb5, 0xb5},       {0xc0, 0xd6},       {0xd8, 0xf6},       {0xf8, 0x1ba},
    {0x1bc, 0x1bf},     {0x1c4, 0x293},     {0x295, 0x2af},     {0x370, 0x373},     {0x376, 0x377},     {0x37b, 0x37d},
    {0x37f, 0x37f},     {0x386, 0x386},     {0x388, 0x38a},     {0x38c, 0x38c},     {0x38e, 0x3a1},     {0x3a3, 0x3f5},
    {0x3f7, 0x481},     {0x48a, 0x52f},     {0x531, 0x556},     {0x10a0, 0x10c5},   {0x13a0, 0x13f5},   {0x13f8, 0x13fd},
    {0x1c90, 0x1cba},   {0x1cbd, 0x1cbf},   {0x1d00, 0x1d2b},   {0x1d6b, 0x1d77},   {0x1d79, 0x1d9a},   {0x1e00, 0x1f15},
    {0x1f18, 0x1f1d},   {0x1f20, 0x1f45},   {0x1f48, 0x1f4d},   {0x1f50, 0x1f57},   {0x1f59, 0x1f59},   {0x1f5b, 0x1f5b},
    {0x1f5d, 0x1f5d},   {0x1f5f, 0x1f7d},   {0x1f80, 0x1fb4},   {0x1fb6, 0x1fbc},   {0x1fbe, 0x1fbe},   {0x1fc2, 0x1fc4},
    {0x1fc6, 0x1fcc},   {0x1fd0, 0x1fd3},   {0x1fd6, 0x1fdb},   {0x1fe0, 0x1fec},   {0x1ff2, 0x1ff4},   {0x1ff6, 0x1ffc},
    {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210a, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211d},   {0x2124, 0x2124},
    {0x2126, 0x2126},   {0x2128, 0x2128},   {0x212a, 0x212d},   {0x212f, 0x2134},   {0x2139, 0x2139},   {0x213c, 0x213f},
    {0x2145, 0x2149},   {0x214e, 0x214e},   {0x2183, 0x2184},   {0x2c00, 0x2c7b},   {0x2c7e, 0x2ce4},   {0x2ceb, 0x2cee},
    {0x2cf2, 0x2cf3},   {0xa640, 0xa66d},   {0xa680, 0xa69b},   {0xa722, 0xa76f},   {0xa771, 0xa787},   {0xa78b, 0xa78e},
    {0xab70, 0xabbf},   {0xfb00, 0xfb06},   {0xfb13, 0xfb17},   {0xff21, 0xff3a},   {0xff41, 0xff5a},   {0x10400, 0x1044f},
    {0x104b0, 0x104d3}, {0x104d8, 0x104fb}, {0x10c80, 0x10cb2}, {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943},
};

static bool is_deepseek_letter(uint32_t c)
{
    size_t low = 0, high = sizeof deepseek_letters / sizeof *deepseek_letters;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c < deepseek_letters[middle][0])
            high = middle;
        else if (c > deepseek_letters[middle][1])
            low = middle + 1;
        else
            return true;
    }
    return false;
}

static bool is_deepseek_punctuation(uint32_t c)
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '~') || (c >= 0xff01 && c <= 0xff0f) || (c >= 0xff1a && c <= 0xff5e) ||
           (c >= 0x2018 && c <= 0x201f) || (c >= 0x3000 && c <= 0x3002);
}

/* What a scanner reads. */
struct piece {
    const uint16_t *classes;
    const uint8_t *end;
};

static inline unsigned class_at(const struct piece *s, const uint8_t *p, unsigned *len)
{
    return s->classes[kvg_decode(p, s->end, len)];
}

/* Behind the run of characters from p that have a class in `any` and none in `none`. */
static inline const uint8_t *run_of(const struct piece *s, const uint8_t *p, unsigned any, unsigned none)
{
    unsigned len;

    while (p < s->end) {
        unsigned c = class_at(s, p, &len);
        if ((any && !(c & any)) || (c & none))
            break;
        p += len;
    }
    return p;
}

/* \s+(?!\S)|\s+ at p, which is white space: the run, without its last character when something follows it. */
static inline const uint8_t *space_run(const struct piece *s, const uint8_t *p)
{
    const uint8_t *last = p, *q = p;
    unsigned len;

    while (q < s->end && (class_at(s, q, &len) & KVG_SPACE)) {
        last = q;
        q += len;
    }
    return q == s->end || last == p ? q : last;
}

/* 's 't 'm 'd 're 've 'll behind the apostrophe at p; with `fold` in any case, and U+017F counts as an s. NULL: none. */
static inline const uint8_t *contraction(const uint8_t *p, const uint8_t *end, bool fold)
{
    uint8_t a, b;

    if (end - p < 2)
        return NULL;
    a = fold ? p[1] | 0x20 : p[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return p + 2;
    if (end - p < 3)
        return NULL;
    if (fold && p[1] == 0xc5 && p[2] == 0xbf)
        return p + 3;
    b = fold ? p[2] | 0x20 : p[2];
    if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l'))
        return p + 3;
    return NULL;
}

static const uint8_t *gpt2_word(const struct piece *s, const uint8_t *p)
{
    const uint8_t *q = p, *found;
    unsigned len, c;

    if (*p == '\'' && (found = contraction(p, s->end, false)))
        return found;
    c = class_at(s, p, &len);
    if (*p == ' ' && p + 1 < s->end) {
        q = p + 1;
        c = class_at(s, q, &len);
    }
    if (c & KVG_LETTER)
        return run_of(s, q + len, KVG_LETTER, 0);
    if (c & KVG_NUMBER)
        return run_of(s, q + len, KVG_NUMBER, 0);
    if (!(c & KVG_SPACE))
        return run_of(s, q + len, 0, KVG_SPACE | KVG_LETTER | KVG_NUMBER);
    return space_run(s, p);
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ at p, which is white space */
static inline const uint8_t *newline_run(const struct piece *s, const uint8_t *p)
{
    const uint8_t *newline = NULL, *last = p, *q = p;
    unsigned len;

    while (q < s->end && (class_at(s, q, &len) & KVG_SPACE)) {
        if (*q == '\r' || *q == '\n')
            newline = q + 1;
        last = q;
        q += len;
    }
    if (newline)
        return newline;
    return q == s->end || last == p ? q : last;
}

static inline const uint8_t *skip_newlines(const struct piece *s, const uint8_t *p)
{
    while (p < s->end && (*p == '\r' || *p == '\n'))
        p++;
    return p;
}

/* LLAMA3, QWEN2 and QWEN35: `letters` are the classes that count as letters, `digits` the longest run of numbers. */
static inline const uint8_t *llama3_word(const struct piece *s, const uint8_t *p, unsigned letters, int digits)
{
    const uint8_t *q, *found;
    unsigned len, next_len, c;

    if (*p == '\'' && (found = contraction(p, s->end, true)))
        return found;
    c = class_at(s, p, &len);
    q = p + len;
    if (c & letters)
        return run_of(s, q, letters, 0);
    if (c & KVG_NUMBER) {
        for (int i = 1; i < digits && q < s->end && (class_at(s, q, &next_len) & KVG_NUMBER); i++)
            q += next_len;
        return q;
    }
    if (*p != '\r' && *p != '\n' && q < s->end && (class_at(s, q, &next_len) & letters))
        return run_of(s, q + next_len, letters, 0);
    if (*p == ' ' && q < s->end && !(class_at(s, q, &next_len) & (KVG_SPACE | KVG_NUMBER | letters)))
        return skip_newlines(s, run_of(s, q + next_len, 0, KVG_SPACE | KVG_NUMBER | letters));
    if (!(c & KVG_SPACE))
        return skip_newlines(s, run_of(s, q, 0, KVG_SPACE | KVG_NUMBER | letters));
    return newline_run(s, p);
}

static bool is_ascii_letter(uint8_t c)
{
    return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
}

/* Characters that no alternative takes stay behind as a gap: a word of their own up to the next match. */
static const uint8_t *deepseek3_match(const struct piece *s, const uint8_t *p)
{
    unsigned len, next_len, c = class_at(s, p, &len), marks = KVG_LETTER | KVG_MARK, symbols = KVG_PUNCTUATION | KVG_SYMBOL;
    const uint8_t *q = p + len;

    if (*p < 0x80 && (c & symbols) && q < s->end && is_ascii_letter(*q)) {
        while (q < s->end && is_ascii_letter(*q))
            q++;
        return q;
    }
    if (c & marks)
        return run_of(s, q, marks, 0);
    if (!(c & symbols) && *p != '\r' && *p != '\n' && q < s->end && (class_at(s, q, &next_len) & marks))
        return run_of(s, q + next_len, marks, 0);
    if (*p == ' ' && q < s->end && (class_at(s, q, &next_len) & symbols))
        return skip_newlines(s, run_of(s, q + next_len, symbols, 0));
    if (c & symbols)
        return skip_newlines(s, run_of(s, q, symbols, 0));
    return c & KVG_SPACE ? newline_run(s, p) : NULL;
}

/* Whether character c of class `k` belongs to the run that `stage` matches. */
static bool in_run(enum stage stage, uint32_t c, unsigned k)
{
    switch (stage) {
    case NEWLINE:
        return c == '\r' || c == '\n';
    case DIGIT:
        return k & KVG_DIGIT;
    case ASCII_DIGITS_3:
        return c >= '0' && c <= '9';
    case NUMBERS_3:
        return k & KVG_NUMBER;
    case PUNCTUATION_RUN:
        return k & KVG_SPLIT_PUNCTUATION;
    case SPACE_LETTERS:
        return k & KVG_LETTER;
    case SPACE_PUNCTUATION:
        return k & KVG_PUNCTUATION;
    case DEEPSEEK_LETTERS:
        return is_deepseek_letter(c);
    case DEEPSEEK_PUNCTUATION:
        return is_deepseek_punctuation(c);
    case SPACE_AT_END:
        return k & KVG_SPACE;
    case DEEPSEEK_CJK:
        return (c >= 0x800 && c <= 0x9fa5) || (c >= 0xac00 && c <= 0xd7ff);
    case DEEPSEEK3_CJK:
        return (c >= 0x4e00 && c <= 0x9fa5) || (c >= 0x3040 && c <= 0x30ff);
    default:
        return false;
    }
}

/* Fewest and most characters of one match. */
static void run_bounds(enum stage stage, size_t *least, size_t *most)
{
    *least = stage == ASCII_DIGITS_3 ? 3 : 1;
    *most = stage == NEWLINE || stage == DIGIT ? 1 : stage == ASCII_DIGITS_3 || stage == NUMBERS_3 ? 3 : SIZE_MAX;
}

/* The end of the match of `stage` at p, or NULL. */
static const uint8_t *run_match(const struct piece *s, enum stage stage, const uint8_t *p)
{
    size_t n = 0, least, most;
    unsigned len, k;
    uint32_t c;

    run_bounds(stage, &least, &most);
    if (stage == SPACE_LETTERS || stage == SPACE_PUNCTUATION || stage == DEEPSEEK_LETTERS || stage == DEEPSEEK_PUNCTUATION) {
        c = kvg_decode(p, s->end, &len);
        k = s->classes[c];
        if ((k & KVG_SPACE) && p + len < s->end) {
            unsigned next_len;
            uint32_t next = kvg_decode(p + len, s->end, &next_len);
            if (in_run(stage, next, s->classes[next]))
                p += len;
        }
    }
    for (; p < s->end && n < most; n++, p += len) {
        c = kvg_decode(p, s->end, &len);
        if (!in_run(stage, c, s->classes[c]))
            break;
    }
    if (n < least || (stage == SPACE_AT_END && p != s->end))
        return NULL;
    return p;
}

static const uint8_t *stand_in_digits(const struct piece *s, const uint8_t *p)
{
    const uint8_t *q = p;

    while (q < s->end && ((*q >= '0' && *q <= '9') || *q == 0xb2 || *q == 0xb3 || *q == 0xb9 || (*q >= 0xbc && *q <= 0xbe)))
        q++;
    return q > p ? q : NULL;
}

/* Behind the match of `stage` at p (one of the last stages that match everywhere, or a run), or NULL. */
static const uint8_t *stage_match(const struct piece *s, enum stage stage, const uint8_t *p)
{
    switch (stage) {
    case GPT2:
        return gpt2_word(s, p);
    case LLAMA3:
        return llama3_word(s, p, KVG_LETTER, 3);
    case QWEN2:
        return llama3_word(s, p, KVG_LETTER, 1);
    case QWEN35:
        return llama3_word(s, p, KVG_LETTER | KVG_MARK, 1);
    case DEEPSEEK3:
        return deepseek3_match(s, p);
    case STAND_IN_DIGITS:
        return stand_in_digits(s, p);
    default:
        return run_match(s, stage, p);
    }
}

struct split {
    const struct kvg_tokenizer *tokenizer;
    kvg_word_fn *word;
    void *context;
};

static int run_stages(const struct split *split, const uint8_t *stage, const uint8_t *p, const uint8_t *end)
{
    struct piece s = {split->tokenizer->classes, end};
    const uint8_t *gap = p, *match;
    unsigned len;
    int rc;

    if (*stage == END || p == end)
        return p == end ? 0 : split->word(split->context, p, (size_t)(end - p));
    while (p < end) {
        if (*stage == DIGIT && (p = run_of(&s, p, 0, KVG_DIGIT)) == end)
            break;
        match = stage_match(&s, *stage, p);
        if (!match) {
            if (*stage == SPACE_AT_END) { /* no match inside the run it just saw: linear on hostile white space */
                const uint8_t *behind = run_of(&s, p, KVG_SPACE, 0);
                if (behind > p) {
                    p = behind;
                    continue;
                }
            }
            kvg_decode(p, end, &len);
            p += *stage == STAND_IN_DIGITS ? 1 : len;
            continue;
        }
        if (gap < p && (rc = run_stages(split, stage + 1, gap, p)))
            return rc;
        if ((rc = run_stages(split, stage + 1, p, match)))
            return rc;
        gap = p = match;
    }
    return gap < end ? run_stages(split, stage + 1, gap, end) : 0;
}

int kvg_pre_split(const struct kvg_tokenizer *tokenizer, const uint8_t *bytes, size_t n, kvg_word_fn *word, void *context)
{
    struct split split = {tokenizer, word, context};
    const uint8_t *p = bytes, *end = bytes + n;
    enum stage only = tokenizer->pre->stages[1] == END ? tokenizer->pre->stages[0] : END;
    struct piece s = {tokenizer->classes, end};
    int rc = 0;

    if (only == END || only == DEEPSEEK3)
        return run_stages(&split, tokenizer->pre->stages, bytes, end);
    while (p < end && !rc) {
        const uint8_t *start = p;
        p = stage_match(&s, only, p);
        rc = word(context, start, (size_t)(p - start));
    }
    return rc;
}
