#define MUSTER_COMPRESS kAvx512Compress
#include "muster/collective/compress_kernels.inc"
