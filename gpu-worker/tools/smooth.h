/* SmoothQuant (Xiao et al., 2022), for weights with a scale a row and inputs with one a token, both of 8 bits: one large column
 * of the inputs takes the bits of all others, so columns are divided where inputs are large, and the weights' multiplied.
 *
 *   s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)        alpha from 0.1 to 1 in steps, or s = 1
 *   Q(X diag(s)^-1) Q(W diag(s))^T                     the s whose products lie nearest to X W^T, over a sample of inputs
 *
 * As with AWQ the division is folded into what produces the inputs.
 */
#pragma once
#include <stdint.h>
#include "gpu-worker/tools/awq.h"
#include "libprompt/error.h"

/* scales [cols] become the best ones for the matrices together; inputs [n_inputs, cols]. *kept: the squared error of the products
 * as a share of that with all scales 1, at most 1. KVG_NOMEM. */
int smooth_search(const struct awq_matrix *matrices, uint32_t n_matrices, uint32_t cols, const float *inputs, uint32_t n_inputs,
                  uint32_t threads, float *scales, double *kept, struct kvg_error *err);
