#define MUSTER_COMPRESS kBaselineCompress
#include "muster/collective/compress_kernels.inc"
