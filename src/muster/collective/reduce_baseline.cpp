#define MUSTER_ISA "baseline"
#define MUSTER_KERNELS kBaselineKernels
#include "muster/collective/reduce_kernels.inc"
