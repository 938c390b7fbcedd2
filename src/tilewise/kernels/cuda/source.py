"""The CUDA source: attention_fp32.cu, which NVRTC compiles, and the headers that it includes, beside this file."""

from pathlib import Path

FOLDER = Path(__file__).parent
MAIN = "attention_fp32.cu"


def source_files() -> dict[str, bytes]:
    """Return the text of every file by its name, MAIN first; NVRTC finds an include by that name, not on a path."""
    return {path.name: path.read_bytes() for path in (FOLDER / MAIN, *sorted(FOLDER.glob("*.cuh")))}
