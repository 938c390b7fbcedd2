"""Score and mask functions as a user writes them, each in Triton and in torch."""

import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.functions import MaskFunction, ScoreFunction

REACH = 640  # of a table of relative positions, to either side


@triton.jit
def relative(score, batch, head, q_idx, k_idx, table):
    return score + tl.load(table + head * 1281 + (q_idx - k_idx + 640))


def relative_twin(score, batch, head, q_idx, k_idx, table):
    return score + table[head, q_idx - k_idx + REACH].to(score.dtype)


@triton.jit
def damped(score, batch, head, q_idx, k_idx, factors):
    return score * tl.load(factors + q_idx) / (1.0 + batch + tl.abs(q_idx - k_idx) * 0.01)


@triton.jit
def damped_derivative(dscore, score, batch, head, q_idx, k_idx, factors):
    return dscore * tl.load(factors + q_idx) / (1.0 + batch + tl.abs(q_idx - k_idx) * 0.01)


def damped_twin(score, batch, head, q_idx, k_idx, factors):
    return score * factors[q_idx].to(score.dtype) / (1.0 + batch + (q_idx - k_idx).abs() * 0.01)


@triton.jit
def squashed(score, batch, head, q_idx, k_idx):
    return score / (1.0 + tl.abs(score) / (1.0 + head))


@triton.jit
def squashed_derivative(dscore, score, batch, head, q_idx, k_idx):
    slope = 1.0 / (1.0 + tl.abs(score) / (1.0 + head))
    return dscore * slope * slope


def squashed_twin(score, batch, head, q_idx, k_idx):
    return score / (1.0 + score.abs() / (1.0 + head))


@triton.jit
def singular(score, batch, head, q_idx, k_idx):
    # Finite where the key is not ahead of the query; NaN or infinite, forth and back, elsewhere.
    return score * tl.sqrt((q_idx - k_idx + 1).to(tl.float32)) * 0.2


@triton.jit
def singular_derivative(dscore, score, batch, head, q_idx, k_idx):
    return dscore * tl.sqrt((q_idx - k_idx + 1).to(tl.float32)) * 0.2


def singular_twin(score, batch, head, q_idx, k_idx):
    return score * torch.sqrt((q_idx - k_idx + 1).to(score.dtype)) * 0.2


@triton.jit
def dilated(batch, head, q_idx, k_idx):
    return ((q_idx - k_idx) % (head + 2) == 0) & (tl.abs(q_idx - k_idx) <= 30)


def dilated_twin(batch, head, q_idx, k_idx):
    return ((q_idx - k_idx) % (head + 2) == 0) & ((q_idx - k_idx).abs() <= 30)


@triton.jit
def chosen(batch, head, q_idx, k_idx, keys):
    return tl.load(keys + k_idx) != 0  # of keys alone


def chosen_twin(batch, head, q_idx, k_idx, keys):
    return keys[k_idx] != 0


@triton.jit
def near(batch, head, q_idx, k_idx):
    distance = tl.abs(q_idx - k_idx)
    return (distance < 40) | (distance > 200)


def near_twin(batch, head, q_idx, k_idx):
    distance = (q_idx - k_idx).abs()
    return (distance < 40) | (distance > 200)


@triton.jit
def behind(batch, head, q_idx, k_idx, firsts):
    return q_idx >= tl.load(firsts + batch)  # of queries alone


def behind_twin(batch, head, q_idx, k_idx, firsts):
    return q_idx >= firsts[batch]


@triton.jit
def passing(b, h, q_idx, k_idx):
    return near(b, h, q_idx, k_idx)  # under other names


@triton.jit
def of_all(*arguments):
    return arguments[2] >= arguments[3]


def known_masks(case, device):
    """Masks of the library's own that are functions, for a case's sizes; a tree where its lengths are equal."""
    b, hq, sq, sk = case.b, case.hq, case.sq, case.sk
    generator = torch.Generator().manual_seed(11)

    def drawn(most, *shape):
        return torch.randint(most, shape, generator=generator).to(device)

    made = {"intervals": tw.intervals(drawn(sq, b, 1, sk, 2), drawn(sq + 30, 1, hq, sk, 2)),
            "blocks": tw.blocks(drawn(3, b, hq, -(-sq // 24), -(-sk // 40)) > 0, (24, 40)),
            "prefixes": tw.prefixes(drawn(sk, b), sk - sq)}
    if sq == sk:
        made["tree"] = tw.tree(drawn(7, b, sq).sort(1).values, [-1, 0, 1, 1, 0, -1])
    return made


def table_of(device, dtype=torch.float32):
    return torch.randn(4, 2 * REACH + 1, generator=torch.Generator().manual_seed(7)).to(device, dtype)


def score_functions(device):
    """One of each kind: a term read from a tensor, a factor, a curve, and one that is NaN where causal masks hide."""
    factors = torch.linspace(-1.5, 1.5, 640, device=device)
    return {"relative": ScoreFunction(relative, relative_twin, tensors=(table_of(device),)),
            "damped": ScoreFunction(damped, damped_twin, damped_derivative, (factors,)),
            "squashed": ScoreFunction(squashed, squashed_twin, squashed_derivative),
            "singular": ScoreFunction(singular, singular_twin, singular_derivative)}


def mask_functions(device):
    keys = (torch.arange(300, device=device) % 7 != 2).int()
    return {"dilated": MaskFunction(dilated, dilated_twin), "chosen": MaskFunction(chosen, chosen_twin, (keys,))}
