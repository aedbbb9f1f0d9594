#define MUSTER_COMPRESS kAvx2Compress
#include "muster/collective/compress_kernels.inc"
