#define MUSTER_ISA "avx512"
#define MUSTER_KERNELS kAvx512Kernels
#include "muster/kernels/reduce_kernels.inc"
