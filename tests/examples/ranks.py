"""An example on several processes, with the environment that torchrun gives to each."""

import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run_on_ranks(path, ranks, arguments, folder):
    """Return what the first of so many ranks printed; raise what one raised, or where its exit code is not 0.

    The ranks are children of multiprocessing, which end behind ``main``. Those of torchrun end Python as well, where a
    thread of torch that asks for Python's lock aborts the process: "terminate called without an active exception"
    (pytorch/pytorch issue 190489). A rank was seen to be aborted with these words, once.

    Args:
        path: of the example.
        ranks: how many.
        arguments: of its command line.
        folder: of the first rank's output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = folder / "printed.txt"
    mp.get_context("forkserver").set_forkserver_preload(["torch", "transformers"])
    mp.start_processes(_run, (str(path), ranks, port, list(arguments), str(printed)), ranks, start_method="forkserver")
    return printed.read_text("utf-8")


def _run(rank, path, ranks, port, arguments, printed):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(SOURCE))
    spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with open(printed if rank == 0 else os.devnull, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        code = example.main(arguments)
    if code:
        raise SystemExit(code)
