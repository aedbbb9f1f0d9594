// NVML for test_topology.py: gpu0 and gpu1 have two direct links, gpu2 and gpu3 have six to a switch of NVLink.
#include <stdio.h>
#include <string.h>

struct PciInfo {
  char legacy[16];
  unsigned int domain, bus, device, id, subsystem;
  char bus_id[32];
};

static const char* const kAddresses[] = {"00000000:3B:00.0", "00000000:3C:00.0", "00000000:86:00.0", "00000000:87:00.0"};
static const char* const kSwitch = "00000000:E0:00.0";

static int index_of(void* device) { return (int)((char*)device - (char*)0) - 1; }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = 4;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  *device = (char*)0 + index + 1;
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void* device, struct PciInfo* info) {
  strcpy(info->bus_id, kAddresses[index_of(device)]);
  return 0;
}
int nvmlDeviceGetNvLinkState(void* device, unsigned int link, unsigned int* active) {
  *active = link < (index_of(device) < 2 ? 2u : 6u);
  return link < 18 ? 0 : 2;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned int link, struct PciInfo* info) {
  const int index = index_of(device);
  (void)link;
  strcpy(info->bus_id, index < 2 ? kAddresses[1 - index] : kSwitch);
  return 0;
}
