"""An example on several processes, with the environment that torchrun gives to each."""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run_on_ranks(path, ranks, arguments, folder):
    """Return what the first of so many ranks printed; raise what one raised, or where its exit code is not 0.

    The ranks are children of multiprocessing, which leave by ``os._exit`` after ``main``. Those of torchrun end Python
    as well, where a thread of torch that asks for Python's lock aborts the process: "terminate called without an active
    exception" (pytorch/pytorch issue 190489; with torch 2.13 a test failed with these words).

    Args:
        path: of the example.
        ranks: how many.
        arguments: of its command line.
        folder: of the first rank's output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    printed = folder / "printed.txt"
    mp.get_context("forkserver").set_forkserver_preload(["torch", "transformers"])
    mp.start_processes(_run, (str(path), ranks, store.port, list(arguments), str(printed)), ranks,
                       start_method="forkserver")
    return printed.read_text("utf-8")


def _run(rank, path, ranks, port, arguments, printed):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    sys.path.insert(0, str(SOURCE))
    spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with open(printed if rank == 0 else os.devnull, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        code = example.main(arguments)
    if code:
        raise SystemExit(code)
