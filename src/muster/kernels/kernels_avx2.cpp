#define MUSTER_ISA "avx2"
#define MUSTER_KERNELS kAvx2Kernels
#include "muster/kernels/reduce_kernels.inc"
