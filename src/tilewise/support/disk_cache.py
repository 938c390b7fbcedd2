"""Files that outlast a process, in the folder of ``settings.cache_folder``."""

import os
import secrets
import threading
from pathlib import Path


def keep(content: bytes, path: Path) -> None:
    """Write the file whole or not at all, with the permissions that the user gives files: others may share the folder.

    Processes that make the same at once put the same there.

    Raises:
        OSError: the folder cannot be made, or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
