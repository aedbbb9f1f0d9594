#define MUSTER_ISA "avx512"
#define MUSTER_KERNELS kAvx512Kernels
#include "muster/collective/reduce_kernels.inc"
