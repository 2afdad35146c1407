// A driver that launches nothing and says what it was asked for: under its name, it takes libcuda's place in a process of a test.

#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define OK CUDA_SUCCESS
int stub_maps, stub_launches, stub_pointers, stub_contexts, stub_fails, stub_without_context;
static int sizes[128], params;
static struct {
  uint64_t config[8], function, stream;
  uint32_t attributes;
  CUlaunchAttribute attribute[8];
  char bytes[8192];
  int size;
} said;

// Sizes of the next launches' parameters, without the two scratch pointers that Triton adds.
void stub_sizes(int count, const int *given) {
  params = count;
  memcpy(sizes, given, count * sizeof(int));
}

void *stub_said(void) { return &said; }
int stub_said_bytes(void) { return sizeof(said); }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **given, void **extra) {
  ++stub_launches;
  if (stub_fails) return stub_fails;
  memset(&said, 0, sizeof(said));
  uint64_t numbers[] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes, extra != 0};
  memcpy(said.config, numbers, sizeof(numbers));
  said.function = (uint64_t)function;
  said.stream = (uint64_t)config->hStream;
  said.attributes = config->numAttrs;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    CUlaunchAttribute *to = said.attribute + i;
    to->id = config->attrs[i].id;
    if (to->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      memcpy(&to->value, &config->attrs[i].value, 12);
    else
      memcpy(&to->value, &config->attrs[i].value, 4);
  }
  for (int i = 0; i < params + 2; ++i) {
    int size = i < params ? sizes[i] : 8;
    if (size == sizeof(CUtensorMap) && (uintptr_t)given[i] % 64) return CUDA_ERROR_MISALIGNED_ADDRESS;
    memcpy(said.bytes + said.size, given[i], size);
    said.size += size;
  }
  return OK;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  ++stub_maps;
  if (!address || (uintptr_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
  char *to = (char *)map;
  memset(to, 0xff, sizeof(*map));  // the bit that is cleared for small tensors is one of these
  memcpy(to, &address, 8);
  for (cuuint32_t i = 0; i < rank; ++i) {
    memcpy(to + 16 + 8 * i, shape + i, 8);
    if (i + 1 < rank) memcpy(to + 56 + 8 * i, strides + i, 8);
    memcpy(to + 88 + 4 * i, box + i, 4);
    if (steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  char more[] = {(char)type, (char)rank, (char)interleave, (char)swizzle, (char)promotion, (char)fill};
  memcpy(to + 108, more, sizeof(more));
  return OK;
}

CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr address) {
  ++stub_pointers;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER || address == 0xbad0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t seen_as = address + (uint64_t)1 * 0x1000000000000;  // elsewhere than for the host
  memcpy(to, &seen_as, 8);
  return OK;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = stub_without_context ? 0 : (CUcontext)1;
  return OK;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  ++stub_contexts;
  stub_without_context = 0;
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return OK;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "some error";
  return OK;
}
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return OK;
}
CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return OK;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448;  // bytes of shared memory, and enough of anything else
  return OK;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)2;
  return OK;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x5678;
  return OK;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return OK;
}
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, OK; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return OK; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return OK; }
CUresult cuModuleUnload(CUmodule module) { return OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { return *count = 1, OK; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, OK; }
CUresult cuInit(unsigned flags) { return OK; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, OK; }
