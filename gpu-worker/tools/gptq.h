/* GPTQ (Frantar et al., 2022): rounds a matrix column by column and lets the columns that are still to come make up for the
 * error, by the second-order statistics of what the matrix is multiplied with.
 *
 *   H = X^T X          of calibration inputs X [tokens, cols]
 *   U                  H^-1 + damping = U^T U, upper triangular
 *   for column i:      q_i = round(w_i),  e = (w_i - q_i) / U[i][i],  w_j -= e U[i][j] for j > i
 */
#pragma once
#include <stdint.h>
#include "gpu-worker/tools/grid.h"
#include "libprompt/error.h"

/* hessian: [n, n] f32, symmetric, its upper triangle (row-major) read; on return its upper triangle is U. damping: added to the
 * diagonal, as a share of its mean; raised where the matrix is not positive definite. */
int gptq_prepare(float *hessian, uint32_t n, double damping, struct kvg_error *err);

/* weights [rows, cols] become numbers of the grid; ranges [rows, cols / group] become those of the groups, fitted to the columns
 * as they are when the group begins. upper: of gptq_prepare. KVG_NOMEM. threads: 0 = all cores. */
int gptq_quantize(float *weights, struct grid_range *ranges, uint32_t rows, uint32_t cols, const float *upper,
                  const struct grid *grid, uint32_t threads, struct kvg_error *err);
