"""Whether a profiler has hooked itself into Triton's launches: it sees those alone that Triton makes its own way."""

from collections.abc import Callable


def watching() -> Callable[[], bool]:
    """Return what tells, at every launch anew, whether one has."""
    from triton import knobs

    runtime = knobs.runtime

    def watched() -> bool:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # each a chain, a function or None
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    return watched
