"""Every Triton kernel compiles for every target, and with Triton from end to end of its range, without a device.

Without options each does so once for each architecture, in turns with the ends and the installed version between them.
Options are the same code for all architectures: sm_90 has each, and the others share them.

Bounds on spills are in bytes of stack a thread. On sm_90 the kernels through descriptors, which long sequences take,
need 176 at most (3.6.0); the high ceiling is for those through pointers.
"""

from itertools import product

import pytest

from compiled.compile_process import ENDS, INSTALLED, VERSIONS, compile_all

pytestmark = pytest.mark.aot

MASKS = {"full": [None, None, None], "causal": [None, 0, "top_left"]}
SHIFTED, EXCEPTED = [None, 0, "bottom_right"], [63, 0, "bottom_right", 7, 5, 1024]
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Ceilings that today's tiles keep, not tight ones.
OPTIONS = ["bias", "alibi_slopes", "mask", "sinks", "seed", "softcap"]
PADDED = ["seqlens_q", "seqlens_k"]
PACKED = ["cu_seqlens_q", "cu_seqlens_k"]
TILED = ["mask", "tiles_q", "tiles_k"]
DOCUMENTS = ["documents_q", "documents_k"]
OPTIONS_SPILL_BOUND = {"sm_80": 768, "sm_90": 1536, "sm_100": 1536, "gfx942": 64}
WIDE_SPILL_BOUND = {"sm_80": 64, "sm_90": 1024, "sm_100": 768, "gfx942": 64}  # at width 512, and with a tail
SPILL_BOUND = {"sm_80": 128, "sm_90": 768, "sm_100": 768, "gfx942": 0}


def in_turns(kinds, versions, version, arch):
    """Return this version's share of the kinds: the versions share them for each architecture, from another one on.

    So each kind is compiled for each architecture that a test names, and where those are as many as the versions, with
    each version.
    """
    return list(kinds)[(versions.index(version) + ARCHS.index(arch)) % len(versions)::len(versions)]


def spread(*kinds, versions=ENDS):
    """Parametrise by version, architecture and kind: each kind for sm_90 and, with another version, for one other."""
    others = [arch for arch in ARCHS if arch != "sm_90"]
    n = len(versions)
    rows = [row for i, kind in enumerate(kinds) for row in (
        (versions[i % n], "sm_90", kind), (versions[(i + 1) % n], others[i % len(others)], kind))]
    return pytest.mark.parametrize(("version", "arch", "kind"), rows,
                                   ids=[f"{version}-{arch}-{i // 2}" for i, (version, arch, _) in enumerate(rows)])


def requests(arch):
    return [{"arch": arch, "kernel": kernel, "d": d, "dtype": "bfloat16", "mask": mask, "descriptors": described}
            for d in (64, 128, 256) for mask in MASKS.values()
            for kernel in ("forward", *(("dk", "dv") if d == 256 else ("dkdv",)), "dq", "delta")
            for described in ((False, True) if arch == "sm_90" else (False,))]


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_kernels_compile_within_shared_memory(arch):
    """Without tensor cores NVIDIA's are alike but for the room: sm_80, which has the least, gets all; two share."""
    wanted = [{"arch": arch, "kernel": kernel, "d": d, "dtype": "float32", "mask": MASKS["causal"],
               "descriptors": False}
              for d in (64, 256) for kernel in ("forward", *(("dk", "dv") if d == 256 else ("dkdv",)), "dq", "delta")]
    if arch in ("sm_90", "sm_100"):
        wanted = wanted[ARCHS.index(arch) % 2::2]
    rows = compile_all(INSTALLED, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ENDS)
def test_kernels_of_wide_heads_compile_within_registers_and_shared_memory(version, arch):
    """Tiles of 512, and past that a second one: where the accumulators of the narrower heads' tiles would not fit.

    The kernels of the second tile hold the others' code and more: those by themselves are compiled for sm_90 alone.
    """
    dims = {"forward": (512, 576), "dk": (576, 512), "dv": (512, 576), "dq": (576, 512)}  # in turns: each end has both
    wanted = [{"arch": arch, "kernel": kernel, "d": d, "dv": 512, "dtype": "bfloat16", "mask": MASKS["causal"],
               "descriptors": False} for kernel, pair in dims.items() for d in (pair if arch == "sm_90" else (576,))]
    widest = wanted[0] | {"d": 576}
    wanted += [widest | {"kernel": "delta"}, widest | {"kernel": "dbias", "options": ["bias"]}]
    wanted = in_turns(wanted, ENDS, version, arch)
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        # dbias holds all four tiles of a head at once, and its loop has no next one to stream.
        assert row["stack"] <= (2048 if row["kernel"] == "dbias" else WIDE_SPILL_BOUND[arch]), row
        if arch == "sm_90" and row["kernel"] != "delta":
            assert row["wgmma"] > 0, row


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "gfx942"])  # where it spills, and is not chosen
@pytest.mark.parametrize("version", ENDS)
def test_the_kernel_of_a_single_tile_of_keys_compiles_within_registers_and_shared_memory(version, arch):
    wanted = [{"arch": arch, "kernel": "dkdv_and_dq", "d": d, "s": 64, "dtype": "bfloat16", "mask": mask,
               "descriptors": False, "options": names}
              for d in (64, 128) for mask in MASKS.values() for names in ([], ["bias", "seed", "softcap"])]
    wanted = wanted if arch == "sm_90" else in_turns(wanted, ENDS, version, arch)
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] <= (OPTIONS_SPILL_BOUND if row["options"] else SPILL_BOUND)[arch], row
        if arch == "sm_90":
            assert row["wgmma"] > 0, row


@spread((SHIFTED, PACKED), (EXCEPTED, PACKED), (SHIFTED, DOCUMENTS), (EXCEPTED, TILED),
        (EXCEPTED, PADDED + DOCUMENTS + ["sinks"]))
def test_kernels_of_lengths_documents_and_tile_lists_compile_within_shared_memory(version, arch, kind):
    mask, names = kind
    wanted = [{"arch": arch, "kernel": kernel, "d": 128, "dtype": "bfloat16", "mask": mask,
               "descriptors": arch == "sm_90" and kernel != "delta", "options": names}
              for kernel in ("forward", "dkdv", "dq", "delta")]
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] <= OPTIONS_SPILL_BOUND[arch], row


@spread((64, "bfloat16"), (128, "float32"), (256, "float16"))
def test_kernels_of_partial_results_compile_without_a_spill(version, arch, kind):
    d, dtype = kind
    rows = compile_all(version, [{"arch": arch, "kernel": kernel, "d": d, "dtype": dtype, "mask": MASKS["full"],
                                  "descriptors": False} for kernel in ("merge_partial", "write_rows")])
    assert len(rows) == 2
    for row in rows:
        assert row["stack"] == 0, row
        assert row["shared"] <= row["limit"], row


@spread(*product((64, 256), ([63, 0, "bottom_right"], [None, None, None]), (PACKED, [*PADDED, "sinks"])))
def test_zero_fill_and_lengths_kernels_compile_without_a_spill(version, arch, kind):
    d, mask, names = kind
    wanted = [{"arch": arch, "kernel": kernel, "d": d, "dtype": "bfloat16", "mask": mask, "descriptors": False,
               "options": names} for kernel in ("zero_fill_out", "zero_fill_gradients", "lengths")]
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["stack"] == 0, row


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [["mask:chosen"], ["mask:dilated", "documents_q", "documents_k"],
                                     ["mask:tree"], ["mask:intervals"], ["mask:blocks"], ["mask:prefixes"],
                                     ["mask:joined"], ["mask:traced"]], ids=str)
def test_what_builds_a_mask_plan_compiles_with_functions_of_the_users_own(version, options):
    """A division takes many registers: 3.6.0 spills 88 bytes of the bits' kernel where one is by the 64-bit head."""
    rows = compile_all(version, [{"arch": "sm_90", "kernel": kernel, "d": 128, "dtype": "bfloat16", "options": options,
                                  "mask": MASKS["causal"], "descriptors": False}
                                 for kernel in ("mask_cells", "mask_lists", "mask_bits")])
    assert len(rows) == 3
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] <= 128, row


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [["score:traced"], ["mask:traced"]], ids=str)
def test_functions_of_generated_text_compile_within_shared_memory(version, options):
    rows = compile_all(version, [{"arch": "sm_90", "kernel": kernel, "d": 64, "dtype": "bfloat16", "descriptors": True,
                                  "mask": MASKS["causal"], "options": options}
                                 for kernel in ("forward", "dkdv", "dq")])
    assert len(rows) == 3
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] <= OPTIONS_SPILL_BOUND["sm_90"], row


@spread(["score:relative"], ["score:damped"], ["mask:chosen"], ["mask:tree"], ["mask:blocks"],
        ["score:damped", "mask:dilated", *OPTIONS])
def test_kernels_with_functions_of_the_users_own_compile_within_shared_memory(version, arch, kind):
    """Functions are arguments inside of tuples, which no other option has. With all the others some kernels spill."""
    wanted = [{"arch": arch, "kernel": kernel, "d": 128, "dtype": "bfloat16", "mask": MASKS["causal"],
               "descriptors": arch == "sm_90" and kernel != "delta", "options": kind}
              for kernel in ("forward", "dkdv", "dq", "delta", "dbias") if kernel != "dbias" or "bias" in kind]
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        if "bias" not in row["options"]:
            assert row["stack"] <= OPTIONS_SPILL_BOUND[arch], row


def row_within_bounds(version, arch, kernel, options):
    row, = compile_all(version, [{"arch": arch, "kernel": kernel, "d": 128, "dtype": "bfloat16",
                                  "mask": MASKS["causal"], "descriptors": arch == "sm_90", "options": options}])
    assert row["shared"] <= row["limit"], row
    assert row["stack"] <= OPTIONS_SPILL_BOUND[arch], row
    return row


@spread(*((kernel, OPTIONS) for kernel in ("forward", "dkdv", "dq", "dbias")),
        # Alone too: a field that is absent and one that is there were once mistaken for one another.
        *(("forward", [name]) for name in OPTIONS), versions=VERSIONS)
def test_kernels_with_every_option_compile_within_shared_memory(version, arch, kind):
    """Nested tuples of arguments are what differs most between versions of Triton."""
    row_within_bounds(version, arch, *kind)


@spread(("dq_alone", ["bias"]), ("dq_first_of_1", ["bias"]), ("dq_next_of_1", ["bias"]), ("dq_last_of_1", ["bias"]),
        ("dq_last_of_1", OPTIONS), ("dq_alone", ["bias", *PACKED]), ("dq_next_of_1", ["bias", *TILED]))
def test_kernels_that_make_a_bias_gradient_beside_dq_compile_within_shared_memory(version, arch, kind):
    row = row_within_bounds(version, arch, *kind)
    if arch == "sm_90" and row["options"] == ["bias"]:
        assert row["shared"] <= 115712, row  # two programs a multiprocessor: half of 228 KiB, less 1 KiB each
        assert row["stack"] <= 256, row


@pytest.mark.parametrize("version", VERSIONS)
def test_dq_of_several_batch_elements_keeps_its_accumulators_in_registers(version):
    """The spills are those of the masked loop, most of them, and of adding earlier sums (at head dim 64)."""
    wanted = [{"arch": "sm_90", "kernel": f"dq_{which}_of_2", "d": d, "dtype": "bfloat16",
               "mask": MASKS["causal"], "descriptors": False, "options": options}
              for which, options in (("all", ["bias"]), ("last", ["bias"]), ("last", OPTIONS)) for d in (64, 128)]
    wanted = in_turns(wanted, VERSIONS, version, "sm_90")
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["expected"] + 1024 <= row["limit"], row
        if row["options"] == ["bias"]:
            assert row["stack"] <= 384, row
        assert row["wgmma"] > 0, row


@pytest.mark.parametrize("version", VERSIONS)
def test_three_ctas_of_dbias_share_an_sm(version):
    kinds = (72, "full"), (72, "causal"), (128, "causal"), (128, "full")
    wanted = [{"arch": "sm_90", "kernel": "dbias", "d": d, "dtype": "bfloat16", "mask": MASKS[mask],
               "descriptors": True, "options": ["bias"]} for d, mask in in_turns(kinds, VERSIONS, version, "sm_90")]
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["expected"] <= 76800, row  # a third of 228 KiB, less 1 KiB each
        assert row["registers"] <= 168, row  # a third of 65536 for 128 threads, in eights
        assert row["stack"] <= 64, row
        assert row["bulk"] > 0, row
        assert row["wgmma"] > 0, row


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("version", ENDS)
def test_dropout_draws_where_the_scores_are(version, arch):
    """Shared memory is that of the tiles: draws once came in another layout, and went through it in every step."""
    wanted = [{"arch": arch, "kernel": kernel, "d": d, "dtype": "bfloat16", "mask": MASKS["causal"],
               "descriptors": arch == "sm_90", "options": ["seed"]}
              for d, kernel in in_turns(product((64, 128), ("forward", "dkdv", "dq")), ENDS, version, arch)]
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["expected"] + 1024, row  # barriers, lse and delta


@pytest.mark.parametrize("version", ENDS)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "delta"])
def test_one_kernel_serves_every_length_and_number_of_heads(version, kernel):
    """Triton compiles another kernel for a 1, or a multiple of 16, in a tuple of arguments, where it is given one."""
    calls = {}, {"s": 4001}, {"s": 1}, {"heads": (1, 1)}, {"heads": (16, 16)}, {"mask": [None, 16, "top_left"]}
    rows = compile_all(version, [{"arch": "sm_80", "kernel": kernel, "d": 64, "dtype": "bfloat16",
                                  "mask": MASKS["causal"], "descriptors": False} | call for call in calls])
    assert len({row["key"] for row in rows}) == 1
    assert len(rows) == len(calls)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_compile_within_registers_and_shared_memory(version, arch):
    wanted = in_turns(requests(arch), VERSIONS, version, arch)
    rows = compile_all(version, wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] <= SPILL_BOUND[arch], row
        if row["kernel"] == "delta":
            continue
        if arch == "sm_90":
            assert row["wgmma"] > 0, row
        if arch == "sm_80":
            assert row["mma"] > 0, row
        if arch == "gfx942":
            assert row["mfma"] > 0, row
        if arch == "sm_100":
            assert row["tcgen05"] > 0, row
