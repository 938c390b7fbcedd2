"""Which config each kernel has that can be tuned, by the kernel's name in tables and commands."""

from tilewise.kernels.hopper.backward.config import HopperBackwardConfig
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.kernels.triton.config import DbiasConfig, DkdvConfig, DqConfig, ForwardConfig, TileConfig

TritonConfig = ForwardConfig | DkdvConfig | DqConfig | DbiasConfig
HopperConfig = HopperForwardConfig | HopperBackwardConfig
AnyConfig = TileConfig | HopperConfig

KINDS: dict[str, type[TritonConfig]] = {
    "forward": ForwardConfig, "dkdv": DkdvConfig, "dk": DkdvConfig, "dv": DkdvConfig, "dq": DqConfig,
    "dbias": DbiasConfig,
}
HOPPER_KINDS: dict[str, type[HopperConfig]] = {
    "hopper_forward": HopperForwardConfig, "hopper_backward": HopperBackwardConfig,
}
ALL_KINDS: dict[str, type[AnyConfig]] = {**KINDS, **HOPPER_KINDS}
