#define MUSTER_COMPRESS kBaselineCompress
#include "muster/kernels/compress_kernels.inc"
