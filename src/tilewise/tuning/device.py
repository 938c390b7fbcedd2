"""The few facts of a device that a tile size depends on."""

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024
# Shared memory that one CTA may use (LDS on AMD). CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; AMD CDNA3 ISA guide, section 3.2.
_SHARED_MEMORY = {
    "sm_75": 64 * KIB, "sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB,
    "sm_100": 227 * KIB, "sm_103": 227 * KIB, "sm_120": 99 * KIB, "sm_121": 99 * KIB,
}
_AMD_SHARED_MEMORY = 64 * KIB


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What heuristics and tables know of a device.

    Attributes:
        name: folder name of its tuning tables, e.g. "nvidia-h200".
        arch: "sm_90", "gfx942", ..., or "interpreter" for Triton on the CPU.
        shared_memory: bytes that one CTA may use.
    """

    name: str
    arch: str
    shared_memory: int

    @classmethod
    def of_arch(cls, arch: str, name: str = "") -> "DeviceSpec":
        """Describe a device by its architecture alone; an unknown NVIDIA one gets the smallest limit, 64 KiB."""
        if arch.startswith("gfx"):
            return cls(name or arch, arch, _AMD_SHARED_MEMORY)
        return cls(name or arch, arch, _SHARED_MEMORY.get(arch, 64 * KIB))


@cache
def device_spec(device: torch.device) -> DeviceSpec:
    """Describe a device of this machine; the CPU stands for the interpreter, which has no limits."""
    if device.type == "cpu":
        return DeviceSpec("interpreter", "interpreter", 1 << 40)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    return DeviceSpec.of_arch(arch, properties.name.lower().replace(" ", "-"))
