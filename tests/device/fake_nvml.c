/* Stands in for libnvidia-ml.so.1: one RTX 4090, one GB10 that tells no memory, one that LAST_CODE keeps away. Built by
   test_nvml.py. With CUT the first is in MIG mode: of its CUT instances this process may use the second and the third, and only root is told more. */
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
#ifndef INIT_CODE
#define INIT_CODE 0
#endif
#ifndef LAST_CODE
#define LAST_CODE 15 /* GPU is lost */
#endif
int nvmlInit_v2(void) { return INIT_CODE; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Unknown"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.95.05"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if (index == 2) return LAST_CODE;
    *out = (void *)(long)(index + 1);
    return 0;
}
#ifdef CUT
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *later) {
    if ((long)gpu != 1) return 3;
    *now = *later = 1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *out) { (void)gpu, *out = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **out) {
    (void)gpu;
    if (index == 0 || index >= CUT) return index ? 6 : 4; /* not found, no permission */
    *out = (void *)(long)(100 + index);
    return 0;
}
#endif
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) {
    if ((long)gpu > 100) return snprintf(out, size, "NVIDIA GeForce RTX 4090 MIG 1g.5gb"), 0;
    snprintf(out, size, (long)gpu == 1 ? "NVIDIA GeForce RTX 4090" : "NVIDIA GB10");
    return 0;
}
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) {
    snprintf(out, size, (long)gpu > 100 ? "MIG-%ld" : "GPU-%ld000", (long)gpu);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    *major = (long)gpu == 1 ? 8 : 12;
    *minor = (long)gpu == 1 ? 9 : 1;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *out) {
    if ((long)gpu == 2) return 3; /* not supported */
#ifdef CUT
    if ((long)gpu == 1) return 4; /* no permission */
    if ((long)gpu > 100) return *out = (memory_t){5ull << 30, 4ull << 30, 1ull << 30}, 0;
#endif
    out->total = 25757220864ull, out->free = 25000000000ull, out->used = 757220864ull;
    return 0;
}
int nvmlDeviceGetMaxClockInfo(void *gpu, unsigned kind, unsigned *out) {
    if ((long)gpu == 2) return 3;
    *out = kind == 2 ? 10501 : 0;
    return 0;
}
int nvmlDeviceGetMemoryBusWidth(void *gpu, unsigned *out) { *out = 384; return (long)gpu == 1 ? 0 : 3; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process_t *out) {
    (void)gpu;
    *count = 2;
    out[0] = (process_t){1, 1 << 20, 0, 0};
    out[1] = (process_t){4194999, ~0ull, 0, 0};
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int since, unsigned long long *out) {
    *out = kind == 1 && since == 0 ? 3 : 0;
    return (long)gpu == 1 ? 0 : 3;
}
/* What only the first card tells: link, power, heat, modes. */
#define TOLD(name, value) int name(void *gpu, unsigned *out) { if ((long)gpu == 2) return 3; *out = value; return 0; }
TOLD(nvmlDeviceGetCurrPcieLinkWidth, 8)
TOLD(nvmlDeviceGetMaxPcieLinkWidth, 16)
TOLD(nvmlDeviceGetMaxPcieLinkGeneration, 4)
TOLD(nvmlDeviceGetEnforcedPowerLimit, 300000)
TOLD(nvmlDeviceGetPowerManagementDefaultLimit, 450000)
TOLD(nvmlDeviceGetPowerUsage, 123456)
TOLD(nvmlDeviceGetDisplayActive, 1)
int nvmlDeviceGetTemperature(void *gpu, unsigned sensor, unsigned *out) {
    if ((long)gpu == 2 || sensor) return 3;
    *out = 61;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *out) {
    *out = (long)gpu == 1 ? 0x1 | 0x4 | 0x20 | 0x40 : 0;
    return 0;
}
int nvmlDeviceGetEccMode(void *gpu, unsigned *now, unsigned *later) {
    if ((long)gpu == 2) return 3;
    *now = 0, *later = 1;
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *out) {
    (void)one, (void)other;
    *out = 30;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned kind, unsigned *out) {
    (void)one, (void)other;
    *out = kind ? 5 : 2;
    return 0;
}
