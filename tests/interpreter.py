"""Triton's interpreter without a repetition: it patches the language for each call of a device function anew."""

from triton.runtime import interpreter


def patch_once_a_launch(monkeypatch):
    """Patch for the first call of each module's functions in a launch; the others took half of the interpreter's time.

    What patching puts in place is the same each time, and stays until the launch has ended.
    """
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return None  # which a launch would need, but not a call in it
        scope = patch(fn)
        patched.add(id(fn.__globals__))
        return scope

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
