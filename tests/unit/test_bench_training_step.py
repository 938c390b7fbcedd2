"""benchmarks/training_step.py: its workloads, what each way to attend is held against, its rows and its table."""

import csv
import sys
from dataclasses import asdict, replace

import pytest
import torch

from compiled.compile_process import ROOT
from tilewise.bench.provenance import provenance

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import training_step
finally:
    sys.path.pop(0)

SMALL = ("--device", "cpu", "--dtype", "float32", "--tokens", "96", "--batch", "3", "--documents", "4", "--hidden",
         "32", "--heads", "4", "2", "--dim", "8", "--mlp", "48", "--layers", "2", "--repetitions", "2")


@pytest.fixture(scope="module")
def options():
    return training_step.parsed(SMALL)


@pytest.fixture(scope="module")
def model(options):
    torch.manual_seed(0)
    return training_step.Layers(options.layers, options.hidden, options.heads, options.dim, options.mlp)


def drawn(workload, options):
    return training_step.drawn(workload, options, torch.device("cpu"))


def test_every_workload_is_checked_timed_appended_and_printed(tmp_path, capsys):
    path = tmp_path / "new/training-step.csv"
    training_step.main([*SMALL, "--commit", "0123456789ab", "--optimizer", "--out", str(path)])
    training_step.main([*SMALL, "--commit", "0123456789ab", "--workloads", "packed", "--out", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["workload"], row["provider"], row["optimizer"]) for row in rows] == [
        (workload, provider, "True") for workload in training_step.WORKLOADS for provider in ("tilewise", "sdpa")] + [
        ("packed", "tilewise", "False"), ("packed", "sdpa", "False")]
    assert {(row["commit"], row["tokens"], row["torch"]) for row in rows} == {("0123456789ab", "96", torch.__version__)}
    assert int(rows[0]["real_tokens"]) == 96 > int(rows[2]["real_tokens"])
    assert all(0 < float(row["median_ms"]) <= float(row["p80_ms"]) and float(row["out_error"]) < 1e-5 for row in rows)
    last = capsys.readouterr().out.splitlines()
    assert last[-3].startswith("| packed | sdpa | ")
    assert last[-1].endswith(f"2 layers of 32, 4/2 heads of 8, MLP 48; float32; torch {torch.__version__}; commit "
                             "0123456789ab.")


def test_documents_restart_and_padding_lies_at_its_side(options):
    packed = drawn("packed", options)
    starts = (packed.positions[0] == 0).nonzero()[:, 0]
    assert (len(packed.x), len(starts), bool(packed.real.all())) == (1, 4, True)
    assert torch.equal(packed.positions[0, 1:], torch.where(packed.positions[0, 1:] == 0, 0,
                                                            packed.positions[0, :-1] + 1))
    left, right = drawn("padded-left", options), drawn("padded-right", options)
    assert torch.equal(left.real.flip(1), right.real)
    assert right.real[:, 0].all()
    assert right.real.sum(1).unique().numel() > 1
    assert torch.equal(left.positions[left.real], right.positions[right.real])
    assert float(left.dout[~left.real].abs().max()) == 0.0


@pytest.mark.parametrize("workload", training_step.WORKLOADS)
def test_packages_of_packed_sequences_get_the_tokens_that_are_no_padding(options, model, workload):
    batch, told = drawn(workload, options), []

    def one_by_one(q, k, v, ends, longest):
        told.append(ends.diff())
        assert longest == told[-1].max()
        k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
        parts = [torch.nn.functional.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts),
                                                                  is_causal=True).transpose(0, 1)
                 for parts in zip(*(tensor.split(told[-1].tolist()) for tensor in (q, k, v)), strict=True)]
        return torch.cat(parts)

    wanted = training_step.results(model, batch, training_step.by_sdpa)
    got = training_step.results(model, batch, training_step.packed_by(one_by_one))
    relative = training_step.errors(got, wanted)
    assert max(relative.values()) < 1e-5
    assert int(told[0].sum()) == int(batch.real.sum())


def test_a_table_is_made_of_the_rows_of_a_file(options, model, tmp_path):
    cpu = torch.device("cpu")
    rows = list(training_step.rows_of("packed", model, options, cpu, provenance(cpu, "")))
    training_step.append(rows, tmp_path / "rows.csv")
    made = training_step.table(tmp_path / "rows.csv")
    assert made == training_step.markdown(rows)
    assert f"| packed | sdpa | {next(row.median_ms for row in rows if row.provider == 'sdpa'):.1f} |" in made


def test_a_wrong_step_is_not_timed(options, model, monkeypatch):
    def blind_to_documents(batch):
        ids = torch.zeros_like(batch.positions)
        return training_step.by_tilewise(replace(batch, positions=ids + torch.arange(96)))

    monkeypatch.setattr(training_step, "implementations", lambda *where: {
        "blind": blind_to_documents, "sdpa": training_step.by_sdpa})
    origin = training_step.provenance(torch.device("cpu"), "", "0123456789ab")
    with pytest.raises(AssertionError, match=r"blind: out has a relative error of 0\.\d+; allowed is .*e-07\."):
        list(training_step.rows_of("packed", model, options, torch.device("cpu"), origin))


def test_sdpa_itself_has_a_bound_and_nan_is_no_result():
    exact = dict.fromkeys(training_step.FACTORS, 0.0)
    with pytest.raises(AssertionError, match=r"sdpa: dx has a relative error of 0\.2; allowed is 0\.1\."):
        training_step.check("sdpa", exact | {"dx": 0.2}, exact | {"dx": 0.2}, 1e-7)
    with pytest.raises(AssertionError, match="ours: dw_q has a relative error of nan"):
        training_step.check("ours", exact | {"dw_q": float("nan")}, exact, 1e-7)
    training_step.check("ours", exact | {"out": 0.02}, exact | {"out": 0.01}, 1e-7)


def test_on_a_gpu_kernels_of_packed_sequences_that_are_here_take_part(monkeypatch):
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(training_step.FlashAttentionProvider, "missing", lambda self, device: None)
    monkeypatch.setattr(training_step, "flash_attn_of", lambda module: module)
    assert list(training_step.implementations(gpu, half)) == [
        "tilewise", "sdpa", "torch_varlen", "flash_attn2", "flash_attn3", "flash_attn4"]
    assert list(training_step.implementations(gpu, torch.float32)) == ["tilewise", "sdpa"]


def test_flash_attn_is_called_on_causal_sequences(monkeypatch):
    asked = {}

    class Module:
        @staticmethod
        def flash_attn_varlen_func(q, k, v, **options):
            asked.update(options)
            return q, "lse"

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Module)
    q, ends = torch.ones(3, 2, 8), torch.tensor((0, 1, 3))
    assert training_step.flash_attn_of("flash_attn_interface")(q, q, q, ends, 2) is q
    assert asked == {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 2, "max_seqlen_k": 2, "causal": True}


def test_torchs_varlen_attention_is_asked_for_a_causal_mask_with_heads_repeated(monkeypatch):
    asked = {}
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v, *given, **options: asked.update(
        options, heads=k.shape[1], given=given) or q)
    q, k, ends = torch.ones(3, 4, 8), torch.ones(3, 2, 8), torch.tensor((0, 1, 3))
    training_step.torch_varlen(q, k, k, ends, 2)
    assert asked == {"window_size": (-1, 0), "heads": 4, "given": (ends, ends, 2, 2)}


def test_rows_are_appended_under_one_header(tmp_path):
    row = training_step.Row(**dict.fromkeys(training_step.Row.__dataclass_fields__, "1"))
    for _ in range(2):
        training_step.append([row], tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().splitlines() == [",".join(asdict(row)), *[",".join("1" * 26)] * 2]
