"""Files that outlast a process: whole or not there, and readable by others."""

import os
import threading

import pytest

from tilewise.support import disk_cache


@pytest.mark.parametrize(("umask", "permissions"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_kept_kernel_has_the_permissions_that_the_user_gives_files(umask, permissions, tmp_path):
    """Other users of a shared folder could not read it, and each of their processes compiled every kernel."""
    before = os.umask(umask)
    try:
        disk_cache.keep(b"code", tmp_path / "kernel.cubin")
    finally:
        os.umask(before)
    (kept,) = tmp_path.iterdir()
    assert (kept.name, kept.read_bytes()) == ("kernel.cubin", b"code")
    assert kept.stat().st_mode & 0o777 == permissions


def test_kernel_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(disk_cache.os, "fsync", lambda number: seen.append([path.name for path in tmp_path.iterdir()]))
    disk_cache.keep(b"code", tmp_path / "kernel.cubin")
    ((unfinished,),) = seen
    assert unfinished.startswith(f"kernel.cubin.{os.getpid()}-{threading.get_ident()}-")
