#define MUSTER_ISA "avx2"
#define MUSTER_KERNELS kAvx2Kernels
#include "muster/collective/reduce_kernels.inc"
