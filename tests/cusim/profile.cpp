/* How well memory is used, by source line: 32-byte sectors a warp's request touches in global memory, passes it takes through the
 * banks of shared memory. The n-th execution of a line by each lane of a warp is taken as one request.
 */
#include "tests/cusim/machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace cusim
{
static const int BANKS = 32, SECTOR = 32;
bool profiling = getenv("CUSIM_PROF") != nullptr;

struct request {
    uint32_t lanes;
    uint64_t offset[32];
};
struct place {
    int bytes;
    access kind;
    unsigned long requests = 0, asked = 0, sectors = 0, passes = 0, ideal = 0;
    std::map<std::pair<int, uint32_t>, request> open; /* of this block, by warp and count */
    std::vector<uint32_t> count;                      /* executions by each thread of this block */
};
using place_key = std::tuple<std::string, const void *, bool>; /* kernel, site, shared */
/* Never destroyed: they are read at exit, behind the destructors of static objects. */
static auto &places = *new std::map<place_key, place>;

void profile_access(const void *, size_t offset, int size, access kind, bool shared, const void *site)
{
    place &p = places[{now.what->name, site, shared}];
    p.bytes = size;
    p.kind = kind;
    p.count.resize(MAX_THREADS);
    request &r = p.open[{current->warp, p.count[current->number]++}];
    r.lanes |= 1u << current->lane;
    r.offset[current->lane] = offset;
}

static size_t count_sectors(const request &r, int bytes)
{
    std::set<uint64_t> sectors;
    for (int lane = 0; lane < 32; lane++)
        for (uint64_t s = r.offset[lane] / SECTOR; r.lanes >> lane & 1 && s <= (r.offset[lane] + bytes - 1) / SECTOR; s++)
            sectors.insert(s);
    return sectors.size();
}

/* Passes of the lanes from first to last, served together: the most words any bank must give. */
static size_t count_passes(const request &r, int bytes, int first, int last)
{
    std::set<uint64_t> words[BANKS];
    for (int lane = first; lane < last; lane++)
        for (uint64_t w = r.offset[lane] / 4; r.lanes >> lane & 1 && w <= (r.offset[lane] + bytes - 1) / 4; w++)
            words[w % BANKS].insert(w);
    size_t most = 0;
    for (const auto &bank : words)
        most = std::max(most, bank.size());
    return most;
}

static void close_request(place &p, const request &r, bool shared)
{
    p.requests++;
    p.asked += (unsigned long)__builtin_popcount(r.lanes) * (unsigned)p.bytes;
    if (!shared) {
        p.sectors += count_sectors(r, p.bytes);
        return;
    }
    int together = p.bytes >= 16 ? 8 : p.bytes == 8 ? 16 : 32; /* a 16-byte access goes a quarter of a warp at a time */
    for (int lane = 0; lane < 32; lane += together) {
        size_t passes = count_passes(r, p.bytes, lane, lane + together);
        p.passes += passes;
        p.ideal += passes != 0;
    }
}

void profile_end_block()
{
    if (!profiling)
        return;
    for (auto &entry : places) {
        place &p = entry.second;
        for (const auto &r : p.open)
            close_request(p, r.second, std::get<2>(entry.first));
        p.open.clear();
        std::fill(p.count.begin(), p.count.end(), 0);
    }
}

static auto &rows = *new std::vector<cusim_profile_row>;
static auto &row_lines = *new std::vector<std::string>;

static void make_rows()
{
    std::vector<const void *> sites;
    for (const auto &entry : places)
        sites.push_back(std::get<1>(entry.first));
    resolve_all(sites);
    rows.clear();
    row_lines.clear();
    row_lines.reserve(places.size());
    for (const auto &entry : places) {
        const place &p = entry.second;
        if (!p.requests)
            continue;
        row_lines.push_back(where(std::get<1>(entry.first)));
        cusim_profile_row row = {};
        row.kernel = std::get<0>(entry.first).c_str();
        row.where = row_lines.back().c_str();
        row.shared = std::get<2>(entry.first);
        row.store = (int)p.kind;
        row.bytes = p.bytes;
        row.requests = p.requests;
        row.sectors = (double)p.sectors / (double)p.requests;
        row.used = p.sectors ? (double)p.asked / (double)(p.sectors * SECTOR) : 0;
        row.passes = p.ideal ? (double)p.passes / (double)p.ideal : 0;
        rows.push_back(row);
    }
}

void profile_write()
{
    const char *path = getenv("CUSIM_PROF");
    if (!path || !*path || places.empty())
        return;
    FILE *f = fopen(path, "w");
    if (!f) {
        perror(path);
        return;
    }
    make_rows();
    fprintf(f, "kernel;where;memory;access;bytes;requests;sectors;used;passes\n");
    static const char *const kinds[] = {"load", "store", "atomic", "cp.async"};
    for (const cusim_profile_row &r : rows)
        fprintf(f, "%s;%s;%s;%s;%d;%lu;%.2f;%.3f;%.2f\n", r.kernel, r.where, r.shared ? "shared" : "global", kinds[r.store],
                r.bytes, r.requests, r.sectors, r.used, r.passes);
    fclose(f);
}
} // namespace cusim

size_t cusim_profile(const struct cusim_profile_row **out)
{
    cusim::drain_all();
    cusim::make_rows();
    *out = cusim::rows.data();
    return cusim::rows.size();
}
