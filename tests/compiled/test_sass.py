"""The search for registers that are unset or stale on some path, on small made-up listings."""

import pytest

from compiled.sass import early_reads, possibly_unset, spills_in_steps, stray_descriptors


def listing(*lines):
    """``nvdisasm -c``'s form; a line that ends in a colon is a label."""
    return "\n".join(line if line.endswith(":") else f"        /*{16 * n:04x}*/   {line} ;"
                     for n, line in enumerate(lines))


def test_spills_are_found_in_the_loops_over_keys_alone():
    step = ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "@P0 BRA `(.L_x_9)", ".L_x_8:", "MUFU.EX2 R0, R1")
    sass = listing("STL [R1], R9", ".L_x_0:", "STL [R1+0x4], R8", ".L_x_1:", *step, "LDL R3, [R1]",
                   "@!P2 LDL.LU R4, [R1]", "@P1 BRA `(.L_x_1)", "LDL R8, [R1+0x4]", "STSM.16.M88.4 [R5], R24",
                   "@P1 BRA `(.L_x_0)", "EXIT", ".L_x_9:", "STL.64 [R1+0x8], R6", "BRA `(.L_x_8)")
    assert spills_in_steps(sass) == ["LDL R3, [R1]", "@!P2 LDL.LU R4, [R1]", "STL.64 [R1+0x8], R6"]
    assert spills_in_steps(sass) == spills_in_steps(sass.replace("STSM.16.M88.4", "@P2 STG.E.64"))
    assert spills_in_steps(sass.replace("MUFU.EX2", "MUFU.RCP")) == []


def test_what_is_read_before_the_thread_that_drew_it_has_come_back_is_found():
    drawn = ("BSSY B0, `(.L_x_1)", "@P0 BRA `(.L_x_0)", "@P1 ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR60][R4.64], R7",
             ".L_x_0:")
    behind = ("@!P0 STS [UR4], R5", "NOP", "LDS R6, [UR4]", "LDS R7, [UR5]", ".L_x_1:", "EXIT")
    assert early_reads(listing(*drawn, *behind)) == ["LDS R6, [UR4]"]
    assert early_reads(listing(*drawn, "BSYNC B0", *behind)) == []
    assert early_reads(listing(*behind)) == []


def test_a_register_set_in_front_of_a_loop_that_may_be_skipped_is_found():
    sass = listing("S2R R0, SR_TID.X", "ISETP.NE.AND P0, PT, R0, RZ, PT", "@!P0 BRA `(.L_x_1)", "UMOV UR5, URZ",
                   ".L_x_0:", "UIADD3 UR4, UR5, 0x1, URZ", "@P0 BRA `(.L_x_0)",
                   ".L_x_1:", "ULEA UR6, UR5, UR5, 0x2", "EXIT")
    assert possibly_unset(sass) == {"UR5": "ULEA UR6, UR5, UR5, 0x2"}
    assert possibly_unset(sass.replace("@!P0 BRA `(.L_x_1)", "NOP")) == {}


@pytest.mark.parametrize(("before", "reader", "unset"), [
    ("UMOV UR4, URZ", "UIADD3.64 UR6, UR4, 0x2, URZ", {"UR5"}),
    ("LDS.128 R4, [0x10]", "STS.128 [0x20], R4", set()),
    ("LDS.64 R4, [0x10]", "STS.128 [0x20], R4", {"R6", "R7"}),
    ("UIADD3 UR4, UP0, UR9, 0x2, URZ", "UIADD3.X UR5, UR4, URZ, URZ, UP0, !UPT", {"UR9"}),
    ("ULDC.64 UR4, c[0x0][0x20]", "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT", {"UR6", "UR7"}),
    ("ULDC.64 UR6, c[0x0][0x20]", "HGMMA.64x8x16.F32.BF16 R24, R0, gdesc[UR4].tnspB, RZ, !UPT",
     {"R0", "R1", "R2", "R3"}),
    ("ULDC.64 UR6, c[0x0][0x20]", "@UP1 ULEA UR8, UR6, UR7, 0x1", {"UP1"}),
    ("PRMT R4, RZ, 0x7610, R4", "PRMT R4, R4, 0x5410, RZ", set()),
    ("NOP", "PRMT R4, R5, 0x7610, R4", {"R5"}),
    ("NOP", "PRMT R4, R5.reuse, 0x7632, R4", {"R5"}),
    ("NOP", "PRMT R4, R5, 0x7632, R6", {"R5", "R6"}),
    ("LDSM.16.M88.4 R4, [0x10]", "STS.128 [0x20], R4", set()),
    ("REDUX.MAX.S32 UR4, R0", "UIADD3 UR5, UR4, 0x1, URZ", {"R0"}),
    ("RED.E.ADD.STRONG.GPU desc[UR4][R2], R0", "UIADD3 UR6, UR5, 0x1, URZ", {"R0", "R2", "UR4", "UR5"}),
    ("LDSM.16.M88.2 R4, [0x10]", "STS.128 [0x20], R4", {"R6", "R7"}),
    ("LDSM.16.M88 R4, [0x10]", "STS.64 [0x20], R4", {"R5"}),
    ("NOP", "PRMT R4, RZ, 0x5410, R4", {"R4"}),
    ("R2P PR, R14.B1, 0x6", "SEL R21, RZ, 0x1fffe, P1", {"R14"}),
    ("R2P PR, R14.B1, 0x18", "SEL R21, RZ, 0x1fffe, P1", {"R14", "P1"}),
])
def test_wide_operands_predicates_and_descriptors_of_products_count(before, reader, unset):
    assert set(possibly_unset(listing(before, reader, "EXIT"))) == unset


def test_every_target_of_an_indirect_branch_is_followed():
    sass = listing("MOV R2, RZ", 'BRX R2 -0x280 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', ".L_x_0:", "IADD3 R3, R2, R2, R2",
                   ".L_x_1:", "IADD3 R4, R3, R2, R2", "EXIT")
    assert possibly_unset(sass) == {"R3": "IADD3 R4, R3, R2, R2"}


def test_a_copy_of_what_is_unset_is_no_use_but_unset_too():
    used = listing("R2UR UR16, R11", "IMAD.U32 R9, RZ, RZ, UR16", "MOV R8, R9", "IADD3 R7, R8, RZ, RZ", "EXIT")
    assert possibly_unset(used) == {"R8": "IADD3 R7, R8, RZ, RZ"}
    saved = listing("R2UR UR16, R11", "@UP3 UMOV UR16, URZ", "STS [UR16], RZ", "EXIT")
    assert set(possibly_unset(saved)) == {"UP3"}


LOOPS = ("ULDC.64 UR4, c[0x0][0x210]", "UIADD3.64 UR6, UR4, 0x2, URZ", "{before}", "@!P0 BRA `(.L_x_1)", "{first}",
         ".L_x_0:", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", "@P1 BRA `(.L_x_0)",
         ".L_x_1:", "{second}", "HGMMA.64x128x16.F32.BF16 R24, {operands}, R24", "@P1 BRA `(.L_x_1)", "EXIT")
LEFT, RIGHT = "UIADD3.64 UR8, UR4, 0x6, URZ", "UIADD3.64 UR10, UR4, 0x4, URZ"


def strays(before="NOP", first="NOP", second="NOP", operands="gdesc[UR8]"):
    fields = {"before": before, "first": first, "second": second, "operands": operands}
    return stray_descriptors(listing(*(part for line in LOOPS for part in line.format_map(fields).split("; "))))


def test_descriptors_made_before_both_loops_or_in_the_one_that_reads_them_are_no_strays():
    assert strays(before=f"{LEFT}; {RIGHT}") == strays(before=LEFT, second=RIGHT) == []
    assert strays(second=RIGHT, operands="R88, gdesc[UR8].tnspB") == [], "the left operand lies in registers"


def test_descriptors_made_in_front_of_a_loop_that_may_be_skipped_are_strays():
    stray = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"]
    assert strays(before=LEFT, first=RIGHT) == stray, "on one path there are none"
    assert strays(before=f"{LEFT}; {RIGHT}", first=RIGHT) == stray, "and here others, as no register is unset"
    assert strays(second=RIGHT) == stray, "the left operand has none"
    assert strays(before=f"{LEFT}; {RIGHT}", second="@P2 " + RIGHT) == stray, "made at times"


def test_descriptors_that_are_saved_and_restored_are_no_strays():
    save, restore = "MOV R18, UR8; MOV R19, UR9", "R2UR UR8, R18; R2UR UR9, R19"
    assert strays(before=f"{LEFT}; {RIGHT}; {save}", first=f"UMOV UR8, URZ; UMOV UR9, URZ; {restore}") == []
    stray = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"]
    assert strays(before=f"{LEFT}; {RIGHT}; {save}", first=f"MOV R19, RZ; {restore}") == stray, "another is restored"


def test_a_product_that_no_path_leads_to_is_a_stray():
    product = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
    made = [f"ULDC.64 {register}, c[0x0][0x210]" for register in ("UR4", "UR6")]
    sass = listing(*made, "BRA `(.L_x_0)", product, ".L_x_0:", "EXIT")
    assert stray_descriptors(sass) == [product]
    assert stray_descriptors(sass.replace("BRA", "@P0 BRA")) == []
