#define MUSTER_COMPRESS kAvx2Compress
#include "muster/kernels/compress_kernels.inc"
