"""The names that differ between Triton versions; nothing else here may look at the version."""

from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in 3.8; the old names are gone in 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
