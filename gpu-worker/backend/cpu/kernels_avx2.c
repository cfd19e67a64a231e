#define KERNELS_SYMBOL kernels_avx2
#define KERNELS_NAME   "avx2"
#include "gpu-worker/backend/cpu/kernels.inc.h"
