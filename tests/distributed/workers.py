"""Processes of one group that run functions of this folder together, for as long as a test session lasts."""

import importlib
import math
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

RANKS = 4
SHAPES = ((2, 2), (4, 1), (1, 4))  # of meshes of two dims
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SECONDS = 60  # a message that nobody sends is waited for so long


class Failure(Exception):
    """What a rank raised, as text."""


def _serve(rank, ranks, device, store, connection, path):
    """Run what comes through the connection until None does."""
    sys.path[:0] = path
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{store}", rank=rank, world_size=ranks,
                            timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in range(1, ranks)}
    groups[ranks] = dist.group.WORLD
    meshes = {size: DeviceMesh.from_group(group, device, mesh=list(range(size))) for size, group in groups.items()
              if rank < size}
    # Of all ranks, which make them together.
    meshes |= {shape: DeviceMesh(device, torch.arange(ranks).view(shape), mesh_dim_names=("ring", "heads"))
               for shape in SHAPES if math.prod(shape) == ranks}
    while (task := connection.recv()) is not None:
        module, function, size, arguments = task
        try:
            result = getattr(importlib.import_module(module), function)(meshes[size], *arguments)
            connection.send((True, result))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Workers:
    """Ranks on CPUs, or on a GPU each; a task runs on the first ones, as many as it asks for, or on a mesh of all."""

    def __init__(self, path, ranks=RANKS, device="cpu"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["PYTHONPATH"] = os.pathsep.join(path)  # where the server finds what it imports
        context = mp.get_context("forkserver")  # imports once for all ranks
        context.set_forkserver_preload(["torch", "tilewise", "tilewise.distributed", "distributed.equality"])
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._ends, self._processes = [], []
        for rank in range(ranks):
            own, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, device, str(store), theirs, path), daemon=True)
            process.start()
            self._ends.append(own)
            self._processes.append(process)

    def results(self, ranks, module, function, *arguments):
        """Return, of each of the first ranks, whether it came to an end and what it returned or raised.

        ``ranks``: their number, or the shape of a mesh of all.
        """
        ends = self._ends[:ranks] if isinstance(ranks, int) else self._ends
        for end in ends:
            end.send((module, function, ranks, arguments))
        return [end.recv() for end in ends]

    def run(self, ranks, module, function, *arguments):
        """Return what each rank returned; raise what one raised."""
        found = self.results(ranks, module, function, *arguments)
        for is_done, result in found:
            if not is_done:
                raise Failure(result)
        return [result for _, result in found]

    def close(self):
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(SECONDS)
        self._folder.cleanup()
