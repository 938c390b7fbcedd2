"""Builds of the kernels in which one group of warps at a time is late at every barrier.

A race shows where somebody is late who never was. So PTX is rewritten on its way from Triton to the assembler: each
instruction that waits, arrives, or asks for a copy gets a delay in front of it and one behind it. Whose delays last,
and how long, stands in constant memory and is set between launches: a kernel is compiled once, and its results with one
role late are compared with those of the same machine code with nobody late. The sources know nothing of it, and what
Triton makes of them is unchanged without :func:`install`.

A role is what one function of ``gl.warp_specialize`` runs on: the first one's warps are 0 to 3, and which the others
have stands in the table that a kernel hands to its waiting warps. In a kernel without that, each warp is one.
"""

import re
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

WORDS = "tilewise_delays"  # first warp, how many, cycles of a delay, mask of the programs' numbers: 0: all of them
COUNT = "tilewise_delays_taken"  # by each thread
DECLARED = f".visible .const .align 4 .b32 {WORDS}[4];\n.visible .global .align 4 .b32 {COUNT};\n"
# What orders warps, and a copy's request: what comes too early or too late with it is what a barrier is there for.
_ORDERS = re.compile(r"\b(mbarrier\.(?:try_wait|test_wait|arrive)|bar\.(?:sync|arrive)|barrier\.sync|"
                     r"cp\.async\.bulk\.(?:tensor|reduce|wait_group)|cp\.async\.wait|cp\.reduce|griddepcontrol|"
                     r"(?:ld\.acquire|st\.release)\.gpu)")
_BEGIN, _END = "// begin inline asm", "// end inline asm"
DELAY = f"""\t// a delay
{{
	.reg .pred late_warp, late_program, goes_on;
	.reg .b32 late_first, late_count, late_cycles, late_mask, late_begin, late_now;
	ld.const.b32 late_first, [{WORDS}];
	ld.const.b32 late_count, [{WORDS}+4];
	mov.u32 late_now, %tid.x;
	shr.u32 late_now, late_now, 5;
	sub.u32 late_now, late_now, late_first;
	setp.lt.u32 late_warp, late_now, late_count;
	ld.const.b32 late_mask, [{WORDS}+12];
	mov.u32 late_now, %ctaid.x;
	and.b32 late_now, late_now, late_mask;
	setp.eq.and.u32 late_program, late_now, 0, late_warp;
	@!late_program bra late_end;
	red.global.add.u32 [{COUNT}], 1;
	ld.const.b32 late_cycles, [{WORDS}+8];
	mov.u32 late_begin, %clock;
late_loop:
	nanosleep.u32 100;
	mov.u32 late_now, %clock;
	sub.u32 late_now, late_now, late_begin;
	setp.lt.u32 goes_on, late_now, late_cycles;
	@goes_on bra late_loop;
late_end:
}}
"""


class Role(NamedTuple):
    """Warps of a kernel that do one thing: the first one's number, and how many they are."""

    first: int
    count: int


def partitions_of(ttgir: str) -> int:
    """Return how many functions a kernel runs on further warps, beside the first of ``gl.warp_specialize``."""
    return len(re.findall(r"^\s*partition\d+\(", ttgir, re.MULTILINE))


def roles_of(ptx: str, partitions: int) -> list[Role]:
    """Return the roles of a kernel, in the order of ``gl.warp_specialize``; without partitions each warp.

    Before a kernel starts its other warps it writes a byte for each, from number 4 on, which it waits at a barrier to
    read: the number of its partition. Those behind the last partition's do nothing, but fill a warpgroup up.
    """
    if not partitions:
        threads = re.search(r"\.reqntid (\d+)", ptx)
        if threads is None:
            raise ValueError("the PTX does not say how many threads a block has")
        return [Role(warp, 1) for warp in range(int(threads[1]) // 32)]
    read = re.search(r"barrier\.sync\s+1;\n(?:.*\n){0,3}?\s*ld\.shared\.[bus]8\s+%\w+, \[%\w+\+(\d+)\];", ptx)
    if read is None:
        raise ValueError("the PTX does not read a warp's partition where it was expected to")
    numbers = _bytes_at(ptx, int(read[1]) + 4)  # a warp adds its own number, and the first one is 4
    found = [Role(0, 4)]
    for i in range(partitions):
        warps = [4 + warp for warp, number in enumerate(numbers) if number == i]
        if not warps or warps != list(range(warps[0], warps[0] + len(warps))):
            raise ValueError(f"partition {i} has the warps {warps}")
        found.append(Role(warps[0], len(warps)))
    return found


def _bytes_at(ptx: str, place: int) -> list[int]:
    """Return the bytes that are first written to shared memory from a place on."""
    found: list[int] = []
    for address, values in re.findall(r"st\.shared\.(?:v[24]\.)?b32\s+\[global_smem\+(\d+)\], \{?([-\d, ]+)\}?;", ptx):
        if int(address) == place + len(found):
            for value in values.split(","):
                found += (int(value) & 0xFFFFFFFF).to_bytes(4, "little")
    return found


def with_delays(ptx: str) -> str:
    """Return PTX in which every ordering instruction has a delay on either side; of two in a row, one between them."""
    made, lines, place = [], ptx.splitlines(keepends=True), 0
    delayed = False  # no instruction since the last delay
    while place < len(lines):
        unit = [lines[place]]
        if lines[place].strip() == _BEGIN:
            while lines[place].strip() != _END:
                place += 1
                unit.append(lines[place])
        place += 1
        code = "".join(line.split("//")[0] for line in unit)
        if _ORDERS.search(code):
            made += [*([] if delayed else [DELAY]), *unit, DELAY]
            delayed = True
        else:
            made += unit
            delayed = delayed and (not code.strip() or code.lstrip().startswith((".loc", "$L__tmp")))
    if DELAY not in made:
        return ptx
    text = "".join(made)
    start = text.index(".visible .entry")
    return text[:start] + DECLARED + text[start:]


def words(role: Role | None, cycles: int, mask: int = 0) -> bytes:
    """Return what constant memory holds while a role is late, or nobody."""
    return struct.pack("<4I", *(role or (0, 0)), cycles, mask)


def install(names: Collection[str], found: Callable[[str, str, int], None]) -> None:
    """Have Triton build kernels of these names with delays, in a process whose caches are its own.

    found: called with the name, the PTX as it was, and the partitions of each that is compiled.
    """
    from triton import knobs

    def inspect(backend=None, stages=None, options=None, language=None, capability=None):
        if stages is None:  # Triton asks for what tells these builds from others in its caches
            return "delays", "delays"
        lower, assemble = stages["llir"], stages["cubin"]
        partitions = 0

        def llir(module, metadata):
            nonlocal partitions
            partitions = partitions_of(str(module))
            return lower(module, metadata)

        def cubin(ptx, metadata):
            if metadata["name"] not in names:
                return assemble(ptx, metadata)
            found(metadata["name"], ptx, partitions)
            return assemble(with_delays(ptx), metadata)

        stages["llir"], stages["cubin"] = llir, cubin
        return None

    knobs.runtime.add_stages_inspection_hook = inspect
