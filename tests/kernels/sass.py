"""Which definitions reach the descriptors of warpgroup products, in machine code as nvdisasm prints it.

A product finds its shared-memory operands through descriptors in uniform registers. ptxas 12.8 was seen to compute what
two loops share in front of the first of them alone, though that one may be skipped (tilewise.kernels.gluon.pipeline):
the second then reads what happens to be in the register. Where no such thing happened, each of these registers has one
definition wherever it is used.
"""

import re
from collections import deque

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@(!?U?P[T0-9]+)\s+)?(.*?);(.*)")
_PRODUCT = re.compile(r"HGMMA\S*\s+R\d+,\s*(R\w+,\s*)?gdesc\[UR(\d+)\]")
_TARGET = re.compile(r"\.L_x_\d+")
# What names a uniform register first and only reads it.
_READERS = ("HGMMA", "UTMA", "SYNCS", "BAR", "BRA", "WARPGROUP", "UISETP", "USETMAXREG", "UCGABAR", "ST", "LDS")
_UNSET = -1


def stray_descriptors(text):
    """Return the products of a kernel whose descriptors have several definitions, or on some path none."""
    instructions, followers = _flow(text)
    defined = [_defined(operation) for _, operation in instructions]
    products = {i: _registers(match) for i, (_, operation) in enumerate(instructions)
                if (match := _PRODUCT.match(operation))}
    watched = {register for registers in products.values() for register in registers}
    reaching = {0: {register: frozenset([_UNSET]) for register in watched}}
    waiting = deque([0])
    while waiting:
        i = waiting.popleft()
        after = dict(reaching[i])
        for register in watched.intersection(defined[i]):
            kept = after[register] if instructions[i][0] else frozenset()
            after[register] = kept | {i}
        for follower in followers[i]:
            known = reaching.get(follower)
            merged = after if known is None else {register: known[register] | after[register] for register in watched}
            if merged != known:
                reaching[follower] = merged
                waiting.append(follower)
    return [instructions[i][1] for i, registers in products.items() if i not in reaching or any(
        len(reaching[i][register]) > 1 or _UNSET in reaching[i][register] for register in registers)]


def _flow(text):
    """Return the instructions as (whether under a condition, operation), and for each those that may come next."""
    labels, instructions, tails = {}, [], []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append((found[1] not in (None, "PT", "UPT"), found[2]))
            tails.append(found[2] + found[3])
    followers = []
    for i, (conditional, operation) in enumerate(instructions):
        jumps = operation.startswith(("BRA", "BRX"))
        next_ones = [labels[name] for name in _TARGET.findall(tails[i]) if name in labels] if jumps else []
        conditional = conditional or bool(re.match(r"BRA\S*\s+!?U?P\d", operation))
        if not operation.startswith(("BRA", "BRX", "EXIT")) or conditional:
            next_ones.append(i + 1)
        followers.append([follower for follower in next_ones if follower < len(instructions)])
    return instructions, followers


def _defined(operation):
    """The uniform registers that an operation writes."""
    found = re.match(r"(\S+)\s+(?:!?U?P\w+,\s*)?UR(\d+)\b", operation)
    if found is None or operation.startswith(_READERS):
        return range(0)
    wide = 4 if ".128" in found[1] else 2 if ".64" in found[1] or ".WIDE" in found[1] else 1
    return range(int(found[2]), int(found[2]) + wide)


def _registers(match):
    """The registers of a product's descriptors: two of the left operand, unless it lies in registers, and two."""
    first = int(match[2])
    return range(first + 2 if match[1] else first, first + 4)
