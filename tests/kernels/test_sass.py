"""The search for registers that are read before they are set, on small made-up listings."""

import pytest

from kernels.sass import possibly_unset


def listing(*lines):
    """``nvdisasm -c``'s form; a line that ends in a colon is a label."""
    return "\n".join(line if line.endswith(":") else f"        /*{16 * n:04x}*/   {line} ;"
                     for n, line in enumerate(lines))


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
