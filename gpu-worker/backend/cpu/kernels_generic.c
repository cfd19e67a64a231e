#define KERNELS_SYMBOL kernels_generic
#define KERNELS_NAME   "generic"
#include "gpu-worker/backend/cpu/kernels.inc.h"
