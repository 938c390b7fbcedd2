"""Registers that SASS may read before it has set them, and descriptors of products that depend on the path.

ptxas 12.8 has computed what two loops share in front of the first of them alone, though that one may be skipped
(tilewise.kernels.hopper.pipeline.optimization_barrier). Such a kernel compiles without a word and multiplies the wrong
tiles. Along every path through the code, what an instruction reads must have been written; and what a product finds its
tiles by, by the same instruction on all of them.

Knows the instructions that Hopper kernels are made of, and of a wide one its neighbours too; what it does not know it
takes for writing its first operand and reading the rest.
"""

import re
from collections import Counter
from functools import lru_cache
from itertools import chain

_REGISTER = re.compile(r"(?<![A-Z0-9_])(UR|R|UP|P)(\d+)")
_WORDS = {"64": 2, "128": 4}
# Writes no register, whatever comes first.
_READERS = re.compile(r"(ST|BAR|BRA|BRX|EXIT|RED(?!UX)|UTMA|WARPGROUP|DEPBAR|FENCE|MEMBAR|NOP|WARPSYNC|CCTL|YIELD|RET)")
_PREDICATES = re.compile(r"U?P(\d|T)")
# Hands on what may be unset too: ptxas saves uniform registers around code that sets them under a predicate.
_COPY = re.compile(r"(@!?U?P\d+\s+)?(?:U?MOV|R2UR|IMAD\.MOV\.U32|IMAD\.U32)\s+(U?R\d+),(?: RZ, RZ,)? (U?R\d+)")
_SETS_PREDICATES_ALONE = ("ISETP", "FSETP", "UISETP", "PLOP3", "UPLOP3")


def possibly_unset(sass):
    """Return {register: first instruction that may read it unset} of ``nvdisasm -c``'s output."""
    code, successors = _flow(sass)
    effects = [_effects(text) for text in code]

    def step(index, known):
        after = known | effects[index][1]
        copy = _COPY.fullmatch(code[index])
        return after - {copy[2]} if copy and copy[3] not in known else after

    found = {}
    before = _reaching(successors, frozenset(), step, frozenset.intersection)  # what is set on every path
    for index, text in enumerate(code):
        if before[index] is not None and not _COPY.fullmatch(text):
            for register in effects[index][0] - before[index]:
                found.setdefault(register, text)
    return found


def stray_descriptors(sass):
    """Return the products whose descriptors have several definitions, or on some path none.

    A register that held something else before is set on every path, and yet a product may read what is stale. Where
    nothing was moved, each register of a descriptor has one definition wherever it is used; what was saved in another
    register and restored from there keeps its own.
    """
    code, successors = _flow(sass)
    effects = [_effects(text) for text in code]
    copies = [_COPY.fullmatch(text) for text in code]
    products = {index: {register for register in effects[index][0] if register.startswith("UR")}
                for index, text in enumerate(code) if _operation(text).startswith("HGMMA")}
    watched = set().union(*products.values())
    watched |= {copy[3] for copy in copies if copy and copy[2] in watched}
    watched |= {copy[3] for copy in copies if copy and copy[2] in watched}  # from where it was saved
    written = [watched & effect[1] for effect in effects]

    def step(index, known):
        if not written[index]:
            return known
        copy, after = copies[index], dict(known)
        for register in written[index]:
            kept = known[register] if code[index].startswith("@") else frozenset()
            after[register] = kept | (known[copy[3]] if copy and copy[3] in watched else {index})
        return after

    def join(known, after):
        return {register: known[register] | after[register] for register in watched}

    unset = -1
    before = _reaching(successors, dict.fromkeys(watched, frozenset([unset])), step, join)
    return [code[index] for index, registers in products.items() if before[index] is None or any(
        len(before[index][register]) > 1 or unset in before[index][register] for register in registers)]


def spills_in_steps(sass):
    """Return what the loops over keys read from the stack or write there.

    Such a loop multiplies and makes exponentials, and unlike that over tiles it writes no results (STSM, STG).
    """
    code, successors = _flow(sass)
    ways = [[after for after in following if not _operation(code[after]).startswith(("STSM", "STG"))]
            for following in successors]
    steps = [loop for loop in _loops(ways) if all(any(name in code[index] for index in loop)
                                                  for name in ("HGMMA", "MUFU.EX2"))]
    return [code[index] for loop in steps for index in sorted(loop) if re.match(r"(@\S+ )?(LDL|STL)", code[index])]


def early_reads(sass):
    """Return what reads, behind an atomic addition of one thread, its result before the warp is together again.

    The thread hands the result to the others through shared memory. ptxas 12.8 has dropped the barrier between writing
    and reading it, and joined the warp far behind both.
    """
    found, drawn, together = [], False, False
    for text in _flow(sass)[0]:
        name = _operation(text)
        if name.startswith("ATOMG"):
            drawn, together = True, False
        elif name.startswith(("BSYNC", "WARPSYNC", "BAR")):
            together = True
        elif name.startswith("LDS") and drawn:
            found += [] if together else [text]
            drawn = False
    return found


def _loops(successors):
    """Sets of instructions that are reached from one another, two at least (Kosaraju's algorithm)."""
    finished, seen = [], set()
    for root in range(len(successors)):
        if root not in seen:
            seen.add(root)
            path = [(root, iter(successors[root]))]
            while path:
                index, following = path[-1]
                after = next((after for after in following if after not in seen), None)
                if after is None:
                    finished.append(path.pop()[0])
                else:
                    seen.add(after)
                    path.append((after, iter(successors[after])))
    before = [[] for _ in successors]
    for index, following in enumerate(successors):
        for after in following:
            before[after].append(index)
    found, placed = [], set()
    for root in reversed(finished):
        if root not in placed:
            waiting, loop = [root], set()
            placed.add(root)
            while waiting:
                index = waiting.pop()
                loop.add(index)
                new = set(before[index]) - placed
                placed |= new
                waiting += new
            if len(loop) > 1:
                found.append(loop)
    return found


def _reaching(successors, start, step, join):
    """What is known before each instruction, joined over all paths that lead there; None where none does."""
    before = [None] * len(successors)
    before[0] = start
    ways_in = Counter([0, *chain.from_iterable(map(set, successors))])
    waiting = [0]
    while waiting:
        index = waiting.pop()
        after = step(index, before[index])
        for successor in successors[index]:
            # Most instructions follow one other alone, and nothing is joined there.
            first = ways_in[successor] == 1 or before[successor] is None
            known = after if first else join(before[successor], after)
            if known != before[successor]:
                before[successor] = known
                waiting.append(successor)
    return before


@lru_cache(1)  # the checks look at one kernel after another
def _flow(sass):
    """Return the instructions, and for each those that may come next."""
    code, labels = _parse(sass)
    return code, [_successors(index, text, labels, len(code)) for index, text in enumerate(code)]


@lru_cache(1)
def _parse(sass):
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels


def _successors(index, text, labels, end):
    guarded, body = text.startswith("@"), _operation(text)
    name = body.split()[0].split(".")[0]
    after = [index + 1] if index + 1 < end else []
    if name in ("BRA", "BRX"):
        targets = [labels[label] for label in re.findall(r"\.L_\w+", text)]
        conditional = guarded or re.match(r"BRA\S*\s+!?U?P\d", body)
        return targets + (after if conditional else [])
    return after if guarded or name not in ("EXIT", "RET") else []


def _operation(text):
    """An instruction without its guard."""
    return re.sub(r"^@\S+\s+", "", text)


@lru_cache(2**14)  # of a kernel's instructions
def _effects(text):
    """Return the registers that an instruction reads and those that it writes."""
    guard = re.match(r"@!?(U?P\d)\s", text)
    operation, _, rest = _operation(text).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")] if rest else []
    name, *qualifiers = operation.split(".")
    if name == "HGMMA":
        reads, writes = _product(operation, operands)
    elif name == "USETMAXREG":
        reads, writes = set(), _of(operands[0], 1)
    elif name == "R2P":  # the bits of a register as predicates, those of the mask
        reads = {f"R{number}" for number in re.findall(r"R(\d+)", operands[1])}
        writes = {f"P{i}" for i in range(7) if int(operands[2], 0) >> i & 1}
    elif name == "LOP3" and operands[0] == operands[1]:
        reads, writes = set(), _of(operands[0], 1)  # predicates packed into one register, bit by bit
    elif name == "PRMT" and operands[2] in ("0x7610", "0x7632") and operands[0] == operands[3]:
        reads, writes = _of(operands[1], 1), _of(operands[0], 1)  # 16 bits, the upper half left as it was
    else:
        reads, writes = _plain(name, qualifiers, operands)
    return reads | ({guard[1]} if guard else set()), writes


def _plain(name, qualifiers, operands):
    writes, first = set(), 0
    if not _READERS.match(name):
        while first < len(operands) and _PREDICATES.fullmatch(operands[first]) and (
                first == 0 or name in (*_SETS_PREDICATES_ALONE, "ELECT", "VOTE", "VOTEU", "SYNCS")) and first < 2:
            writes |= _of(operands[first], 1)
            first += 1
        if name not in _SETS_PREDICATES_ALONE and first < len(operands) and re.match(r"U?R", operands[first]):
            writes |= _of(operands[first], _width(name, qualifiers))
            first += 1
            while name not in ("SEL", "USEL", "FSEL") and first < len(operands) and _PREDICATES.fullmatch(
                    operands[first]) and not operands[first].endswith("T"):
                writes |= _of(operands[first], 1)
                first += 1
    reads = {f"{kind}{number}" for operand in operands[first:] for kind, number in _REGISTER.findall(operand)}
    wide = max([_WORDS.get(word, 1) for word in qualifiers], default=1)
    if name == "UIADD3":
        for operand in operands[first:]:
            reads |= _of(operand, wide)
    elif name in ("STL", "STS", "STG"):
        reads |= _of(operands[-1], wide)
    return reads, writes


def _width(name, qualifiers):
    if name == "CS2R":
        return 1 if "32" in qualifiers else 2
    if "WIDE" in qualifiers:
        return 2
    if name == "LDSM":
        return max([int(word) for word in qualifiers if word in ("2", "4")], default=1)
    if name in ("UIADD3", "UMOV", "MOV", "S2UR", "LDL", "LDS", "LDG", "LDC", "ULDC"):
        return max([_WORDS.get(word, 1) for word in qualifiers], default=1)
    return 1


def _product(operation, operands):
    """wgmma: 64 by n sums; descriptors in four uniform registers, the left one's first, unless that is in registers."""
    sums = _of(operands[0], int(re.search(r"64x(\d+)x", operation)[1]) // 2)
    left, *others = operands[1:]
    reads = set()
    if left.startswith("gdesc"):
        reads |= _of(left[6:], 4)
    else:
        start = re.search(r"gdesc\[UR(\d+)", others[0])
        reads |= _of(left, 4) | {f"UR{int(start[1]) + word}" for word in (2, 3)}
    if "!UPT" not in operands:
        reads |= sums
    return reads, sums


def _of(operand, count):
    """The registers that an operand begins with."""
    found = re.match(r"[-!|~]*(UR|R|UP|P)(\d+)", operand)
    return {f"{found[1]}{int(found[2]) + word}" for word in range(count)} if found else set()
