/* What tests ask of the emulator. Environment, read at the first CUDA call:
 *   CUSIM_ORDER=fwd|rev|rand<seed>   the order of blocks, warps and lanes
 *   CUSIM_MEMORY=<MiB>               device memory (1024)
 *   CUSIM_DEVICES=0                  no device: cudaGetDeviceCount fails as the real library does
 *   CUSIM_SM=80|86|90|100            what cudaGetDeviceProperties says (90)
 *   CUSIM_FAIL=<call>:<n>            the n-th call (from 1) of malloc, hostalloc, launch, instantiate or sync fails
 *   CUSIM_PROF=<file>                a CHECK build writes a table of its accesses there
 * A process that ends with errors not taken by cusim_take_errors exits with CUSIM_EXIT.
 */
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { CUSIM_EXIT = 97 };

/* Errors found since the last call; runs what is still queued first. */
unsigned cusim_take_errors(void);

/* The text of the last one; valid until the next. "" = none. */
const char *cusim_last_error(void);

/* "fwd", "rev", "rand7". */
void cusim_set_order(const char *order);

/* Kernels executed so far. */
unsigned long cusim_launches(void);

/* Copies from the device to the host so far, and their bytes. */
unsigned long cusim_copies_to_host(size_t *bytes);

/* Accesses seen by the checker; 0 in other builds. */
unsigned long cusim_accesses(void);

/* Makes the n-th next call of the kind fail, as CUSIM_FAIL does. */
void cusim_fail(const char *call, unsigned n);

/* One line of a kernel's source as the profiler saw it; needs a CHECK build and CUSIM_PROF. */
struct cusim_profile_row {
    const char *kernel, *where; /* "gemv.cuh:120" */
    int shared;                 /* else global */
    int store;                  /* 1 write, 2 atomic, 3 cp.async; 0 load */
    int bytes;                  /* of one lane's access */
    unsigned long requests;     /* of whole warps */
    double sectors;             /* global: 32-byte sectors a request touches */
    double used;                /* global: share of those bytes that was asked for */
    double passes;              /* shared: passes through the banks, over the fewest possible; 1 = no conflict */
};
size_t cusim_profile(const struct cusim_profile_row **rows);

#ifdef __cplusplus
}
#endif
