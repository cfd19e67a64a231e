/* AWQ (Lin et al., 2023): columns that meet large inputs are scaled up before rounding, and their inputs down, so that rounding
 * costs least where it matters.
 *
 *   s_j = a_j^alpha / geometric mean,  a_j = sqrt(mean x_j^2)          alpha from 0 to 1 in steps
 *   Q(W diag(s)) diag(s)^-1 X          the alpha of the least error, by H = X^T X:  sum over rows of  e H e^T
 *
 * The division is folded into what produces the inputs: the norm before, or the rows of the matrix before.
 */
#pragma once
#include <stdint.h>
#include "gpu-worker/tools/grid.h"
#include "libprompt/error.h"

enum { AWQ_MATRICES = 3 /* most that share an input */ };

/* One matrix of those that share an input. */
struct awq_matrix {
    const float *weights; /* [rows, cols] */
    uint32_t rows;
};

/* scales [cols] become the best ones for the matrices together under the grid; *kept: their error as a share of rounding's (at
 * alpha 0), at most 1. hessian [cols, cols]: upper triangle (row-major) is read. KVG_NOMEM. */
int awq_search(const struct awq_matrix *matrices, uint32_t n_matrices, uint32_t cols, const float *hessian,
               const struct grid *grid, uint32_t threads, float *scales, double *kept, struct kvg_error *err);

/* For each group of w [rows, cols] (already scaled), the share of its range, 1 down to 1/2, at which rounding loses least by the
 * group's own part of the hessian (upper triangle read), the errors divided by s; numbers beyond it become the range's ends. w
 * becomes numbers of the grid, ranges [rows, cols / group] theirs. scales may be NULL: all 1. */
void awq_round(float *w, struct grid_range *ranges, uint32_t rows, uint32_t cols, const float *hessian, const float *scales,
               const struct grid *grid, uint32_t threads);
