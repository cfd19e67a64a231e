/* Messages: what is wrong, then kernel, block and thread; source lines from addr2line. */
#include "tests/cusim/machine.h"
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace cusim
{
static const unsigned SHOWN = 20; /* messages printed; the rest is counted */
static unsigned errors;
static char last[2048];

static void print(const char *format, va_list args)
{
    int n = vsnprintf(last, sizeof last, format, args);
    if (now.what && n >= 0 && (size_t)n < sizeof last)
        snprintf(last + n, sizeof last - (size_t)n, " | kernel %s, block (%u,%u,%u), thread (%u,%u,%u)", now.what->name,
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    if (errors++ < SHOWN)
        fprintf(stderr, "cusim: %s\n", last);
}

void report(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(format, args);
    va_end(args);
}

void fatal(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(format, args);
    va_end(args);
    fflush(stdout);
    _exit(CUSIM_EXIT);
}

bool first_time(const void *site, const void *other, int what)
{
    static std::set<std::tuple<const void *, const void *, int>> seen;
    return seen.insert({site, other, what}).second;
}

/* ---- the program: the executable or shared object that holds the emulator and the kernels ---- */

struct object {
    const char *start, *end;
    std::string file;
};

static int find_own(dl_phdr_info *info, size_t, void *out)
{
    object *o = static_cast<object *>(out);
    const char *base = reinterpret_cast<const char *>(info->dlpi_addr), *here = reinterpret_cast<const char *>(&find_own);
    const char *end = base;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD)
            end = std::max(end, base + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
    if (here < base || here >= end)
        return 0;
    *o = {base, end, *info->dlpi_name ? info->dlpi_name : "/proc/" + std::to_string(getpid()) + "/exe"};
    return 1;
}

static const object &own_object()
{
    static object found;
    if (!found.start)
        dl_iterate_phdr(find_own, &found);
    return found;
}

uint32_t program_offset(const void *site)
{
    return (uint32_t)(static_cast<const char *>(site) - own_object().start);
}

const void *program_site(uint32_t offset)
{
    return own_object().start + offset;
}

bool in_program(const void *p)
{
    const char *c = static_cast<const char *>(p);
    return c >= own_object().start && c < own_object().end;
}

/* ---- source lines ---- */

static std::map<const void *, std::string> &lines()
{
    static auto &known = *new std::map<const void *, std::string>; /* never destroyed: it is read at exit */
    return known;
}

/* "/a/b/gemv.cuh:12 (discriminator 3)" -> "gemv.cuh:12" */
static std::string shorten(std::string line)
{
    line = line.substr(0, line.find_first_of(" \n"));
    size_t slash = line.rfind('/');
    return slash == std::string::npos ? line : line.substr(slash + 1);
}

/* The emulator's own headers are no place where a user looks. */
static bool own(const std::string &line)
{
    return line.find("tests/cusim/cusim") != std::string::npos || line.find("/cuda_") != std::string::npos;
}

/* addr2line -i prints the line and those it was inlined into, innermost first; with -a an address comes before each group. */
static void ask(const std::vector<const void *> &sites)
{
    std::string line = "addr2line -ai -e '" + own_object().file + "'";
    for (const void *site : sites) {
        char address[32];
        snprintf(address, sizeof address, " 0x%x", program_offset(site) - 1);
        line += address;
    }
    FILE *pipe = popen((line + " 2>/dev/null").c_str(), "r");
    if (!pipe)
        return;
    char text[1024];
    size_t at = (size_t)-1;
    bool done = true;
    while (fgets(text, sizeof text, pipe)) {
        std::string found = text;
        if (found.compare(0, 2, "0x") == 0) {
            done = ++at >= sites.size();
            continue;
        }
        if (done || own(found))
            continue;
        lines()[sites[at]] = shorten(found);
        done = true;
    }
    pclose(pipe);
}

void resolve_all(const std::vector<const void *> &sites)
{
    std::vector<const void *> unknown;
    for (const void *site : sites)
        if (!lines().count(site))
            unknown.push_back(site);
    for (size_t from = 0; from < unknown.size(); from += 500)
        ask({unknown.begin() + (long)from, unknown.begin() + (long)std::min(from + 500, unknown.size())});
}

std::string where(const void *site)
{
    resolve_all({site});
    auto found = lines().find(site);
    return found == lines().end() ? "?" : found->second;
}

/* Errors that nobody took make the process fail, whatever its own result. */
struct at_exit {
    at_exit()
    {
        atexit([] {
            profile_write();
            if (!errors)
                return;
            fprintf(stderr, "cusim: %u errors\n", errors);
            fflush(nullptr);
            _exit(CUSIM_EXIT);
        });
    }
} static exit_check;

unsigned take_errors()
{
    unsigned n = errors;
    errors = 0;
    return n;
}
} // namespace cusim

unsigned cusim_take_errors(void)
{
    cusim::drain_all();
    return cusim::take_errors();
}

const char *cusim_last_error(void)
{
    return cusim::last;
}
