"""What shapes that do not fit were probably meant to be: the last sentence of an error that is raised anyway.

No call is refused on suspicion. Sizes alone cannot tell heads from positions; where a call has failed, they can say
which way of reading them would have made it legal.
"""

from collections.abc import Sequence

Sizes = tuple[int, ...]
# Read together first: tensors that one projection made lie alike.
_TOGETHER = (("q", "k", "v"), ("k", "v"), ("q",), ("k",), ("v",))


def layout_hint(names: Sequence[str], q: Sizes, k: Sizes, v: Sizes, *, packed: bool = False) -> str:
    """Say which of q, k and v look like (b, s, h, d), if any do; "" otherwise.

    They do where what would be heads outnumber the positions, and the call were legal with the two dims swapped.

    Args:
        names: what the call names q, k and v.
        q, k, v: shapes (b, h, s, d); of packed rows (1, h, total, d).
        packed: whether the user's tensors are (total, h, d).
    """
    shapes = {"q": q, "k": k, "v": v}
    for swapped in _TOGETHER:
        # One query, of a decoding step, is outnumbered by any heads.
        if not all(shapes[one][1] > shapes[one][2] or (one == "q" and len(swapped) == 3 and shapes[one][1] == 1)
                   for one in swapped):
            continue
        if _is_legal(*(_swapped(shape) if one in swapped else shape for one, shape in shapes.items())):
            said = [name for one, name in zip("qkv", names, strict=True) if one in swapped]
            if packed:
                return f" {_listed(said)} {_look(said)} like (h, total, d): pass {_calls(said, 'transpose(0, 1)')}."
            return f" {_listed(said)} {_look(said)} like (b, s, h, d): pass {_calls(said, 'transpose(1, 2)')}."
    return ""


def operand_hint(name: str, shape: Sizes, full: Sizes, letters: tuple[str, ...], q: Sizes | None) -> str:
    """Say what an operand of this shape was probably meant to be, or that q is stored in another order; "" otherwise.

    Args:
        name: of the operand, as the user knows it.
        shape, full: what it has, and what it should broadcast to.
        letters: what stands at each place of ``full``.
        q: shape of q; None where its dims do not tell (packed sequences, a cache).
    """
    if name in ("bias", "mask") and len(shape) == 4 and shape[0] == 1 and shape[3] == full[3]:
        if shape[1:3] == (1, full[0]):
            lengths = f", or lengths as {'seqused_k' if q is None else 'seqlens_k'}" if name == "mask" else ""
            return f" Of padding, (b, sk), pass {name}[:, None, None]{lengths}."
        if shape[1:3] in ((full[0], 1), (full[0], full[2])):
            return f" Of (b, {'1' if shape[2] == 1 else 'sq'}, sk), make the dim of heads: unsqueeze(1)."
    if name in ("k", "v") and shape[0] == full[0] and shape[2:] == full[1::2]:
        return f" {name} looks like (b, s, h, d): pass {name}.transpose(1, 2)."
    if q is not None and q[1] > q[2] and len(shape) == len(letters):
        swapped = {"hq": q[2], "sq": q[1]}
        places = [(own, swapped[letter], size) for own, size, letter in zip(shape, full, letters, strict=True)
                  if letter in swapped and own != 1]
        if places and all(own == wanted for own, wanted, _ in places) and any(own != size for own, _, size in places):
            return " It fits a q of (b, s, h, d): pass q.transpose(1, 2), and so k and v."
    return ""


def _swapped(shape: Sizes) -> Sizes:
    return shape[0], shape[2], shape[1], shape[3]


def _is_legal(q: Sizes, k: Sizes, v: Sizes) -> bool:
    return q[3] == k[3] and k[1] == v[1] and k[2] == v[2] and k[1] > 0 and q[1] % k[1] == 0


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _look(names: list[str]) -> str:
    return "looks" if len(names) == 1 else "look"


def _calls(names: list[str], call: str) -> str:
    return ", ".join(f"{name}.{call}" for name in names)
