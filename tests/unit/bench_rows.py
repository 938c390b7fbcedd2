"""Rows for tests of what is made from rows."""

from tilewise.bench.rows import Row


def row(provider="naive", s=512, direction="forward", **values):
    values = {"ms_p20": 1.9, "ms_p50": 2.0, "ms_p80": 2.2, "samples": 5, "tflops": 0.05, "gb_per_s": 3.0,
              "peak_mib": 12.5, "max_error": 1e-6, "mean_error": 1e-8, "checked": "full", "device_name": "a device",
              "torch": "2.13.0", "python": "3.11.7", "tilewise": "0.1.0", "date": "2026-01-02T03:04:05Z",
              "status": "ok", "grid": "cpu", "regime": "turns", **values}
    shape = {name: values.pop(name, usual) for name, usual in (("hq", 8), ("hk", 8), ("d", 64), ("dv", 64),
                                                               ("mask", "causal"))}
    name = "_".join([f"s{s}", *map(str, shape.values()), *values.get("options", "").split()])
    return Row(case=name, provider=provider, direction=direction, b=1, sq=s, sk=s, dtype="float32", layout="bhsd",
               **shape, **values)


def grid_rows():
    """Two providers, both passes, two lengths; tilewise four times as fast as naive."""
    return [row(provider, s, direction, ms_p20=0.9 * ms, ms_p50=ms, ms_p80=1.1 * ms, tflops=round(0.1 / ms, 8))
            for s in (512, 1024) for direction in ("forward", "backward")
            for provider, ms in (("naive", 4.0 * s), ("tilewise", 1.0 * s))]


def option_rows():
    """Plain calls of 2 ms and softcap at 3 ms, a peer that takes 4 and 6, and one that has no softcap."""
    return [row("tilewise", ms_p50=2.0), row("flex", ms_p50=4.0), row("naive", ms_p50=1.0),
            row("tilewise", options="softcap 30", ms_p50=3.0), row("flex", options="softcap 30", ms_p50=6.3),
            row("naive", options="softcap 30", ms_p50=None, status="refused")]
