"""The few facts of a problem that tiles depend on, whatever kernel it is for."""

from tilewise.problem import AttentionProblem

LENGTH_OF_ANY = 512  # of sequences whose lengths may not decide: the least that has ping-pong and a frozen maximum


def kernel_width(problem: AttentionProblem) -> int:
    """Padded head dim that decides the tile: of q and k or of v, the wider, and 64 at least; a tail's width added."""
    return max(64, problem.width) + problem.tail_width


def lengths_may_decide(problem: AttentionProblem) -> bool:
    """Whether a tile may be chosen by sq and sk: not where these are a sequence's neighbours', and none may matter."""
    return not (problem.deterministic and problem.sequences.are_data)


def deciding_length(problem: AttentionProblem, length: int) -> int:
    """Return the length by which a tile is chosen, of packed sequences their mean; always one where none may decide."""
    return length // (problem.sequences.packed or 1) if lengths_may_decide(problem) else LENGTH_OF_ANY


def has_pairs(problem: AttentionProblem) -> bool:
    """Whether a kernel loads or draws something for each pair of a query and a key."""
    scores = problem.scores
    return (scores.bias is not None or scores.mask is not None or scores.dropout_p > 0.0
            or any(facts.dtypes for facts in scores.functions))
