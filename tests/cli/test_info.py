"""``tilewise info``."""

import platform

import torch

from tilewise.dispatch import BACKENDS


def test_it_tells_versions_and_every_backend_on_every_device(run):
    facts = run("info", "--json").json
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == platform.python_version()
    cpu = facts["devices"][0]
    assert cpu["device"] == "cpu"
    assert set(cpu["backends"]) == set(BACKENDS)
    assert cpu["backends"]["reference"] == dict.fromkeys(("float16", "bfloat16", "float32", "float64"))
    assert "float64" in cpu["backends"]["triton"]["float64"]


def test_people_read_the_same(run):
    output = run("info").output
    assert torch.__version__ in output
    for name in BACKENDS:
        assert name in output
