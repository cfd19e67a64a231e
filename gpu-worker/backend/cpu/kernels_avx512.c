#define KERNELS_SYMBOL kernels_avx512
#define KERNELS_NAME   "avx512-vnni"
#include "gpu-worker/backend/cpu/kernels.inc.h"
