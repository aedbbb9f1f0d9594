#define MUSTER_ISA "baseline"
#define MUSTER_KERNELS kBaselineKernels
#include "muster/kernels/reduce_kernels.inc"
