"""The reader of machine code finds a product whose descriptor is not defined on every path, and no other."""

from kernels.sass import stray_descriptors

LOOPS = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/                   UMOV UR5, 0x40000040 ;
        /*0020*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;
{before}
        /*0030*/              @!P0 BRA `(.L_x_1) ;
{first}
.L_x_0:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
{second}
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, {operands}, R24 ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
"""
MAKES = "        /*0040*/                   UIADD3.64 UR10, UR4, 0x4, URZ ;"
LEFT = "        /*0020*/                   UIADD3.64 UR8, UR4, 0x6, URZ ;"


def read(before="", first="", second="", operands="gdesc[UR8]"):
    return stray_descriptors(LOOPS.format(before=before, first=first, second=second, operands=operands))


def test_descriptors_made_before_both_loops_or_in_the_one_that_reads_them_are_found():
    assert read(before=LEFT + "\n" + MAKES) == read(before=LEFT, second=MAKES) == []
    assert read(second=MAKES, operands="R88, gdesc[UR8].tnspB") == [], "the left operand lies in registers"


def test_descriptors_made_in_front_of_a_loop_that_may_be_skipped_are_strays():
    stray = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 "]
    assert read(before=LEFT, first=MAKES) == stray, "on one path there are none"
    assert read(before=LEFT + "\n" + MAKES, first=MAKES) == stray, "and here others"
    assert read(second=MAKES) == stray, "the left operand has none"
    at_times = MAKES.replace("     UIADD3", "@P2  UIADD3")
    assert read(before=LEFT + "\n" + MAKES, second=at_times) == stray


def test_a_jump_by_table_reaches_its_targets():
    text = LOOPS.format(before=LEFT + "\n" + MAKES, first="", second="", operands="gdesc[UR8]")
    text = text.replace("@!P0 BRA `(.L_x_1) ;", """BRX R2 -0x190   (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);""")
    assert stray_descriptors(text) == []
    assert len(stray_descriptors(text.replace(",.L_x_1", "").replace("@P1 BRA", "BRA"))) == 1, "nothing leads there"
